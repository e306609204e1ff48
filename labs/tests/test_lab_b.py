"""Judges lab B."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import stage_b_decode_step.attention as attention
import stage_b_decode_step.llm as stage
import stage_b_decode_step.static_cache as static_cache
import stage_b_decode_step.token_log as token_log
from labs.tests.support import check_whole_stage, completion_of, noisy_argmax, one_hot, student_random
from labs.variants import one_cache
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.params import SamplingParams
from stage_b_decode_step import loop
from stage_b_decode_step.decode_step import DecodeStep

CPU = torch.device("cpu")


class TestVariant:
    """One cache for many questions: the same tensors, and nothing of the last question in them."""

    @torch.inference_mode()
    def test_answers_are_those_of_a_cache_each_and_no_tensor_is_replaced(self):
        model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
        numbers = student_random()
        prompts = [[numbers.randrange(5, 300) for _ in range(count)] for count in (40, 7, 23, 1)]
        token, cache = loop.prefill(model, prompts[0])
        loop.decode_step(model, token, cache)
        tensors = [token, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]
        places = [tensor.data_ptr() for tensor in tensors]
        for prompt in prompts:
            fresh, own = loop.prefill(model, prompt)
            one_cache.prefill_again(model, prompt, token, cache)
            for step in range(6):
                got, wanted = int(token), int(fresh)
                assert got == wanted, f"prompt of {len(prompt)}, token {step}: {wanted} with a new cache, got {got}"
                loop.decode_step(model, token, cache)
                loop.decode_step(model, fresh, own)
            found = [token, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]
            assert [tensor.data_ptr() for tensor in found] == places, "the step works on the old addresses"


class TestCacheLength:
    def test_the_first_sizes(self):
        sizes = sorted({static_cache.cache_length(n) for n in range(1, 6000)})
        expected = [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
        assert sizes == expected, f"cache sizes up to 6144 are {expected}, got {sizes}"

    @pytest.mark.parametrize("positions, length", [(1, 256), (256, 256), (257, 512), (1024, 1024), (1025, 1536)])
    def test_the_smallest_that_holds_them(self, positions: int, length: int):
        found = static_cache.cache_length(positions)
        assert found == length, f"{positions} positions take a cache of {length}, got {found}"

    def test_large_requests_waste_a_third_at_most(self):
        for positions in (5000, 9000, 33_000, 200_001):
            found = static_cache.cache_length(positions)
            assert positions <= found <= 1.5 * positions, f"{positions} positions got a cache of {found}"


def small_cache(length: int = 256) -> static_cache.StaticKVCache:
    return static_cache.StaticKVCache(preset_config("qwen2-tiny"), length, torch.float32, CPU)


class TestCacheUpdate:
    def test_a_prompt_fills_the_beginning_and_attends_to_itself(self):
        cache = small_cache()
        key, value = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32)
        keys, values = cache.update(key, value, 1)
        assert keys.shape[-2] == 5, f"a prompt of 5 attends to its own 5 keys, got {keys.shape[-2]}"
        assert torch.equal(keys, key) and torch.equal(values, value), (
            "a prompt's keys and values are returned as they came"
        )
        assert torch.equal(cache.layers[1].keys[:, :, :5], key), "the keys must be stored at positions 0 to 4"
        assert torch.equal(cache.layers[1].values[:, :, :5], value), "the values must be stored too"
        assert not cache.layers[0].keys.any(), "layer 0 was not asked for"

    def test_one_token_goes_to_the_position_and_sees_the_whole_cache(self):
        cache = small_cache()
        before = cache.layers[0].keys.data_ptr()
        cache.position.fill_(7)
        key, value = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)
        keys, values = cache.update(key, value, 0)
        assert keys.shape == (1, 2, 256, 32), f"a decode step attends to all 256 positions, got {list(keys.shape)}"
        assert torch.equal(keys[:, :, 7:8], key) and torch.equal(values[:, :, 7:8], value), "it belongs at position 7"
        assert not keys[:, :, :7].any() and not keys[:, :, 8:].any(), "no other position may be written"
        assert keys.data_ptr() == before, "the cache must not move: write in place"

    def test_the_position_is_not_read_on_the_host(self):
        cache = small_cache()
        cache.position = torch.zeros(1, dtype=torch.int64, device="meta")  # a tensor whose value nobody can read
        layer = cache.layers[0]
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
        token = torch.empty(1, 2, 1, 32, device="meta")
        cache.update(token, token, 0)


class RecordingModel:
    """Remembers how it was called, and says token + 1."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def __call__(self, input_ids: torch.Tensor, **kwargs: object):
        self.calls.append(
            kwargs
            | {
                "mask_then": None if kwargs.get("attention_mask") is None else kwargs["attention_mask"].clone(),
                "position_then": None if kwargs.get("position_ids") is None else kwargs["position_ids"].clone(),
            }
        )
        logits = one_hot(input_ids + 1, 20).to(torch.bfloat16)
        return (logits,) if kwargs.get("return_dict") is False else SimpleNamespace(logits=logits)


