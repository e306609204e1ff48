"""Random clients of a server: patient ones, clients that leave at any moment, and clients with invalid requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator

import httpx

from stage_a_naive.sampling import SamplingParams
from stage_e_batching import LLM

from .tally import Sample, Tally, resident_bytes

CLIENTS, CALLS = 24, 100  # at the same time; between two looks at the memory
END_SECONDS = 60.0
ASKED = ("What is a KV cache?", "What is prefill?", "Why is decoding slow?", "什么是键值缓存？")
BAD = (  # path, body, status
    ("/v1/completions", b'{"prompt": ', 400),
    ("/v1/completions", {"prompt": "x", "tools": [{}]}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400),
    ("/v1/completions", {"prompt": "x", "n": 1000}, 400),
    ("/v1/completions", {"prompt": [20] * 5000}, 400),
    ("/v1/completions", {"prompt": [10**9]}, 400),
    ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": "x"}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/detokenize", {"tokens": [-1]}, 400),
    ("/nowhere", {}, 404),
)

Question = tuple[str, dict[str, object], str]  # path, body, and the text of the greedy answer


def questions(llm: LLM, seed: int, most_tokens: int) -> list[Question]:
    """Make random prompts, some with shared prefixes, and conversations, with the answers that they get alone.

    Args:
        most_tokens: of an answer.
    """
    chance, limit, found = random.Random(seed), llm.max_model_len // 2, []
    bases = [[chance.randrange(10, llm.vocab_size) for _ in range(limit)] for _ in range(3)]
    for i in range(20):
        prompt = bases[i % 3][: chance.randrange(1, limit)] + [chance.randrange(10, llm.vocab_size) for _ in range(5)]
        max_tokens = chance.randrange(1, most_tokens)
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens), False)
        found.append(("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, output["text"]))
    for text in ASKED:
        messages = [{"role": "user", "content": text}]
        [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=most_tokens), False)
        found.append(("/v1/chat/completions", {"messages": messages, "max_tokens": most_tokens}, output["text"]))
    return found


class HttpSoak:
    """Random clients of one server.

    Args:
        url: of the server, without a path.
        pid: of its process, whose memory is looked at.
        num_blocks: in its pool.
        questions: what is asked, and how it must be answered.
    """

    def __init__(self, url: str, pid: int, num_blocks: int, questions: list[Question], seed: int) -> None:
        self.url, self.pid, self.num_blocks, self.questions = url, pid, num_blocks, questions
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.counters: dict[str, float] = {}

    async def run(self, minutes: float) -> None:
        """Send clients for this long, `CALLS` at a time; at the end, ask every question once more."""
        start = time.perf_counter()
        while True:
            await self.send(CALLS)
            if time.perf_counter() > start + 60 * minutes:
                break
            await self.note(time.perf_counter() - start)
        await self.ask_all()
        await self.note(time.perf_counter() - start)

    async def send(self, calls: int) -> None:
        """Send this many clients, `CLIENTS` at a time, and wait for all of them."""
        left = iter(range(calls))
        async with httpx.AsyncClient(base_url=self.url, timeout=END_SECONDS) as http:

            async def one_after_another() -> None:
                for _ in left:
                    kind = self.rng.choices((self._ask, self._sample, self._leave, self._be_wrong), (12, 3, 4, 2))[0]
                    await kind(http)

            await asyncio.gather(*(one_after_another() for _ in range(CLIENTS)))

    async def ask_all(self) -> None:
        """Send every question once, one after the other: after the whole load every answer must be correct."""
        async with httpx.AsyncClient(base_url=self.url, timeout=END_SECONDS) as http:
            for path, body, expected in self.questions:
                self._compare([text async for text in answers(http, path, body | {"temperature": 0})], expected)

    async def note(self, seconds: float) -> None:
        """Wait until the server has no requests left, and note its memory."""
        end = time.perf_counter() + END_SECONDS
        async with httpx.AsyncClient(base_url=self.url, timeout=END_SECONDS) as http:
            while True:
                text = (await http.get("/metrics")).text
                found = {
                    name: float(value)
                    for name, value in re.findall(r"^vllm:(\w+)\{[^},]*\} (\S+)$", text, re.MULTILINE)
                }
                left = found["num_requests_running"] + found["num_requests_waiting"]
                used = found["kv_cache_usage_perc"]
                if not (left or used) or time.perf_counter() > end:
                    break
                await asyncio.sleep(0.05)
            healthy = (await http.get("/health")).status_code == 200
        if not healthy:
            self.tally.unexpected.append("the server's last step broke off")
        if left:
            self.tally.unexpected.append(f"{left:g} requests were left with nobody waiting for them")
        used_blocks = round(used * self.num_blocks)
        self.tally.samples.append(Sample(seconds, self.tally.finished, resident_bytes(self.pid), 0, 0, used_blocks))
        self.counters = {name: value for name, value in found.items() if name.endswith("_total")}

    # ---- kinds of clients ---------------------------------------------------------------------------------------

    async def _ask(self, http: httpx.AsyncClient) -> None:
        path, body, expected = self.rng.choice(self.questions)
        ways = {"temperature": 0, "stream": self.rng.random() < 0.5, "n": self.rng.choice([1, 1, 1, 2, 4])}
        await self._read(http, path, body | ways, expected)

    async def _sample(self, http: httpx.AsyncClient) -> None:
        path, body, _ = self.rng.choice(self.questions)
        ways = {
            "temperature": self.rng.choice([0.5, 1.0]),
            "top_p": self.rng.choice([1.0, 0.9]),
            "repetition_penalty": self.rng.choice([1.0, 1.1]),
            "stop": self.rng.choice([None, ["e"]]),
            "stream": self.rng.random() < 0.5,
        }
        await self._read(http, path, body | ways, None)

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Send a request, and close the connection at any time: before the answer, in the middle, or just after it."""
        try:
            async with asyncio.timeout(self.rng.uniform(0, 1.5)):
                await self._ask(http)
        except TimeoutError:
            self.tally.aborted += 1

    async def _be_wrong(self, http: httpx.AsyncClient) -> None:
        path, body, status = self.rng.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        if response.status_code == status and response.json()["error"]["message"]:
            self.tally.refused += 1
        else:
            self.tally.unexpected.append(f"status {response.status_code} for {content[:80]!r}, not {status}")

    async def _read(self, http: httpx.AsyncClient, path: str, body: dict[str, object], expected: str | None) -> None:
        try:
            found = [text async for text in answers(http, path, body)]
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 429 and int(error.response.headers["retry-after"]) >= 1:
                self.tally.refused += 1
                await asyncio.sleep(0.2)
            else:
                self.tally.unexpected.append(f"status {error.response.status_code} for {str(body)[:80]}")
            return
        self.tally.finished += 1
        if len(found) != body.get("n", 1):
            self.tally.unexpected.append(f"{len(found)} answers to {str(body)[:80]}")
        if expected is not None:
            self._compare(found, expected)

    def _compare(self, found: list[str], expected: str) -> None:
        self.tally.compared += len(found)
        self.tally.different += sum(text != expected for text in found)


async def answers(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> AsyncIterator[str]:
    """Yield the texts of all answers to a request, streamed or not; raise `httpx.HTTPStatusError` if it is rejected."""
    if not body.get("stream"):
        response = (await http.post(path, json=body)).raise_for_status()
        for choice in response.json()["choices"]:
            yield choice["message"]["content"] if "message" in choice else choice["text"]
        return
    texts: dict[int, str] = {}
    ended: list[str] = []
    async with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                ended += [line] if line else []
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"]["content"] if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
    if ended != ["data: [DONE]"]:
        raise EOFError(f"a stream ended with {ended}")
    for index in sorted(texts):
        yield texts[index]
