"""The static-batch engine: right answers under any block pressure, errors at the door, nothing left behind."""

from __future__ import annotations

import threading

import pytest
import torch
from interrupts import fail_at_token

from stage_a_naive import LLM as NaiveLLM
from stage_c_fused_mlp.extension import ExtensionError
from stage_d_paged import LLM, SamplingParams, fused_mlp
from stage_d_paged.attention.flash import FlashAttention
from stage_d_paged.attention.reference import ReferenceAttention
from stage_d_paged.batch import largest_step
from stage_d_paged.kv_cache import CPU_POOL_BYTES, blocks_that_fit, cpu_num_blocks

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (5, 40, 1, 33, 16, 17)


def prompts(vocab_size: int = 4096) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def ids_of(llm: LLM | NaiveLLM, asked: list, params: object = GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(asked, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request after another through transformers."""
    return ids_of(NaiveLLM("random:qwen2-tiny", device="cpu"), prompts())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random:qwen2-tiny", device="cpu")


def assert_nothing_held(llm: LLM) -> None:
    llm.block_manager.check_invariants([])
    assert llm.block_manager.num_used == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kvcache_block_size": 4},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},  # prompts are prefilled in pieces
        {"max_num_seqs": 1},
        {"num_kvcache_blocks": 8, "kvcache_block_size": 8},  # several static batches
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_the_naive_engine(expected: list[list[int]], options: dict):
    llm = LLM("random:qwen2-tiny", device="cpu", **options)
    assert ids_of(llm, prompts()) == expected
    assert ids_of(llm, prompts()) == expected  # now with the prefix cache full of them
    assert_nothing_held(llm)


@pytest.mark.parametrize("family", ["qwen3-tiny", "llama-tiny"])
def test_the_other_families_agree_with_the_naive_engine(family: str):
    assert ids_of(LLM(f"random:{family}", device="cpu"), prompts()) == ids_of(
        NaiveLLM(f"random:{family}", device="cpu"), prompts()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model_says_the_same_as_in_the_naive_engine(dtype: str):
    questions = [[{"role": "user", "content": text}] for text in ("What is a KV cache?", "什么是预填充？")]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    naive = NaiveLLM("tutor", device="cpu", dtype=dtype).chat(questions, params, use_tqdm=False)
    paged = LLM("tutor", device="cpu", dtype=dtype).chat(questions, params, use_tqdm=False)
    assert [o["token_ids"] for o in paged] == [o["token_ids"] for o in naive]
    assert [o["text"] for o in paged] == [o["text"] for o in naive]


def test_a_second_call_reads_the_cached_prefix(llm: LLM):
    asked = [list(range(100, 140))]
    first = llm.generate(asked, GREEDY, use_tqdm=False)[0]
    again = llm.generate(asked, GREEDY, use_tqdm=False)[0]
    assert first["metrics"]["num_cached_tokens"] == 0 and again["metrics"]["num_cached_tokens"] == 32
    assert first["token_ids"] == again["token_ids"]


def test_a_prompt_of_exactly_full_cached_blocks_still_runs_a_token(llm: LLM):
    asked = [list(range(200, 232))]
    first, again = (llm.generate(asked, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert again["metrics"]["num_cached_tokens"] == 16
    assert first["token_ids"] == again["token_ids"]


def test_identical_prompts_of_one_call_share_blocks(llm: LLM):
    shared = list(range(300, 350))
    outputs = llm.generate([shared] * 3, GREEDY, use_tqdm=False)
    assert [o["metrics"]["num_cached_tokens"] for o in outputs] == [0, 48, 48]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"] == outputs[2]["token_ids"]


def test_a_prompt_larger_than_the_pool_is_refused_and_the_others_run():
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=2, kvcache_block_size=4)
    with pytest.raises(ValueError, match="prompt 1: 9 tokens take 3 blocks of 4 tokens, and the KV pool has 2"):
        llm.generate([[1], [2] * 9], GREEDY)
    assert [len(ids) for ids in ids_of(llm, [[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))] == [2]
    assert_nothing_held(llm)


def test_a_request_that_outgrows_the_pool_finishes_with_length(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=2, kvcache_block_size=4)
    [output] = llm.generate([prompts()[0]], GREEDY, use_tqdm=False)
    # 8 slots: 5 for the prompt, 3 for generated tokens, and the last token generated needs none
    assert output["finish_reason"] == "length" and output["token_ids"] == expected[0][:4]
    assert_nothing_held(llm)


def test_a_request_that_outgrows_the_pool_ends_in_the_step_of_its_last_token(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=2, kvcache_block_size=4)
    request = llm.add_request(prompts()[0], GREEDY)
    steps = [llm.step()[0] for _ in range(4)]
    assert steps == [[], [], [], [(request, expected[0][:4])]]


def test_a_batch_may_fill_the_pool_to_its_last_slot(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=4, kvcache_block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)  # 5 + 4 tokens, the last one needs no slot
    outputs = ids_of(llm, [prompts()[0], prompts()[0][::-1]], params)
    assert outputs[0] == expected[0][:4]
    assert (llm.memory.num_sequences, llm.memory.tokens, llm.memory.blocks) == (2, 16, 4)


def test_an_answer_ends_at_max_model_len():
    llm = LLM("random:qwen2-tiny", device="cpu", max_model_len=20)
    [output] = llm.generate([[7] * 15], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 5
    with pytest.raises(ValueError, match="at most 19 fit"):
        llm.generate([[7] * 20])


def test_a_batch_that_the_pool_cannot_hold_is_split_in_order(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu", num_kvcache_blocks=20, kvcache_block_size=4)
    order: list[int] = []
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False, on_text=lambda index, piece: order.append(index))
    assert [o["token_ids"] for o in outputs] == expected
    assert order.index(5) > max(place for place, index in enumerate(order) if index == 0)


def test_finished_requests_keep_a_padding_row_that_changes_nobody(expected: list[list[int]], llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 12, 3, 12, 2, 7)]
    assert ids_of(llm, prompts(), params) == [ids[: p.max_tokens] for ids, p in zip(expected, params, strict=True)]


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(llm: LLM):
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, seed=5, ignore_eos=True)
    others = [SamplingParams(max_tokens=8)] * 5
    alone = ids_of(llm, [prompts()[0]], params)[0]
    assert ids_of(llm, prompts(), [params, *others])[0] == alone


def test_penalties_and_logprobs_reach_the_sampler(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=5.0, logprobs=2, ignore_eos=True)
    [output] = llm.generate([prompts()[1]], params, use_tqdm=False)
    assert len(set(output["token_ids"])) == 6
    assert all(token in step for token, step in zip(output["token_ids"], output["logprobs"], strict=True))


def test_the_sampler_can_be_replaced(llm: LLM):
    llm.sampling_fn = lambda logits, params: torch.full(logits.shape[:1], 7)
    try:
        assert ids_of(llm, [[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True)) == [[7, 7, 7]]
    finally:
        llm.sampling_fn = None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_no_block_held(expected: list[list[int]], error: type[BaseException]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    calls = 0

    def fails_at_the_third_step(logits: torch.Tensor, params: list) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error("stop")
        return logits.argmax(-1)

    llm.sampling_fn = fails_at_the_third_step
    with pytest.raises(error):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert_nothing_held(llm)
    llm.sampling_fn = None
    assert ids_of(llm, prompts()) == expected


def test_blocks_of_a_failed_prefill_are_not_found_later(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    hook = llm.runtime.model.layers[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    hook.remove()
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert [o["metrics"]["num_cached_tokens"] for o in outputs] == [0] * 6
    assert [o["token_ids"] for o in outputs] == expected


def test_the_streamed_pieces_join_to_the_text(llm: LLM):
    pieces = [""] * 6
    outputs = llm.generate(
        prompts(), GREEDY, use_tqdm=False, on_text=lambda i, piece: pieces.__setitem__(i, pieces[i] + piece)
    )
    assert pieces == [o["text"] for o in outputs]


def test_the_metrics_are_those_of_the_request(llm: LLM):
    outputs = llm.generate(prompts(), [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4, 5, 6)])
    for n, output in enumerate(outputs, 1):
        m = output["metrics"]
        assert m["num_generated_tokens"] == n and m["num_prompt_tokens"] == LENGTHS[n - 1]
        assert 0 < m["prefill_time"] <= m["ttft"] and (m["tpot"] > 0) == (n > 1)


def test_the_memory_report_shows_the_last_batch(llm: LLM):
    llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert llm.memory.num_sequences == 6
    assert llm.memory.tokens == sum(LENGTHS) + 6 * 11  # the last token of each was never run
    assert llm.memory.block_waste < 0.5 < llm.memory.reservation_waste


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_batchd_tokens": 1}, TypeError, "max_num_batchd_tokens"),
        ({"enable_chunked_prefill": True}, TypeError, "enable_chunked_prefill"),
        ({"tensor_parallel_size": 2}, ValueError, "stage_f_graph_tp"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be an integer, 1 or more, got 0"),
        ({"max_num_seqs": True}, ValueError, "max_num_seqs must be an integer, 1 or more, got True"),
        ({"enforce_eager": "no"}, ValueError, "enforce_eager must be True or False, got 'no'"),
        ({"gpu_memory_utilization": "0.9"}, ValueError, "gpu_memory_utilization must be above 0"),
        ({"max_model_len": 1}, ValueError, "max_model_len must be"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "at most 1, got 1.5"),
        ({"num_kvcache_blocks": 0}, ValueError, "num_kvcache_blocks must be"),
        ({"kvcache_block_size": 0}, ValueError, "kvcache_block_size must be"),
        ({"fused_mlp": "maybe"}, ValueError, "fused_mlp must be 'auto', 'on' or 'off', got 'maybe'"),
        ({"attention_backend": "magic"}, ValueError, "magic"),
        ({"attention_backend": "flash"}, ValueError, "flash"),
    ],
    ids=str,
)
def test_an_option_that_is_unknown_or_cannot_be_honoured_is_refused(options: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        LLM("random:qwen2-tiny", device="cpu", **options)


def test_blocks_that_the_backend_cannot_read_are_refused_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ReferenceAttention, "block_size_multiple", FlashAttention.block_size_multiple)
    with monkeypatch.context() as patch:
        patch.setattr("stage_d_paged.runtime.tensor_source", None)
        with pytest.raises(ValueError, match="kvcache_block_size=128: .*'reference' takes multiples of 256"):
            LLM("random:qwen2-tiny", device="cpu", kvcache_block_size=128, num_kvcache_blocks=8)
    LLM("random:qwen2-tiny", device="cpu", kvcache_block_size=512, num_kvcache_blocks=8)


def test_max_model_len_is_lowered_to_the_models_positions_in_one_line(capfd: pytest.CaptureFixture[str]):
    llm = LLM("random:qwen2-tiny", device="cpu", max_model_len=5000)
    assert llm.max_model_len == 4096
    said = capfd.readouterr().err
    assert "max_model_len=5000 is lowered to 4096" in said
    assert "attention: reference" in said and "MLP: PyTorch's kernels" in said


@pytest.mark.compiler
@pytest.mark.parametrize("family", ["qwen2-tiny", "llama-tiny"])
def test_stage_cs_operator_in_the_mlp_changes_no_token(family: str):
    fused = LLM(f"random:{family}", device="cpu", fused_mlp="on")
    assert fused.runtime.model.layers[0].most_fused_rows == 2  # on a CPU
    plain = LLM(f"random:{family}", device="cpu")
    for some in (prompts()[:2], prompts()):
        assert ids_of(fused, some) == ids_of(plain, some)


def test_a_machine_that_cannot_build_the_operator_says_so_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    def cannot(device: torch.device) -> None:
        raise ExtensionError("no compiler here")

    monkeypatch.setattr(fused_mlp, "load_operators", cannot)
    with pytest.raises(ExtensionError, match="no compiler here"):
        LLM("random:qwen2-tiny", device="cpu", fused_mlp="on")


def test_the_pool_on_the_cpu_is_512_mib_or_one_full_sequence():
    assert cpu_num_blocks(block_bytes=2**20, block_size=16, max_model_len=4096) == CPU_POOL_BYTES // 2**20
    assert cpu_num_blocks(block_bytes=2**23, block_size=16, max_model_len=4096) == 256
    assert cpu_num_blocks(block_bytes=2**29, block_size=16, max_model_len=100) == 7


def test_the_largest_step_can_be_measured_in_a_pool_of_one_block(llm: LLM):
    step = largest_step(num_tokens=100, max_len=40, block_size=16, device=torch.device("cpu"))
    assert step.metadata.context_lens.tolist() == [40, 40, 20] and step.last_rows.tolist() == [39, 79, 99]
    hidden = llm.runtime.model(step.input_ids, step.positions, llm.runtime.make_pool(1), step.metadata)
    assert hidden.shape[0] == 100


def test_no_room_for_one_block_says_what_was_free_and_what_to_change():
    with pytest.raises(MemoryError, match=r"2\.00 MiB, 1\.00 MiB are left.*300 MiB of the GPU.*Raise gpu_memory_util"):
        blocks_that_fit(2**20, 2**21, 300 * 2**20, 0.9)
    assert blocks_that_fit(2**22 - 1, 2**21, 0, 0.9) == blocks_that_fit(2**21, 2**21, 0, 0.9) == 1


def test_every_part_agrees_on_the_block_size():
    llm = LLM("random:qwen2-tiny", device="cpu", kvcache_block_size=32)
    pool = llm.kv_cache.tensor
    assert llm.block_manager.block_size == llm.kv_cache.block_size == llm.runtime.block_size == pool.shape[3] == 32
    assert llm.block_manager.num_blocks == llm.kv_cache.num_blocks == pool.shape[2]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu_the_embedded_model_says_the_same_in_every_backend(backend: str, dtype: str):
    if backend == "triton" and dtype == "float32":
        pytest.skip("the Triton kernels are for 16-bit types on a GPU")
    question = [{"role": "user", "content": "What is a KV cache?"}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    naive = NaiveLLM("tutor", device="cuda", dtype=dtype).chat(question, params, use_tqdm=False)
    llm = LLM("tutor", device="cuda", dtype=dtype, attention_backend=backend, gpu_memory_utilization=0.2)
    paged = llm.chat([question] * 3, params, use_tqdm=False)
    assert [o["token_ids"] for o in paged] == [naive[0]["token_ids"]] * 3
    assert_nothing_held(llm)


@pytest.mark.gpu
def test_on_the_gpu_the_pool_is_what_this_process_may_use():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    llm = LLM("random:qwen2.5-0.5b", device="cuda", gpu_memory_utilization=0.25)
    llm.generate([[1] * 4000] * 4, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert 0.1 * total < llm.kv_cache.num_bytes < 0.25 * total  # the rest is for the largest step
    assert torch.cuda.max_memory_allocated() < 0.26 * total


def test_decode_steps_keep_to_the_tokens_of_a_step(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    llm = LLM("random:qwen2-tiny", device="cpu", max_num_batched_tokens=4)
    forward, rows = llm.runtime.model.forward, []
    monkeypatch.setattr(llm.runtime.model, "forward", lambda ids, *args: rows.append(len(ids)) or forward(ids, *args))
    assert ids_of(llm, prompts()) == expected
    assert max(rows) == 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_requests_that_were_added_outlive_a_step_that_breaks_off(expected: list[list[int]], error: type[BaseException]):
    llm = LLM("random:qwen2-tiny", device="cpu", kvcache_block_size=4)
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts()[:3]]
    model, calls = llm.runtime.model, iter(range(100))
    forward = model.forward

    def fails_twice(*args: object) -> torch.Tensor:
        if next(calls) in (0, 4):
            llm.kv_cache.tensor.fill_(7.0)  # what the pool holds after a step that broke off is not known
            raise error("stop here")
        return forward(*args)

    model.forward = fails_twice
    outputs: dict[int, list[int]] = {}
    while not llm.is_finished():
        try:
            outputs.update(llm.step()[0])
        except error:
            continue
    assert [outputs[i] for i in ids] == expected[:3]
    assert_nothing_held(llm)


def test_a_call_beside_added_requests_that_fails_takes_none_of_them_along(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    request = llm.add_request(prompts()[1], GREEDY)

    def stop(index: int, piece: str) -> None:
        raise LookupError("stop here")

    with pytest.raises(LookupError, match="stop here"):
        llm.generate(prompts()[:1], GREEDY, use_tqdm=False, on_text=stop)
    outputs: dict[int, list[int]] = {}
    while not llm.is_finished():
        outputs.update(llm.step()[0])
    assert outputs == {request: expected[1]}


def out_of_vocabulary(logits: torch.Tensor, params: list) -> torch.Tensor:
    return torch.full(logits.shape[:1], logits.shape[-1])


def test_an_added_request_that_fails_beside_a_call_is_the_error_of_the_next_step(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    llm.sampling_fn = out_of_vocabulary
    llm.add_request(prompts()[0], GREEDY)
    llm.sampling_fn = None
    assert ids_of(llm, [prompts()[1]]) == [expected[1]]
    assert not llm.is_finished()
    with pytest.raises(ValueError, match="token id 4096, outside the vocabulary of 4096"):
        llm.step()
    assert llm.is_finished()


def test_a_call_that_fails_together_with_an_added_request_gets_the_error():
    llm = LLM("random:qwen2-tiny", device="cpu")
    llm.sampling_fn = out_of_vocabulary
    llm.add_request(prompts()[0], GREEDY)
    with pytest.raises(ValueError, match="token id 4096, outside the vocabulary of 4096"):
        llm.generate(prompts()[1:3], GREEDY, use_tqdm=False)
    assert llm.is_finished()
    assert_nothing_held(llm)


def test_a_call_that_a_second_interrupt_kept_from_dropping_its_requests_leaves_them_to_the_next(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    llm = LLM("random:qwen2-tiny", device="cpu")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "drop", interrupted)
        llm.generate(prompts()[:3], GREEDY, use_tqdm=False, on_text=interrupted)
    texts: dict[int, str] = {}
    [output] = llm.generate(
        [prompts()[5]], GREEDY, use_tqdm=False, on_text=lambda i, piece: texts.update({i: texts.get(i, "") + piece})
    )
    assert output["token_ids"] == expected[5] and texts == {0: output["text"]}
    assert_nothing_held(llm)


def test_a_request_that_has_finished_is_returned_after_a_step_that_fails(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    request = llm.add_request(prompts()[0], GREEDY)
    llm.generate(["beside it"], GREEDY, use_tqdm=False)
    llm.sampling_fn = lambda logits, params: logits
    llm.add_request(prompts()[1], GREEDY)
    with pytest.raises(ValueError, match="sampling_fn must return"):
        llm.step()
    assert llm.step()[0] == [(request, expected[0])]
    assert llm.is_finished()


def test_a_call_is_told_nothing_of_a_request_that_was_added(llm: LLM):
    llm.add_request(prompts()[0], GREEDY)
    pieces: list[str] = []
    [output] = llm.generate(["hello"], GREEDY, use_tqdm=False, on_text=lambda index, piece: pieces.append(piece))
    assert "".join(pieces) == output["text"]
    [(_, token_ids)], _ = llm.step()
    assert llm.tokenizer.decode(token_ids, skip_special_tokens=True) != "", "there was something to tell"


def test_another_threads_request_waits_for_the_call_that_runs_and_a_callbacks_own_does_not(llm: LLM):
    threads: list[threading.Thread] = []
    finished: list[bool] = []

    def add_one_here_and_one_there(index: int, piece: str) -> None:
        if not threads:
            threads.append(threading.Thread(target=llm.add_request, args=(prompts()[1], GREEDY)))
            threads[0].start()
            threads[0].join(0.05)  # time in which it must not get through
            finished.append(llm.is_finished())
            llm.add_request(prompts()[0], GREEDY)
            finished.append(llm.is_finished())

    llm.generate(["hello"], GREEDY, use_tqdm=False, on_text=add_one_here_and_one_there)
    threads[0].join()
    assert finished == [True, False]
    num_finished = 0
    while not llm.is_finished():
        num_finished += len(llm.step()[0])
    assert num_finished == 2


def test_an_error_in_one_requests_text_drops_that_request_alone(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    llm = LLM("random:qwen2-tiny", device="cpu")
    bad = next(token for token in expected[1][3:] if token not in expected[0])
    fail_at_token(monkeypatch, bad)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop="zzz")  # read after every token
    kept, _ = (llm.add_request(prompt, params) for prompt in prompts()[:2])
    outputs: dict[int, list[int]] = {}
    with pytest.raises(UnicodeError, match="has no text"):
        while True:
            outputs.update(llm.step()[0])
    while not llm.is_finished():
        outputs.update(llm.step()[0])
    assert outputs == {kept: expected[0]}
    assert_nothing_held(llm)


def test_a_sampler_that_fails_drops_the_requests_that_it_was_asked_for(expected: list[list[int]]):
    llm = LLM("random:qwen2-tiny", device="cpu")
    llm.sampling_fn = out_of_vocabulary
    llm.add_request(prompts()[0], GREEDY)
    llm.sampling_fn = None
    request = llm.add_request(prompts()[1], GREEDY)
    with pytest.raises(ValueError, match="token id 4096, outside the vocabulary of 4096"):
        llm.step()
    outputs: dict[int, list[int]] = {}
    while not llm.is_finished():
        outputs.update(llm.step()[0])
    assert outputs == {request: expected[1]}