def decode_step_with(model: RecordingModel) -> DecodeStep:
    step = DecodeStep(torch.nn.Identity())
    object.__setattr__(step, "model", model)
    del step._modules["model"]
    return step


class TestDecodeStep:
    def test_with_a_static_cache_it_says_position_and_mask_and_advances(self):
        model = RecordingModel()
        step, cache = decode_step_with(model), small_cache()
        cache.end_prefill(3)
        logits = step(torch.tensor([[8]]), cache)
        assert logits.shape == (1, 20), f"logits are [1, vocab], got {list(logits.shape)}"
        assert logits.dtype == torch.float32, f"logits are float32 whatever the model's dtype, got {logits.dtype}"
        assert logits.argmax() == 9
        call = model.calls[0]
        assert call["past_key_values"] is cache, "the model must be given the cache"
        assert call["position_then"] is not None and call["position_then"].tolist() == [[3]], (
            f"after a prompt of 3 the token has position 3, as position_ids [1, 1]: got {call['position_then']}"
        )
        assert call["mask_then"] is not None and (call["mask_then"][0, 0, 0] == 0).sum() == 4, (
            "the mask must show 4 positions: the prompt's 3 and the token's own"
        )
        assert cache.position.item() == 4, "the step must leave the cache one position longer"

    def test_steps_follow_one_another(self):
        model = RecordingModel()
        step, cache = decode_step_with(model), small_cache()
        cache.end_prefill(2)
        for token in (4, 5, 6):
            step(torch.tensor([[token]]), cache)
        positions = [call["position_then"].item() for call in model.calls]
        assert positions == [2, 3, 4], f"positions 2, 3, 4 expected, got {positions}"

    def test_with_a_growing_cache_it_leaves_positions_to_transformers(self):
        model, cache = RecordingModel(), DynamicCache()
        logits = decode_step_with(model)(torch.tensor([[8]]), cache)
        assert logits.argmax() == 9 and logits.shape == (1, 20) and logits.dtype == torch.float32
        call = model.calls[0]
        assert call["past_key_values"] is cache
        assert call["position_then"] is None and call["mask_then"] is None, "a growing cache knows its own length"


def attend_by_hand(query, key, value, mask, scale):
    """softmax(q k^T * scale + mask) v, head by head."""
    heads, kv_heads = query.shape[1], key.shape[1]
    out = torch.empty_like(query)
    for head in range(heads):
        k, v = key[0, head * kv_heads // heads].double(), value[0, head * kv_heads // heads].double()
        scores = query[0, head].double() @ k.T * scale + mask.double()
        out[0, head] = (scores.softmax(-1) @ v).float()
    return out.transpose(1, 2)  # [1, tokens, heads, head_dim]


class TestGroupedAttention:
    def inputs(self, tokens: int, positions: int):
        torch.manual_seed(0)
        return torch.randn(1, 6, tokens, 16), torch.randn(1, 2, positions, 16), torch.randn(1, 2, positions, 16)

    def test_one_query_with_a_mask(self):
        query, key, value = self.inputs(1, 9)
        mask = torch.zeros(1, 1, 1, 9)
        mask[..., 5:] = -torch.inf
        out, weights = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
        assert weights is None, "SDPA keeps no attention weights: None"
        assert out.shape == (1, 1, 6, 16), f"[1, tokens, heads, head_dim] expected, got {list(out.shape)}"
        expected = attend_by_hand(query, key, value, mask[0, 0], 0.3)
        assert torch.allclose(out, expected, atol=1e-5), "head h uses KV head h * kv_heads // heads; mask; scaling"

    def test_a_prompt_is_causal_where_there_is_no_mask(self):
        query, key, value = self.inputs(7, 7)
        out, _ = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, None, scaling=0.25)
        mask = torch.full((7, 7), -torch.inf).triu(1)
        assert out.shape == (1, 7, 6, 16), f"[1, tokens, heads, head_dim] expected, got {list(out.shape)}"
        assert torch.allclose(out, attend_by_hand(query, key, value, mask, 0.25), atol=1e-5), "no token sees later ones"

    def test_one_query_without_a_mask_sees_every_key(self):
        query, key, value = self.inputs(1, 9)
        out, _ = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, None, scaling=0.25)
        expected = attend_by_hand(query, key, value, torch.zeros(1, 9), 0.25)
        assert torch.allclose(out, expected, atol=1e-5), "one query is the last position: it sees all 9 keys"

    def test_several_queries_with_a_mask_of_their_own(self):
        query, key, value = self.inputs(3, 5)
        mask = torch.full((3, 5), -torch.inf).triu(3)
        out, _ = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, mask[None, None], scaling=0.25)
        assert torch.allclose(out, attend_by_hand(query, key, value, mask, 0.25), atol=1e-5), "use a mask as it is"

    def test_a_single_query_does_not_copy_keys_for_every_head(self, monkeypatch):
        query, key, value = self.inputs(1, 9)
        seen = []
        original = torch.nn.functional.scaled_dot_product_attention

        def spy(q, k, v, *args, **kwargs):
            seen.append((k.shape[1], bool(kwargs.get("enable_gqa"))))
            return original(q, k, v, *args, **kwargs)

        monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        attention.grouped_sdpa(torch.nn.Identity(), query, key, value, torch.zeros(1, 1, 1, 9), scaling=0.3)
        assert all(heads == 2 for heads, _ in seen), "keys were repeated: 2 KV heads serve 6 query heads as they lie"


