"""What every engine of the course promises, in one place: six stages, several ranks, and the packages of `beyond`."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import SamplingParams
from stage_a_naive.outputs import Metrics

MODEL = "random:qwen2-tiny"
POOL = {"num_kvcache_blocks": 256, "kvcache_block_size": 8, "max_model_len": 2000}
STAGES = [
    "stage_a_naive",
    "stage_b_decode_step",
    "stage_c_fused_mlp",
    "stage_d_paged",
    "stage_e_batching",
    "stage_f_graph_tp",
]
PAGED = [*STAGES[3:], "beyond.quantization", "beyond.speculation", "beyond.scale_out"]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 16, 9, 48)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SEEDED = [SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=10, ignore_eos=True) for i in range(5)]


@dataclass(frozen=True)
class Engine:
    """One way to make an `LLM`."""

    package: str
    options: dict = field(default_factory=dict)

    @property
    def is_paged(self) -> bool:
        return self.package in PAGED

    def make(self, **options: object) -> NaiveLLM:
        chosen = (POOL if self.is_paged else {}) | self.options | options
        return importlib.import_module(self.package).LLM(MODEL, device="cpu", **chosen)


IN_ONE_PROCESS = {
    **{package: Engine(package) for package in STAGES},
    "8 bits": Engine("beyond.quantization", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "guesses": Engine("beyond.speculation"),
    "guesses of a model": Engine("beyond.speculation", {"speculation": "model", "draft_model": MODEL}),
}
SEVERAL_PROCESSES = {
    "two ranks": Engine("stage_f_graph_tp", {"tensor_parallel_size": 2}),
    "two stages": Engine("beyond.scale_out", {"pipeline_parallel_size": 2}),
}


def as_parameters(engines: dict[str, Engine]) -> list:
    needs_compiler = {"stage_c_fused_mlp": pytest.mark.compiler}
    return [pytest.param(engine, id=name, marks=needs_compiler.get(name, ())) for name, engine in engines.items()]


@pytest.fixture(scope="module", params=as_parameters(IN_ONE_PROCESS | SEVERAL_PROCESSES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param


@pytest.fixture(scope="module")
def llm(engine: Engine):
    made = engine.make()
    yield made
    made.close()


@pytest.fixture(scope="module")
def naive() -> NaiveLLM:
    return NaiveLLM(MODEL, device="cpu")


@pytest.fixture(scope="module")
def expected(engine: Engine, llm, naive: NaiveLLM) -> list[list[int]]:
    """Stage A's tokens; in 8 bits, which round, the same engine's for each prompt alone."""
    return answers_one_by_one(llm if engine.package == "beyond.quantization" else naive, GREEDY)


def ids(outputs: list) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def answers_one_by_one(llm, params: SamplingParams) -> list[list[int]]:
    return [ids(llm.generate([prompt], params, False))[0] for prompt in PROMPTS]


def test_greedy_tokens_are_stage_as_with_and_without_a_cached_prefix(engine: Engine, llm, expected: list) -> None:
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, GREEDY, False)) == expected
    outputs = llm.generate([PROMPTS[4]] * 3, GREEDY, False)
    assert ids(outputs) == [expected[4]] * 3
    cached = [output["metrics"]["num_cached_tokens"] for output in outputs]
    assert cached == [40] * 3 if engine.is_paged else cached == [0] * 3, "48 tokens, and the last block runs again"


def test_an_output_has_every_field_and_its_metrics_agree(llm) -> None:
    few = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    for prompt, n, output in zip(PROMPTS[:3], (1, 2, 3), llm.generate(PROMPTS[:3], few, False), strict=True):
        assert set(output) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "metrics"}
        assert output["prompt_token_ids"] == prompt and output["finish_reason"] == "length"
        metrics = output["metrics"]
        assert set(metrics) == set(Metrics.__annotations__)
        assert metrics["num_generated_tokens"] == len(output["token_ids"]) == n
        assert metrics["num_prompt_tokens"] == len(prompt) > metrics["num_cached_tokens"]
        assert 0 < metrics["prefill_time"] <= metrics["ttft"] and (metrics["tpot"] > 0) == (n > 1)
        assert metrics["tpot"] == (pytest.approx(metrics["decode_time"] / (n - 1)) if n > 1 else 0)
        total = metrics["prefill_time"] + metrics["decode_time"]
        assert metrics["tokens_per_sec"] == pytest.approx(n / total)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (["a", ""], GREEDY, "prompt 1 is empty"),
        ([[5], [4096]], GREEDY, "prompt 1: token id 4096 is outside the vocabulary of 4096"),
        ([[7] * 4096], GREEDY, r"prompt 0 has 4096 tokens; .* at most \d+ fit"),
        ([1, 2], GREEDY, "wrap it in a list"),
        (b"abc", GREEDY, "bytes first"),
        ([{"text": "abc"}], GREEDY, "prompt 0: a dictionary has 'prompt'"),
        (["a", "b", "c"], [GREEDY], "3 prompts but 1 sampling parameters"),
        ("a", "greedy", "sampling_params is a SamplingParams"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_request_is_refused_by_name_before_anything_runs(llm, prompts, params, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        llm.generate(prompts, params, False)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="content of a message is text"):
        llm.chat([{"role": "user", "content": None}], GREEDY, False)
    assert len(ids(llm.generate("hello", GREEDY, False))) == 1, "a string is one prompt"


def test_an_answer_ends_where_the_model_does(llm) -> None:
    [output] = llm.generate([[9] * (llm.max_model_len - 3)], GREEDY, False)
    assert len(output["token_ids"]) == 3 and output["finish_reason"] == "length"


def test_a_seeded_request_is_the_same_alone_and_in_company(engine: Engine, llm, naive: NaiveLLM) -> None:
    alone = [ids(llm.generate([prompt], [params], False))[0] for prompt, params in zip(PROMPTS, SEEDED, strict=True)]
    assert ids(llm.generate(PROMPTS, SEEDED, False)) == alone
    if engine.package != "beyond.quantization":
        assert alone == ids(naive.generate(PROMPTS, SEEDED, False))


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 5e-324}, {"top_p": 5e-324}, {"temperature": 1e-30, "top_k": 10**6, "top_p": 1e-40}, {"min_p": 1}],
    ids=str,
)
def test_the_narrowest_choice_is_the_best_token(llm, expected: list, extreme: dict) -> None:
    params = [GREEDY, SamplingParams(seed=1, max_tokens=10, ignore_eos=True, **extreme)]
    assert ids(llm.generate(PROMPTS[:2], params, False)) == expected[:2]


def test_logprobs_are_the_same_alone_and_beside_one_that_asks_for_more(llm) -> None:
    counts = (1, 9, None, 0, 3)
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=count) for count in counts]
    outputs = llm.generate(PROMPTS, params, False)
    assert ["logprobs" in output for output in outputs] == [True, True, False, True, True]
    for prompt, asked, output in zip(PROMPTS, params, outputs, strict=True):
        if asked.logprobs is not None:
            [alone] = llm.generate([prompt], asked, False)
            for step, same in zip(output["logprobs"], alone["logprobs"], strict=True):
                assert list(step) == list(same) and step == pytest.approx(same, abs=1e-4)
            assert all(token in step for token, step in zip(output["token_ids"], output["logprobs"], strict=True))


def test_streamed_pieces_join_to_the_text(llm) -> None:
    pieces = [""] * len(PROMPTS)
    outputs = llm.generate(PROMPTS, SEEDED, False, lambda i, piece: pieces.__setitem__(i, pieces[i] + piece))
    assert pieces == [output["text"] for output in outputs]


def fail(*_: object) -> None:
    raise LookupError("stop here")


def outside(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return torch.full((len(params),), logits.shape[-1])


@pytest.mark.parametrize(
    ("sampler", "error", "says"),
    [
        (fail, LookupError, "stop here"),
        (outside, ValueError, "token id 4096, outside the vocabulary of 4096"),
        (lambda logits, params: logits, ValueError, "must return a tensor of integer ids of shape"),
        (lambda logits, params: logits.argmax(-1).tolist(), ValueError, r"integer ids of shape \[\d\], got \[\d+"),
        (lambda logits, params: None, ValueError, r"integer ids of shape \[\d\], got None"),
    ],
    ids=["raises", "outside the vocabulary", "no ids", "a list", "nothing"],
)
def test_what_a_sampler_does_wrong_is_named_and_the_next_call_is_right(llm, expected, sampler, error, says) -> None:
    llm.sampling_fn = sampler
    try:
        with pytest.raises(error, match=says) as caught:
            llm.generate(PROMPTS[:2], GREEDY, False)
    finally:
        llm.sampling_fn = None
    assert "\n" not in str(caught.value)
    assert ids(llm.generate(PROMPTS[:2], GREEDY, False)) == expected[:2]


def test_a_replaced_sampler_is_asked_with_float32_logits_and_one_parameter_a_row(llm, expected: list) -> None:
    seen = []

    def best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        seen.append((logits.dtype, logits.shape == (len(params), 4096), set(params)))
        return logits.argmax(-1)

    llm.sampling_fn = best
    try:
        assert ids(llm.generate(PROMPTS, SEEDED[0], False)) == expected
    finally:
        llm.sampling_fn = None
    assert all(asked == (torch.float32, True, {SEEDED[0]}) for asked in seen) and seen


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_in_a_callback_leaves_nothing_of_its_call_behind(llm, expected: list, error: type) -> None:
    def stop(index: int, piece: str) -> None:
        raise error("stop here")

    with pytest.raises(error, match="stop here"):
        llm.generate(PROMPTS, GREEDY, False, stop)
    told: set[int] = set()
    outputs = llm.generate(PROMPTS[:2], GREEDY, False, lambda index, piece: told.add(index))
    assert ids(outputs) == expected[:2] and told == {0, 1}


def test_threads_and_callbacks_that_share_an_engine_get_their_own_answers_or_a_reason(llm, expected: list) -> None:
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: ids(llm.generate([PROMPTS[i % 5]], GREEDY, False))[0], range(8)))
    assert together == [expected[i % 5] for i in range(8)]
    inner: list[object] = []

    def call_again(*_: object) -> None:
        if not inner:
            inner.append(None)
            try:
                inner[0] = ids(llm.generate([PROMPTS[3]], GREEDY, False))
            except RuntimeError as error:
                inner[0] = str(error)

    assert ids(llm.generate([PROMPTS[1]], GREEDY, False, call_again)) == [expected[1]]
    assert inner[0] == [expected[3]] or "called from inside" in inner[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(llm, expected: list) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("abc", GREEDY, False)
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert f"belongs to process {os.getpid()}" in said.read()
    assert ids(llm.generate(PROMPTS[:1], GREEDY, False)) == expected[:1]


def test_requests_are_added_and_stepped_from_stage_d_on(engine: Engine, llm, expected: list) -> None:
    if not engine.is_paged:
        pytest.skip("begins at stage D")
    added = [llm.add_request(prompt, GREEDY) for prompt in (*PROMPTS[:3], {"prompt_token_ids": PROMPTS[3]})]
    outputs: dict[int, list[int]] = {}
    while not llm.is_finished():
        outputs.update(llm.step()[0])
    assert [outputs[request] for request in added] == expected[:4]
    assert llm.step() == ([], 0)


@pytest.mark.parametrize(
    "engine", as_parameters({n: e for n, e in IN_ONE_PROCESS.items() if e.is_paged}), scope="function"
)
def test_a_pool_that_is_too_small_refuses_shortens_or_preempts_and_changes_no_token(engine: Engine) -> None:
    small = engine.make(num_kvcache_blocks=2, kvcache_block_size=4)
    with pytest.raises(ValueError, match="prompt 1: 9 tokens take 3 blocks of 4 tokens, and the KV pool has 2"):
        small.generate([PROMPTS[0], [1] * 9], GREEDY, False)
    outputs = small.generate([PROMPTS[0]] * 2, GREEDY, False)
    small.close()
    tight = engine.make(num_kvcache_blocks=16, kvcache_block_size=4)
    expected = answers_one_by_one(tight, GREEDY)
    assert ids(outputs) == [expected[0][:6]] * 2, "eight slots, three of the prompt, and the last token needs none"
    assert {output["finish_reason"] for output in outputs} == {"length"}
    assert ids(tight.generate(PROMPTS, GREEDY, False)) == expected
    tight.close()


def test_a_closed_engine_refuses_in_the_same_words_and_closes_twice(engine: Engine) -> None:
    if engine is SEVERAL_PROCESSES["two ranks"]:
        pytest.skip("tested with its workers")
    llm = engine.make()
    llm.close()
    llm.close()
    for call in (llm.generate, llm.chat, *(getattr(llm, name, llm.chat) for name in ("stream", "add_request"))):
        with pytest.raises(RuntimeError, match="^this engine is closed; make a new LLM$"):
            call("abc")
