"""From a conversation to a prompt.

A chat model is a text model that was trained on conversations written out in one particular format, its chat template.
Feed it any other format and it answers worse or never stops. The template travels with the tokenizer (a Jinja text);
where a tokenizer has none, ChatML is used, the format of the Qwen models:

    <|im_start|>user
    What is a KV cache?<|im_end|>
    <|im_start|>assistant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The prompt text of a conversation, ending where the assistant's answer begins.

    Raises:
        ValueError: a message without a role or content, or no message at all.
    """
    if not messages:
        raise ValueError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"a message is a dict with 'role' and 'content', got {message!r}")
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return chatml(messages)


def chatml(messages: Sequence[Message]) -> str:
    """A conversation in ChatML, open for the assistant's answer."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