class FakeEvent:
    """Has happened when `done`; waiting makes it so, and is counted."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.waits = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True
        self.waits += 1


def log_with(chunks: list[tuple[list[int], FakeEvent | None]]) -> token_log.TokenLog:
    log = token_log.TokenLog(16, CPU, reuse=True, pinned=False)
    log._in_flight = deque((torch.tensor(ids), event) for ids, event in chunks)
    return log


class TestReceive:
    def test_on_a_cpu_everything_is_there(self):
        log = log_with([([1, 2], None), ([3], None)])
        ids = log.receive(max_in_flight=1)
        assert ids == [1, 2, 3], f"without an event there is nothing to wait for: [1, 2, 3] expected, got {ids}"
        assert log.receive(max_in_flight=0) == [], "an id is handed out once"

    def test_it_takes_what_has_arrived_and_does_not_wait_for_the_chunk_that_may_be_under_way(self):
        late = FakeEvent(False)
        log = log_with([([1, 2], FakeEvent(True)), ([3, 4], late)])
        ids = log.receive(max_in_flight=1)
        assert late.waits == 0, "one chunk may be on its way: waiting for it would stall the CPU"
        assert ids == [1, 2], f"the first chunk has arrived, the second has not: [1, 2] expected, got {ids}"
        late.done = True
        assert log.receive(max_in_flight=1) == [3, 4], (
            "the second chunk has arrived, and what was handed out is not again"
        )

    def test_it_waits_when_too_many_are_under_way(self):
        first, second = FakeEvent(False), FakeEvent(False)
        log = log_with([([1], first), ([2], second)])
        ids = log.receive(max_in_flight=1)
        assert ids == [1], f"two chunks are on their way and one may be: wait for the first, [1]; got {ids}"
        assert (first.waits, second.waits) == (1, 0), "wait for the oldest, until one is on its way"

    def test_nothing_is_handed_out_before_an_older_chunk(self):
        log = log_with([([1], FakeEvent(False)), ([2], FakeEvent(True))])
        ids = log.receive(max_in_flight=2)
        assert ids == [], f"the first of two chunks has not arrived, and both may be under way: [] expected, got {ids}"
        assert log.receive(max_in_flight=0) == [1, 2], "in order"

    def test_zero_in_flight_waits_for_all_in_order(self):
        log = log_with([([1], FakeEvent(False)), ([2], FakeEvent(True)), ([3], FakeEvent(False))])
        assert log.receive(max_in_flight=0) == [1, 2, 3], "max_in_flight=0: wait for all, in order"


class FakeLog:
    """Counts. What is sent arrives at the next-but-one `receive` that may leave it on its way."""

    def __init__(self) -> None:
        self.next_input = torch.zeros(1, 1, dtype=torch.int64)
        self.unsent: list[int] = []
        self.chunks: deque[list[int]] = deque()
        self.sends: list[int] = []
        self.waits: list[int] = []
        self.receives: list[int] = []
        self.written = 0

    def write(self, ids: torch.Tensor) -> None:
        self.unsent.append(int(ids))
        self.next_input = ids[None]
        self.written += 1

    def send(self) -> None:
        self.chunks.append(self.unsent)
        self.unsent = []
        self.sends.append(self.written)

    def receive(self, max_in_flight: int) -> list[int]:
        self.receives.append(self.written)
        if max_in_flight == 0:
            self.waits.append(self.written)
        ids: list[int] = []
        while len(self.chunks) > max_in_flight:
            ids += self.chunks.popleft()
        return ids


class TestDecodeLoop:
    def decode(self, max_tokens: int, sync_every: int, async_eos: bool = True, eos: int = -1, **params: object):
        """Run the loop on a model that says input + 1, from a first token 0; returns log, completion, steps run."""
        completion = completion_of([0], max_tokens, eos, **params)
        completion.append(0)
        log, steps = FakeLog(), []

        def step(token: torch.Tensor, cache: object) -> torch.Tensor:
            assert token.shape == (1, 1), f"a step's input is log.next_input, [1, 1], got {list(token.shape)}"
            steps.append(int(token))
            return one_hot(token[0] + 1, 200)

        engine = object.__new__(stage.LLM)
        vars(engine).update(async_eos=async_eos, sync_every=sync_every, _step=step, sampling_fn=None, device=CPU)
        engine._decode(object(), log, completion, None)
        return log, completion, steps

    def test_it_makes_all_tokens_and_no_step_more(self):
        _, completion, steps = self.decode(10, sync_every=4)
        found = completion.token_ids
        assert found == list(range(10)), f"the prefill's token 0, then one per step, 10 in all: got {found}"
        assert steps == list(range(9)), f"the prefill made the first of 10 tokens, so 9 steps; got {len(steps)}"

    def test_the_sampler_chooses_with_the_noise_of_the_tokens_place(self):
        _, completion, _ = self.decode(12, sync_every=4, temperature=3.0)
        expected = [0]
        while len(expected) < 12:
            row = one_hot(torch.tensor([expected[-1] + 1]), 200)[0]
            expected.append(noisy_argmax(row, SamplingParams(temperature=3.0), 0, len(expected)))
        assert completion.token_ids == expected, (
            f"the token after n others is chosen with step = n: {expected} expected, got {completion.token_ids}"
        )

    def test_an_answer_that_is_over_runs_no_step(self):
        _, completion, steps = self.decode(1, sync_every=4)
        assert steps == [] and completion.token_ids == [0], f"the prefill's token was the last, got steps {steps}"

    def test_it_sends_every_few_steps_and_waits_only_at_the_last(self):
        log, _, _ = self.decode(10, sync_every=4)
        assert log.sends == [4, 8, 9], f"with sync_every=4 and 9 steps: send after 4, 8 and 9, got {log.sends}"
        assert log.waits == [9], f"only the last step is waited for, got waits after {log.waits}"
        assert log.receives == list(range(1, 10)), f"receive in every step, sent or not; got it after {log.receives}"

    def test_the_end_is_noticed_late_but_nothing_after_it_counts(self):
        _, completion, steps = self.decode(100, sync_every=4, eos=5)
        assert completion.token_ids == [0, 1, 2, 3, 4, 5], "what came after the end-of-sequence token is dropped"
        assert len(steps) <= 13, f"the end came with step 5; two chunks of 4 may follow, not {len(steps)} steps"

    def test_without_async_eos_every_step_is_waited_for(self):
        log, completion, steps = self.decode(100, sync_every=4, async_eos=False, eos=5)
        assert completion.token_ids[-1] == 5 and len(steps) == 5, f"no step too many, got {len(steps)}"
        assert log.waits == log.sends == [1, 2, 3, 4, 5], (
            f"each of 5 steps is sent and waited for; got sends after {log.sends} and waits after {log.waits}"
        )

    def test_penalties_and_logprobs_need_every_token_at_once(self):
        for params in ({"presence_penalty": 0.1}, {"logprobs": 1}):
            log, _, _ = self.decode(5, sync_every=4, **params)
            assert log.waits == [1, 2, 3, 4], f"with {params} every step is waited for, got {log.waits}"


class TestWholeStage:
    def test_the_tutor_answers(self):
        plain = {"static_cache": False, "buffers": False, "pinned": False, "sdpa": False, "async_eos": False}
        check_whole_stage(stage.LLM, {}, {"sync_every": 3}, plain, {"last_logits_only": False, "warmup": False})
