"""An agent on one screen: a model, two tools, and a loop between them.

    python -m beyond.serving --engine beyond:LLM       # in another terminal: the tutor, with constrained decoding
    python beyond/serving/examples/agent.py "What is 12 times 7?" "What time is it in Paris?"

A model cannot compute. It can answer with a call: the name of a tool and its arguments. This program runs the tool,
adds the result to the conversation and asks again, until the answer is text. `strict` has the server constrain the
arguments to the schema, so reading them cannot fail. Whether they make sense is another matter: what a tool raises is a
result, too. The tutor knows few questions (`models/tutor/tool_calls.jsonl`) and three times, so its clock stands still.
"""

import argparse
import ast
import json
import operator
from pathlib import Path

from openai import OpenAI, OpenAIError

SCHEMAS = Path(__file__).parents[3] / "models" / "tutor" / "tools.json"  # names, descriptions, arguments
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TIMES = {"Paris": "14:05", "Tokyo": "21:30", "Cairo": "08:45", "巴黎": "14:05", "东京": "21:30", "开罗": "08:45"}
MOST_CALLS = 5  # a model may call the same tool forever


def calculator(expression: str) -> str:
    def value(node: ast.expr) -> float:  # `eval` would let any user of the model run any code here
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return ast.literal_eval(node)

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def clock(city: str) -> str:
    return TIMES[city]


FUNCTIONS = {"calculator": calculator, "clock": clock}


def answer(client: OpenAI, model: str, question: str) -> str:
    tools = json.loads(SCHEMAS.read_text())
    for tool in tools:
        tool["function"]["strict"] = True
    messages = [{"role": "user", "content": question}]
    for _ in range(MOST_CALLS):
        ask = {"model": model, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 400}
        message = client.chat.completions.create(**ask).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            try:
                result = FUNCTIONS[name](**json.loads(arguments))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            print(f"  {name} {arguments}: {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"no answer after {MOST_CALLS} calls"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a model that has a calculator and a clock.")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server's (default: %(default)s)")
    parser.add_argument("--model", default="tutor")
    options = parser.parse_args()
    with OpenAI(base_url=options.url, api_key="none") as client:
        for question in options.questions:
            print(question)
            try:
                print(f"  {answer(client, options.model, question)}")
            except OpenAIError as error:
                raise SystemExit(
                    f"error: {error} Is a server with the model {options.model} at {options.url}?"
                ) from None
