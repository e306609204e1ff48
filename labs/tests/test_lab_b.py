"""Drives lab B."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import DynamicCache

import stage_b_decode_step.attention as attention
import stage_b_decode_step.llm as stage
import stage_b_decode_step.static_cache as static_cache
import stage_b_decode_step.token_log as token_log
from labs.driving import Compared, close, numbers
from labs.tests.support import Values, completion_of, one_hot, random_prompt, some, tutor, whole_stage
from labs.variants import one_cache
from stage_a_naive.checkpoints.presets import preset_config
from stage_b_decode_step import loop
from stage_b_decode_step.decode_step import DecodeStep

CPU = torch.device("cpu")


class TestVariant:
    """One cache for many questions: the same tensors, and nothing of the last question in them."""

    @torch.inference_mode()
    def test_answers_are_those_of_a_cache_each_and_no_tensor_is_replaced(self) -> Values:
        model, prompts = tutor(), [random_prompt(count) for count in (40, 7, 23, 1)]
        token, cache = loop.prefill(model, prompts[0])
        loop.decode_step(model, token, cache)
        tensors = [token, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]
        places, values = [tensor.data_ptr() for tensor in tensors], []
        for prompt in prompts:
            one_cache.prefill_again(model, prompt, token, cache)
            tokens = [int(token)]
            for _ in range(5):
                loop.decode_step(model, token, cache)
                tokens.append(int(token))
            values.append((f"a prompt of {len(prompt)}: tokens as with a new cache", tokens))
            found = [token, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]
            moved = sum(tensor.data_ptr() != place for tensor, place in zip(found, places, strict=True))
            values.append((f"a prompt of {len(prompt)}: tensors that have moved from the addresses of the step", moved))
        yield from values


class TestCacheLength:
    def test_the_first_sizes(self) -> Values:
        yield "cache sizes up to 6144", sorted({static_cache.cache_length(n) for n in range(1, 6000)})

    def test_the_smallest_that_holds_them(self) -> Values:
        for positions in (1, 256, 257, 1024, 1025, *some(100, 1, 300_000)):
            yield f"{positions} positions take a cache of", static_cache.cache_length(positions)


def small_cache(length: int = 256) -> static_cache.StaticKVCache:
    return static_cache.StaticKVCache(preset_config("qwen2-tiny"), length, torch.float32, CPU)


class TestCacheUpdate:
    def test_a_prompt_fills_the_beginning_and_attends_to_itself(self) -> Values:
        cache, count = small_cache(), numbers.randint(2, 9)
        key, value = torch.randn(2, 1, 2, count, 32)
        keys, values = cache.update(key, value, 1)
        yield f"a prompt of {count}: keys to attend to are its own, as they came", keys
        yield f"a prompt of {count}: values to attend to are its own, as they came", values
        yield f"the keys stored at positions 0 to {count}", cache.layers[1].keys[:, :, : count + 1]
        yield f"the values stored at positions 0 to {count}", cache.layers[1].values[:, :, : count + 1]
        yield "layer 0 was not asked for: is anything in it?", bool(cache.layers[0].keys.any())

    def test_one_token_goes_to_the_position_and_sees_the_whole_cache(self) -> Values:
        cache, position = small_cache(), numbers.randint(2, 200)
        before = cache.layers[0].keys.data_ptr()
        cache.position.fill_(position)
        key, value = torch.randn(2, 1, 2, 1, 32)
        keys, values = cache.update(key, value, 0)
        yield "a decode step attends to all 256 positions: the keys' shape", list(keys.shape)
        yield f"the key belongs at position {position}", keys[:, :, position : position + 1]
        yield f"the value belongs at position {position}", values[:, :, position : position + 1]
        written = keys.any(-1).any(1)[0].nonzero().flatten()
        yield "positions that are written", written
        yield "the cache moves, though it is to be written in place", keys.data_ptr() != before

    def test_the_position_is_not_read_on_the_host(self) -> Values:
        cache = small_cache()
        cache.position = torch.zeros(1, dtype=torch.int64, device="meta")  # a tensor whose value cannot be read
        layer = cache.layers[0]
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
        token = torch.empty(1, 2, 1, 32, device="meta")
        yield "a position that nobody can read", list(cache.update(token, token, 0)[0].shape)


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
    def test_steps_with_a_static_cache_say_position_and_mask_and_advance(self) -> Values:
        model, count = RecordingModel(), numbers.randint(2, 40)
        step, cache = decode_step_with(model), small_cache()
        cache.end_prefill(count)
        for number, token in enumerate(some(3, 0, 18)):
            given = f"step {number} after a prompt of {count}"
            yield (
                f"{given}: logits [1, vocab], float32 whatever the model's dtype",
                step(torch.tensor([[token]]), cache),
            )
            call = model.calls[-1]
            yield f"{given}: the model was given the cache", call["past_key_values"] is cache
            yield f"{given}: position_ids [1, 1]", call["position_then"]
            mask = call["mask_then"]
            yield (
                f"{given}: positions that the mask shows, the token's own included",
                None if mask is None else int((mask[0, 0, 0] == 0).sum()),
            )
            yield f"{given}: the cache's position afterwards", int(cache.position)

    def test_with_a_growing_cache_it_leaves_positions_to_transformers(self) -> Values:
        model, cache = RecordingModel(), DynamicCache()
        yield "logits with a growing cache", decode_step_with(model)(torch.tensor([[numbers.randint(0, 18)]]), cache)
        call = model.calls[0]
        yield "the model was given the cache", call["past_key_values"] is cache
        yield "a growing cache knows its own length: position_ids and mask", [call["position_then"], call["mask_then"]]


class TestGroupedAttention:
    def attend(self, tokens: int, positions: int, mask: torch.Tensor | None, scaling: float, heads: int = 2) -> object:
        query = torch.randn(1, 3 * heads, tokens, 16)
        key, value = torch.randn(2, 1, heads, positions, 16)
        out, weights = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, mask, scaling=scaling)
        assert weights is None, "SDPA keeps no attention weights: None"
        return close(out, 1e-5, 1e-4)

    def test_one_query_with_a_mask(self) -> Values:
        mask = torch.zeros(1, 1, 1, 9)
        mask[..., numbers.randint(2, 7) :] = -torch.inf
        yield (
            "one query with a mask: [1, tokens, heads, head_dim]; head h uses KV head h * kv_heads // heads",
            (self.attend(1, 9, mask, 0.3)),
        )

    def test_a_prompt_is_causal_where_there_is_no_mask(self) -> Values:
        for tokens in (7, numbers.randint(2, 20)):
            yield f"{tokens} queries without a mask: no token sees later ones", self.attend(tokens, tokens, None, 0.25)

    def test_one_query_without_a_mask_sees_every_key(self) -> Values:
        yield "one query is the last position: it sees all 9 keys", self.attend(1, 9, None, 0.25)

    def test_several_queries_with_a_mask_of_their_own(self) -> Values:
        mask = torch.full((3, 5), -torch.inf).triu(3)[None, None]
        yield "three queries with a mask: it is used as it is", self.attend(3, 5, mask, 0.25)
        for tokens in (1, numbers.randint(2, 7)):
            keys, heads = numbers.randint(8, 20), numbers.randint(2, 4)
            mask = torch.arange(keys) < torch.arange(keys - tokens, keys)[:, None] + 1
            yield (
                f"{tokens} queries, {keys} keys, a mask of true and false, {heads} KV heads",
                self.attend(tokens, keys, mask[None, None], 0.3, heads),
            )

    def test_a_single_query_does_not_copy_keys_for_every_head(self) -> Values:
        seen, original = [], torch.nn.functional.scaled_dot_product_attention

        def spy(q, k, v, *args, **kwargs):
            seen.append(k.shape[1])
            return original(q, k, v, *args, **kwargs)

        with (
            patch.object(attention, "scaled_dot_product_attention", spy),
            patch.object(torch.nn.functional, "scaled_dot_product_attention", spy),
        ):
            out = self.attend(1, 9, torch.zeros(1, 1, 1, 9), 0.3)
        yield "one query, 6 heads, 2 KV heads", out
        yield (
            "KV heads of calls for which keys were repeated: 2 serve 6 query heads as they lie",
            [heads for heads in seen if heads != 2],
        )


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
    def test_on_a_cpu_everything_is_there(self) -> Values:
        chunks = [some(2, 0, 99), some(1, 0, 99)]
        log = log_with([(chunk, None) for chunk in chunks])
        yield f"chunks {chunks}: without an event there is nothing to wait for", log.receive(max_in_flight=1)
        yield "an id is handed out once", log.receive(max_in_flight=0)

    def test_it_takes_what_has_arrived_and_does_not_wait_for_the_chunk_that_may_be_under_way(self) -> Values:
        late, chunks = FakeEvent(False), [some(2, 0, 99), some(2, 0, 99)]
        log = log_with([(chunks[0], FakeEvent(True)), (chunks[1], late)])
        yield f"of chunks {chunks} the first has arrived, the second may be on its way", log.receive(max_in_flight=1)
        yield "waits for the second, which would stall the CPU", late.waits
        late.done = True
        yield "now the second has arrived; what was handed out is not again", log.receive(max_in_flight=1)

    def test_it_waits_when_too_many_are_under_way(self) -> Values:
        first, second, chunks = FakeEvent(False), FakeEvent(False), [some(1, 0, 99), some(1, 0, 99)]
        log = log_with([(chunks[0], first), (chunks[1], second)])
        yield f"chunks {chunks} are on their way and one may be: wait for the first", log.receive(max_in_flight=1)
        yield "waits for the first and for the second", [first.waits, second.waits]

    def test_nothing_is_handed_out_before_an_older_chunk(self) -> Values:
        chunks = [some(1, 0, 99), some(1, 0, 99)]
        log = log_with([(chunks[0], FakeEvent(False)), (chunks[1], FakeEvent(True))])
        yield f"of chunks {chunks} only the second has arrived, and both may be under way", log.receive(max_in_flight=2)
        yield "then in their order", log.receive(max_in_flight=0)

    def test_any_order_of_arrival(self) -> Values:
        for _ in range(20):
            events = [FakeEvent(numbers.random() < 0.5) for _ in range(numbers.randint(1, 5))]
            there, most = [event.done for event in events], numbers.randint(0, 3)
            log = log_with([(some(2, 0, 99), event) for event in events])
            given = f"{len(events)} chunks, arrived {there}, {most} may be under way"
            yield f"{given}: ids", log.receive(max_in_flight=most)
            yield f"{given}: waits for each", [event.waits for event in events]


class FakeLog:
    """Counts calls. A chunk arrives at the second `receive` that may leave it in flight."""

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
        """Run the loop on a model that says input + 1, from a first token 0; returns log, token ids, steps run."""
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
        return log, completion.token_ids, steps

    def test_it_makes_all_tokens_and_no_step_more(self) -> Values:
        for count, every in ((10, 4), (1, 4), *zip(some(6, 1, 40), some(6, 1, 9), strict=True)):
            log, ids, steps = self.decode(count, sync_every=every)
            given = f"{count} tokens, sync_every={every}"
            yield f"{given}: the prefill's token 0, then one per step", ids
            yield f"{given}: inputs of the steps; the prefill made the first token", steps
            yield f"{given}: it sends every few steps, and after the last: after", log.sends
            yield f"{given}: it waits only for the last step: after", log.waits
            yield f"{given}: it receives in every step, sent or not: after", log.receives

    def test_the_sampler_chooses_with_the_noise_of_the_tokens_place(self) -> Values:
        _, ids, _ = self.decode(12, sync_every=4, temperature=3.0)
        yield "the token after n others is chosen with step = n", ids

    def test_the_end_is_noticed_late_but_nothing_after_it_counts(self) -> Values:
        for eos, every in ((5, 4), *zip(some(4, 1, 40), some(4, 1, 9), strict=True)):
            _, ids, steps = self.decode(100, sync_every=every, eos=eos)
            yield f"eos {eos}, sync_every={every}: what came after the end-of-sequence token is dropped", ids
            yield (
                f"eos {eos}, sync_every={every}: steps, of which two chunks may follow the end",
                Compared(len(steps), least=eos, most=-(-eos // every) * every + 2 * every),
            )

    def test_without_async_eos_every_step_is_waited_for(self) -> Values:
        for eos in (5, numbers.randint(1, 30)):
            log, ids, steps = self.decode(100, sync_every=4, async_eos=False, eos=eos)
            yield f"eos {eos}: tokens, and steps", [ids, len(steps)]
            yield f"eos {eos}: each step is sent and waited for: sends and waits after", [log.sends, log.waits]

    def test_penalties_and_logprobs_need_every_token_at_once(self) -> Values:
        for params in ({"presence_penalty": 0.1}, {"logprobs": 1}):
            log, _, _ = self.decode(numbers.randint(4, 9), sync_every=4, **params)
            yield f"with {params} every step is waited for: after", log.waits


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        plain = {"static_cache": False, "buffers": False, "pinned": False, "sdpa": False, "async_eos": False}
        yield from whole_stage(stage.LLM, {}, {"sync_every": 3}, plain, {"last_logits_only": False, "warmup": False})
