"""The JSON of answers: complete, or one chunk per token."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, repeat
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from beyond.serving.protocol import Ask
from beyond.serving.reasoning import ReasoningSplit
from beyond.serving.tool_calls import CallParser, error_in_calls
from stage_a_naive.contract.detokenize import IncrementalDecoder, placeholder
from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, Metrics, Request
from stage_e_batching.calls.mailbox import Token

MARK = "\0"  # where the text goes
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level BPE spells bytes

as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: json.dumps makes one per call


class Answer:
    """Writes the answer to one `Ask`; the fields common to all its messages are made once.

    Args:
        ask: the request.
        requests: one per choice.
        model: the model's name.
        tokenizer: writes out tokens if their log-probabilities are requested.
        splits_reasoning: whether to separate a chat's reasoning from its answer; structured output has no reasoning.

    Attributes:
        num_choices: choices of all prompts together.
    """

    def __init__(
        self,
        ask: Ask,
        requests: Sequence[Request],
        model: str,
        tokenizer: PreTrainedTokenizerFast,
        splits_reasoning: bool = False,
    ) -> None:
        kind, prefix = ("chat.completion", "chatcmpl") if ask.is_chat else ("text_completion", "cmpl")
        self._ask = ask
        self.num_choices = len(requests)
        self._prompts = [request.prompt_token_ids for request in requests]
        self._num_told: Counter[int] = Counter()  # tokens of each choice
        self._tokenizer = tokenizer
        name = f"{prefix}-{os.urandom(16).hex()}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if ask.is_chat else {})
        self._begun: set[int] = set()  # choices that have told a token; in a chat the first chunk tells the role
        self._around: dict[int, list[str]] = {}  # by choice: what comes before and behind the text
        self._decoders: dict[int, IncrementalDecoder] = {}  # by choice: say where a token begins in the text
        self._offsets: dict[int, int] = {}  # characters of each choice so far, told or held back
        self._splits: list[ReasoningSplit] = []  # of each choice
        if splits_reasoning and ask.is_chat and ask.params.structured_outputs is None:
            self._splits = [ReasoningSplit(text_of(prompt[-8:], tokenizer)) for prompt in self._prompts]
        self._calls: dict[int, CallParser] = {}  # by choice: find the calls of tools

    @property
    def constrains_calls(self) -> bool:
        """Tell whether a complete answer needs `checked`, which may take long."""
        return self._ask.tools is not None and self._ask.tools.grammar is not None

    def checked(self, output: GenerationOutput) -> GenerationOutput:
        """Return a complete answer, with an error if its constrained calls violate their schemas."""
        assert self._ask.tools is not None
        error = error_in_calls(self._ask.tools, output["text"]) if output["finish_reason"] == "stop" else None
        return output if error is None else {**output, "finish_reason": "error", "error": error}

    def whole(
        self,
        outputs: Sequence[GenerationOutput],
        tokens: Sequence[Sequence[Token]],
        scores: Sequence[PromptLogprobs] = (),
    ) -> dict[str, Any]:
        """Write the complete answer.

        Args:
            outputs: one for each choice.
            tokens: the tokens of each choice.
            scores: the log-probabilities of each prompt, if requested.
        """
        choices = []
        for index, output in enumerate(outputs):
            prompt, told, text = index // self._ask.n, tokens[index], output["text"]
            if self._ask.echo:
                given = self._ask.prompts[prompt]
                text = (given if isinstance(given, str) else text_of(given, self._tokenizer)) + text
                if scores:
                    told = [*map(Token, self._prompts[index], repeat(""), scores[prompt]), *told]
            content = {"message": self._message(index, text)} if self._ask.is_chat else {"text": text}
            logprobs, reason = self._logprobs(index, told), self._finish_reason(index, output["finish_reason"])
            choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
            choice["stop_reason"] = output.get("stop_reason")  # as in vLLM
            if self._ask.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(index, scores[prompt])
            choices.append(choice)
        return self._head | {"choices": choices, "usage": self.usage(outputs)}

    def chunk(
        self, index: int, token: Token | None, ended: GenerationOutput | None = None, error: dict | None = None
    ) -> str:
        """Write one token of choice `index` as JSON, even if its text is still empty; None writes only the end.

        Args:
            ended: the complete answer, with its last token.
            error: additional fields of a failed choice.
        """
        tells_role = self._ask.is_chat and index not in self._begun
        if self._ask.continuous_usage:
            self._num_told[index] += token is not None
        more = self._ask.params.logprobs is not None or self._ask.continuous_usage
        if ended or tells_role or more or self._splits or self._ask.tools is not None:
            chunk = self._chunk(index, token, ended)
            chunk["choices"][0] |= error or {}
            self._begun.add(index)
            return as_json(chunk)
        if index not in self._around:  # all others differ in their text alone: write the rest once
            self._around[index] = as_json(self._chunk(index, Token(0, MARK), None)).split(as_json(MARK))
        assert token is not None  # a chunk without one is an end
        before, behind = self._around[index]
        return f"{before}{as_json(token.text)}{behind}"

    def _chunk(self, index: int, token: Token | None, ended: GenerationOutput | None) -> dict[str, Any]:
        text = token.text if token else ""
        if self._ask.is_chat:
            role = {} if index in self._begun else {"role": "assistant"}
            content = {"delta": role | self._delta(index, text, ended is not None)}
        else:
            content = {"text": text}
        logprobs = self._logprobs(index, [token] if token else [])
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        if ended is not None:
            choice["finish_reason"] = self._finish_reason(index, ended["finish_reason"])
            choice["stop_reason"] = ended.get("stop_reason")
        usage: dict[str, Any] = {"usage": None} if self._ask.include_usage else {}
        if self._ask.continuous_usage:
            prompt, completion = len(self._prompts[index]), self._num_told[index]
            numbers = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            usage = {"usage": numbers}
        return self._chunk_head | {"choices": [choice]} | usage

    def _message(self, index: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": None} | self._delta(index, text, ends=True)
        for call in message.get("tool_calls", ()):
            del call["index"]  # which the pieces of a stream have
        return message

    def _delta(self, index: int, text: str, ends: bool) -> dict[str, Any]:
        """Return the new parts of a chat's answer: reasoning, text and tool calls.

        `reasoning_content` is for clients that only know the older name.
        """
        reasoning, text = self._splits[index].feed(text, ends) if self._splits else ("", text)
        thought = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
        tools = self._ask.tools
        if tools is None:
            return thought | {"content": text}
        if index not in self._calls:
            self._calls[index] = CallParser(tools.format, tools.several)
        return thought | self._calls[index].feed(text, ends)

    def _finish_reason(self, index: int, reason: str) -> str:
        """Return why an answer ended: `tool_calls` if it ended by itself after calling tools."""
        called = index in self._calls and self._calls[index].has_called
        return "tool_calls" if reason == "stop" and called else reason

    def usage_chunk(self, outputs: Sequence[GenerationOutput]) -> str:
        """Write the last chunk, as JSON, of a stream that reports its token counts."""
        return as_json(self._chunk_head | {"choices": [], "usage": self.usage(outputs)})

    def usage(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """Return the token counts. A prompt counts once, however many answers it gets."""
        of_prompts = [output["metrics"] for output in outputs[:: self._ask.n]]
        prompt = sum(metrics["num_prompt_tokens"] for metrics in of_prompts)
        completion = sum(output["metrics"]["num_generated_tokens"] for output in outputs)
        cached = sum(metrics["num_cached_tokens"] for metrics in of_prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        count = self._ask.params.logprobs
        if count is None:
            return None
        if self._ask.is_chat:
            return {"content": [self._chat_logprobs(token, count) for token in tokens]}
        written: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if index not in self._decoders:
                before = () if self._ask.echo else self._prompts[index]
                skip = self._ask.params.skip_special_tokens
                self._decoders[index] = IncrementalDecoder(self._tokenizer, before, skip)
            decoder = self._decoders[index]
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(decoder.append(token.token_id))
            written["tokens"].append(text_of([token.token_id], self._tokenizer))
            written["text_offset"].append(offset)
            if token.logprobs is None:  # the first token of a prompt: nothing is before it
                written["token_logprobs"].append(None)
                written["top_logprobs"].append(None)
                continue
            value = token.logprobs[token.token_id]
            written["token_logprobs"].append(value)
            top: dict[str, float] = {}
            likeliest = list(token.logprobs.items())[:count]
            for i, likely in [*likeliest, (token.token_id, value)]:  # of tokens that look alike the likeliest is told
                top.setdefault(text_of([i], self._tokenizer), likely)
            written["top_logprobs"].append(top)
        return written

    def _prompt_logprobs(self, index: int, scores: PromptLogprobs) -> list[dict[str, Any] | None]:
        """Write the log-probabilities of a prompt by token id, as vLLM does; only the likeliest tokens have a rank."""
        written: list[dict[str, Any] | None] = []
        for token_id, found in zip(self._prompts[index], scores, strict=True):
            if found is None:
                written.append(None)
                continue
            ranks = {i: rank for rank, i in enumerate(found, 1) if rank <= (self._ask.prompt_logprobs or 0)}
            written.append(
                {
                    str(i): {"logprob": value, "rank": ranks.get(i), "decoded_token": text_of([i], self._tokenizer)}
                    for i, value in found.items()
                    if i in ranks or i == token_id
                }
            )
        return written

    def _chat_logprobs(self, token: Token, count: int) -> dict[str, Any]:
        assert token.logprobs is not None
        likeliest = list(token.logprobs.items())[:count]  # the sampled token comes behind them
        others = [self._chat_token(i, value) for i, value in likeliest]
        return self._chat_token(token.token_id, token.logprobs[token.token_id]) | {"top_logprobs": others}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of([token_id], self._tokenizer)
        return {"token": text, "logprob": logprob, "bytes": bytes_of(token_id, text, self._tokenizer)}


def without_tokens(request: Request) -> GenerationOutput:
    """Make the output of a request that only asks about its prompt."""
    prompt = request.prompt_token_ids
    metrics = Metrics(
        prefill_time=0,
        decode_time=0,
        ttft=0,
        tpot=0,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
        num_generated_tokens=0,
        tokens_per_sec=0,
    )
    return GenerationOutput(
        prompt_index=request.prompt_index,
        index=request.answer_index,
        text="",
        token_ids=[],
        prompt_token_ids=prompt,
        finish_reason="length",
        metrics=metrics,
    )


def text_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> str:
    """Return token ids as text, with special tokens, and a placeholder for each unknown id."""
    backend = tokenizer.backend_tokenizer
    parts = []
    for known, group in groupby(ids, lambda i: backend.id_to_token(i) is not None):
        run = list(group)
        parts += [backend.decode(run, skip_special_tokens=False)] if known else map(placeholder, run)
    return "".join(parts)


def bytes_of(token_id: int, text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return a token's bytes, also for part of a character (U+FFFD in `text`), so that clients can join them."""
    token = tokenizer.backend_tokenizer.id_to_token(token_id) if "\ufffd" in text else text
    if token == text:
        return list(text.encode())
    assert token is not None  # an id that is not known has a placeholder
    if token.startswith("<0x"):  # byte fallback
        return [int(token[1:-1], 16)]
    return [BYTES[character] for character in token]
