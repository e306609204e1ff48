"""Eight clients as their users install them, each by its defaults: chats, tools, structured output, scores, load.

A client that is not installed is skipped, with what installs it. `pytest -rP` prints the version of each that ran:
openai, langchain-openai, LiteLLM, instructor, pydantic-ai, llm, lm-evaluation-harness, GuideLLM.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Literal

import pytest
from serving import engine, served

from beyond import LLM
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_e_batching.scoring import score_prompts

pytest.importorskip("llguidance")

TOOLS = json.loads((TUTOR_PATH / "tools.json").read_text())
TIMES = [{"role": "user", "content": "What is 12 times 7?"}]
CALL = ("calculator", {"expression": "12*7"})
TOLD = "The calculator says 84."
QUESTION = "Which stage has a KV cache?"


def installed(package: str) -> ModuleType:
    """Import a client; the test is skipped if it is not installed."""
    name = re.sub(r"-slim|\[.*", "", package)
    module = pytest.importorskip(name.replace("-", "_"), reason=f"the client: pip install '{package}'")
    print(name, version(package.partition("[")[0]))
    return module


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return {"12*7": "84"}[expression]


llm = engine(LLM)
server = served()


@pytest.fixture(scope="module")
def stage():
    pydantic = pytest.importorskip("pydantic", reason="the clients need it")
    fields = {"stage": (Literal["A", "B", "C"], ...), "cached": (bool, ...)}
    return pydantic.create_model("Stage", __doc__="A stage of the course.", **fields)


@pytest.fixture
def address(server, monkeypatch):
    """Where the clients' own environment variables say that the server is."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def test_openais_parse_reads_the_arguments_of_a_strict_tool(address, stage):
    openai = installed("openai")
    ask = {"model": "tutor", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    ask |= {"tools": [openai.pydantic_function_tool(stage)], "tool_choice": "required", "parallel_tool_calls": False}
    with openai.OpenAI(max_retries=0, _strict_response_validation=True) as client:
        [call] = client.chat.completions.parse(**ask).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, stage)
        with client.chat.completions.stream(**ask) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchains_structured_output_is_an_object(address, stage, method):
    langchain = installed("langchain-openai")
    chat = langchain.ChatOpenAI(model="tutor", temperature=0, max_retries=0)
    assert isinstance(chat.with_structured_output(stage, method=method).invoke(QUESTION), stage)


def test_langchains_bound_tools_are_called_and_their_results_answered(address):
    langchain = installed("langchain-openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain.ChatOpenAI(model="tutor", temperature=0, max_retries=0).bind_tools(TOOLS)
    asked = [HumanMessage(TIMES[0]["content"])]
    message = chat.invoke(asked)
    [call] = message.tool_calls
    assert (call["name"], call["args"]) == CALL
    total, *pieces = chat.stream(asked)
    for piece in pieces:
        total += piece
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [CALL]
    assert chat.invoke([*asked, message, ToolMessage("84", tool_call_id=call["id"])]).content == TOLD


def test_instructor_gets_an_object(address, stage):
    instructor = installed("instructor")
    client = instructor.from_provider("openai/tutor")
    found = client.create(response_model=stage, messages=[{"role": "user", "content": QUESTION}], temperature=0)
    assert isinstance(found, stage)


def test_pydantic_ai_gets_an_object_and_runs_tools(address, stage):
    pydantic_ai = installed("pydantic-ai-slim[openai]")
    settings = {"temperature": 0}
    agent = pydantic_ai.Agent("openai-chat:tutor", output_type=stage, model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, stage)

    def calculator(expression: str) -> str:
        """Work out an arithmetic expression."""
        asked.append(expression)
        return "84"

    asked: list[str] = []
    agent = pydantic_ai.Agent("openai-chat:tutor", tools=[calculator], model_settings=settings)
    assert agent.run_sync(TIMES[0]["content"]).output == TOLD
    assert asked == ["12*7"]


def test_litellm_calls_tools_and_gets_an_object(address, stage, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for a list of prices
    litellm = installed("litellm")
    ask = {"model": "openai/tutor", "temperature": 0, "num_retries": 0, "drop_params": True}
    message = litellm.completion(messages=TIMES, tools=TOOLS, tool_choice="auto", **ask).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == CALL
    told = [*TIMES, message, {"role": "tool", "tool_call_id": call.id, "content": "84"}]
    assert litellm.completion(messages=told, tools=TOOLS, **ask).choices[0].message.content == TOLD
    question = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(messages=question, response_format=stage, **ask).choices[0].message.content
    assert isinstance(stage.model_validate_json(answer), stage)


def test_llm_calls_tools_and_gets_an_object(address, server, stage, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    known = {"model_id": "course", "model_name": "tutor", "api_base": f"{server.url}/v1"}
    known |= {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([known]))  # JSON is YAML
    model = installed("llm").get_model("course")
    assert model.chain(TIMES[0]["content"], tools=[calculator], options={"temperature": 0}).text() == TOLD
    answer = model.prompt(QUESTION, schema=stage, temperature=0).text()
    assert isinstance(stage.model_validate_json(answer), stage)


ANSWERS = [("What is a KV cache? It keeps the", " keys and values"), ("What is a KV cache? It keeps the", " bananas")]


def test_lm_evaluation_harness_prefers_the_answer_that_the_model_prefers(server):
    installed("lm-eval[api]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    llm, url = server.llm.llm, f"{server.url}/v1/completions"
    model = LocalCompletionsAPI(base_url=url, model="tutor", tokenizer_backend="remote", batch_size=2)
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(ANSWERS)]
    found = model.loglikelihood(asked, disable_tqdm=True)
    for (context, answer), (value, is_greedy) in zip(ANSWERS, found, strict=True):
        ids, start = llm.tokenizer.encode(context + answer), len(llm.tokenizer.encode(context))
        [scores] = next(filter(None, score_prompts([ids], 1, llm.calls)))
        expected = [one[i] for i, one in zip(ids[start:], scores[start:], strict=True)]
        assert value == pytest.approx(sum(expected), abs=1e-3)
        assert is_greedy == all(next(iter(one)) == i for i, one in zip(ids[start:], scores[start:], strict=True))
    assert found[0][0] > found[1][0]


@pytest.mark.slow
def test_guidellm_measures_without_an_error(server, tmp_path):
    installed("guidellm")
    command = [sys.executable, "-c", "from guidellm.__main__ import cli; cli()", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=tutor"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TUTOR_PATH}", "--output", "kind=json,path=report.json"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] and not totals["errored"]
