"""The naive engine: the contract that every later stage keeps."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from stage_a_naive import LLM, SamplingParams
from stage_a_naive.chat import chatml, render_chat

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TINY = ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny"]


@pytest.fixture(scope="module")
def tutor() -> LLM:
    return LLM("tutor", device="cpu")


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("random:qwen2-tiny", device="cpu")


@pytest.mark.parametrize("model", ["tutor", *TINY])
def test_greedy_tokens_are_those_of_transformers_generate(model: str) -> None:
    llm = LLM(model, device="cpu")
    prompt = llm.tokenizer.encode("What is a KV cache?")
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    ids = torch.tensor([prompt])
    reference = llm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    assert output["token_ids"] == reference[0, len(prompt) :].tolist()


def test_the_tutor_answers_and_the_output_has_every_field(tutor: LLM) -> None:
    [output] = tutor.chat([{"role": "user", "content": "What is a KV cache?"}], SamplingParams(0.0, max_tokens=256))
    assert output["finish_reason"] == "stop"
    assert output["token_ids"][-1] in tutor.eos_token_ids
    assert "key" in output["text"].lower() and "<|" not in output["text"]
    metrics = output["metrics"]
    assert metrics["num_generated_tokens"] == len(output["token_ids"])
    assert metrics["num_prompt_tokens"] == len(output["prompt_token_ids"])
    assert metrics["num_cached_tokens"] == 0
    assert metrics["prefill_time"] > 0 and metrics["decode_time"] > 0 and metrics["ttft"] >= metrics["prefill_time"]
    assert metrics["tpot"] == pytest.approx(metrics["decode_time"] / (len(output["token_ids"]) - 1))
    assert "logprobs" not in output


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_parameters(tiny: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 1, 2)]
    outputs = tiny.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [3, 1, 2]
    assert [tiny.tokenizer.decode(o["prompt_token_ids"]) for o in outputs] == ["a", "b", "c"]


def test_one_string_is_one_prompt_and_token_ids_are_taken_as_they_are(tiny: LLM) -> None:
    [output] = tiny.generate("hello", GREEDY, use_tqdm=False)
    [same] = tiny.generate([output["prompt_token_ids"]], GREEDY, use_tqdm=False)
    assert same["token_ids"] == output["token_ids"]
    assert tiny.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("", GREEDY, "prompt 0 is empty"),
        (["ok", ""], GREEDY, "prompt 1 is empty"),
        ([[]], GREEDY, "empty"),
        ([[1, 4096]], GREEDY, "token id 4096 is outside the vocabulary of 4096"),
        ([[-1]], GREEDY, "token id -1"),
        ([1, 2, 3], GREEDY, "wrap it in a list"),
        ([[7] * 4096], GREEDY, "has 4096 tokens.*at most 4095"),
        (["a", "b", "c"], [GREEDY], "3 prompts but 1 sampling"),
        (["a"], ["greedy"], "expected SamplingParams"),
    ],
)
def test_a_bad_request_is_refused_at_the_door_and_the_engine_goes_on(
    tiny: LLM, prompts: object, params: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        tiny.generate(prompts, params, use_tqdm=False)
    assert len(tiny.generate("a", GREEDY, use_tqdm=False)[0]["token_ids"]) == 12


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM("random:qwen2-tiny", max_num_seqs=4)


def test_generation_that_reaches_the_models_length_ends_there(tiny: LLM) -> None:
    [output] = tiny.generate(
        [[9] * 4093], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False
    )
    assert len(output["token_ids"]) == 3 and output["finish_reason"] == "length"


def test_a_seed_gives_the_same_text_whatever_else_is_asked(tiny: LLM) -> None:
    for seed in (11, 0):
        params = SamplingParams(temperature=1.0, max_tokens=10, seed=seed)
        [alone] = tiny.generate("abc", params, use_tqdm=False)
        among = tiny.generate(["xyz", "abc"], params, use_tqdm=False)
        other = tiny.generate("abc", SamplingParams(temperature=1.0, max_tokens=10, seed=seed + 1), use_tqdm=False)
        assert among[1]["token_ids"] == alone["token_ids"] != other[0]["token_ids"]


def test_the_second_request_of_a_call_counts_its_wait_in_the_ttft(tiny: LLM) -> None:
    first, second = (o["metrics"] for o in tiny.generate(["abc", "xyz"], GREEDY, use_tqdm=False))
    assert second["ttft"] >= first["prefill_time"] + first["decode_time"] + second["prefill_time"]


def test_unseeded_requests_differ_from_each_other_but_repeat_with_the_engines_seed() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=10)
    engines = (LLM("tutor", device="cpu", seed=seed) for seed in (5, 5, 6))  # whose weights do not depend on the seed
    runs = [engine.generate(["a", "a"], params, use_tqdm=False) for engine in engines]
    first, second, other = ([o["token_ids"] for o in outputs] for outputs in runs)
    assert first == second != other and first[0] != first[1]


def test_the_sampler_can_be_replaced_and_a_wrong_one_is_refused() -> None:
    llm = LLM("random:qwen2-tiny", device="cpu")
    seen = []

    def second_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        seen.append((tuple(logits.shape), logits.dtype, params))
        return logits.topk(2).indices[:, 1]

    greedy = llm.generate("abc", GREEDY, use_tqdm=False)[0]["token_ids"]
    llm.sampling_fn = second_best
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0]["token_ids"] != greedy
    assert seen[0] == ((1, 4096), torch.float32, [GREEDY])
    half = LLM("random:qwen2-tiny", device="cpu", dtype="bfloat16")
    half.sampling_fn = second_best
    half.generate("abc", GREEDY, use_tqdm=False)
    assert seen[-1][1] == torch.float32
    llm.sampling_fn = lambda logits, params: logits
    with pytest.raises(ValueError, match=r"integer ids of shape \[1\]"):
        llm.generate("abc", GREEDY, use_tqdm=False)
    for outside in (-1, 4096):
        llm.sampling_fn = lambda logits, params, outside=outside: torch.tensor([outside])
        with pytest.raises(ValueError, match=rf"token id {outside}, outside the vocabulary of 4096"):
            llm.generate("abc", GREEDY, use_tqdm=False)


def test_logprobs_are_returned_for_every_step(tiny: LLM) -> None:
    [output] = tiny.generate("abc", SamplingParams(temperature=0, max_tokens=4, logprobs=3), use_tqdm=False)
    assert [next(iter(step)) for step in output["logprobs"]] == output["token_ids"]
    assert all(len(step) == 3 and max(step.values()) <= 0 for step in output["logprobs"])


def test_streamed_pieces_join_to_the_text(tutor: LLM) -> None:
    pieces: dict[int, str] = {0: "", 1: ""}

    def listen(index: int, piece: str) -> None:
        pieces[index] += piece

    conversations = [[{"role": "user", "content": q}] for q in ("What is a KV cache?", "你好")]
    outputs = tutor.chat(conversations, SamplingParams(0.0, max_tokens=40), use_tqdm=False, on_text=listen)
    assert [pieces[0], pieces[1]] == [o["text"] for o in outputs]


def test_chat_renders_the_template_and_falls_back_to_chatml(tutor: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "hi<|im_end|>" in render_chat(tutor.tokenizer, messages)
    parts = [{"type": "text", "text": text} for text in ("hi", "there")]
    assert "hi\nthere<|im_end|>" in render_chat(tutor.tokenizer, [{"role": "user", "content": parts}])
    assert chatml(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    template, tutor.tokenizer.chat_template = tutor.tokenizer.chat_template, None
    try:
        assert render_chat(tutor.tokenizer, messages) == chatml(messages)
    finally:
        tutor.tokenizer.chat_template = template
    for bad in ([], [{"role": "user"}], ["hi"]):
        with pytest.raises(ValueError, match=r"message|conversation"):
            render_chat(tutor.tokenizer, bad)


def test_a_chat_has_one_begin_of_sequence_token_and_a_prompt_too() -> None:
    llm = LLM("random:qwen2-tiny", device="cpu")
    begin = "<|endoftext|>"
    begin_id = llm.tokenizer.convert_tokens_to_ids(begin)
    llm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, begin_id)]
    )
    messages = [{"role": "user", "content": "hi"}]
    llm.tokenizer.chat_template = begin + "{{ messages[0].content }}"  # as Llama's writes it out
    assert [ids.count(begin_id) for ids in llm.chat_prompts(messages)] == [1]
    llm.tokenizer.chat_template = None  # ChatML does not
    assert [ids.count(begin_id) for ids in llm.chat_prompts(messages)] == [1]
    assert [r.prompt_token_ids.count(begin_id) for r in llm.requests(["hi"])] == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tutor_gives_the_same_tokens_on_a_gpu(tutor: LLM, dtype: str) -> None:
    ask = [{"role": "user", "content": "What is a KV cache?"}]
    params = SamplingParams(0.0, max_tokens=256)
    on_gpu = LLM("tutor", device="cuda", dtype=dtype).chat(ask, params, use_tqdm=False)
    assert on_gpu[0]["token_ids"] == tutor.chat(ask, params, use_tqdm=False)[0]["token_ids"]


@pytest.mark.gpu
def test_a_seeded_draw_is_the_same_on_cpu_and_gpu(tutor: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, seed=4)
    ask = [{"role": "user", "content": "What is prefill?"}]
    on_gpu = LLM("tutor", device="cuda", dtype="float32").chat(ask, params, use_tqdm=False)
    assert on_gpu[0]["token_ids"] == tutor.chat(ask, params, use_tqdm=False)[0]["token_ids"]
