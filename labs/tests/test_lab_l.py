"""Drives lab L. Only the test of the whole engine needs a model; the ranks are threads."""

from __future__ import annotations

import contextlib
import io
import threading
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from beyond.experts import LLM, floor, layers, loop, parallel_loop
from labs.driving import Compared, close, error_of, numbers
from labs.tests.support import GREEDY, Values, some, whole_stage
from labs.variants import bias, blocks, copies
from stage_a_naive.checkpoints.experts import Experts
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.floor import ModelBytes
from stage_a_naive.sampling import SamplingParams


def chosen_by(tokens: int, experts: int, per_token: int) -> Tensor:
    """Different experts for each token, at random: int64 `[tokens, per_token]`."""
    return torch.rand(tokens, experts).topk(per_token).indices


class TestRouteWithBias:
    def test_the_bias_takes_part_in_the_choice_alone(self) -> Values:
        for per_token in (1, 2, 3, numbers.randint(4, 8)):
            scores, shift = torch.randn(12, 9), 0.2 * torch.randn(9)
            given = f"12 tokens, {per_token} of 9 experts each, biases {[round(b, 2) for b in shift.tolist()]}"
            weights, chosen, _ = bias.route_with_bias(scores, shift, per_token, 0.1)
            yield f"{given}: experts, the largest probability + bias first", chosen
            yield f"{given}: weights, of probabilities without the bias, with the sum 1", close(weights)

    def test_biases_move_by_the_tokens_of_their_experts(self) -> Values:
        for tokens, per_token in ((1, 1), (4, 2), (16, 2), some(2, 3, 6)):
            scores, shift = torch.randn(tokens, 8), torch.zeros(8)
            _, chosen, moved = bias.route_with_bias(scores, shift, per_token, 0.5)
            given = f"experts {chosen.tolist()} of 8, a mean of {chosen.numel() / 8:g}, all biases 0, speed 0.5"
            yield f"{given}: biases of the next step", moved
        given = "8 tokens choose each of 8 experts once"
        yield f"{given}: biases that have moved", bias.route_with_bias(5 * torch.eye(8), torch.zeros(8), 1, 0.5)[2]

    def test_the_given_bias_is_not_changed(self) -> Values:
        shift, scores = torch.randn(8), torch.randn(6, 8)
        before = shift.clone()
        bias.route_with_bias(scores, shift, 2, 0.5)
        yield "return a new tensor, please: numbers of the given bias that were changed", int((shift != before).sum())

    def test_the_tokens_spread(self) -> Values:
        mean = sum(bias.fullest(bias.SPEED)[-50:]) / 50
        yield "300 steps with favourites: tokens of the fullest expert, mean of the last 50", Compared(mean, most=19)


class TestRoute:
    def routed(self, given: str, scores: Tensor, experts: Experts) -> Values:
        weights, chosen = layers.route(scores, experts)
        rule = "sum to 1" if experts.weights_sum_to_one else "keep their probabilities"
        dtype = str(scores.dtype).removeprefix("torch.")
        rounds = f"are {dtype}" if experts.rounds_weights else "stay float32"
        given = f"{given}, {experts.per_token} of {experts.count}, {dtype} scores; weights {rule} and {rounds}"
        yield f"{given}: the experts, largest first", chosen
        loose = scores.dtype != torch.float32 and experts.rounds_weights
        yield f"{given}: the weights", close(weights, rtol=1e-2 if loose else 1e-5, atol=1e-6)

    def test_weights_are_a_float32_softmax_over_all_experts(self) -> Values:
        for sums in (True, False):
            for rounds in (True, False):
                for dtype in (torch.float32, torch.bfloat16):
                    # scores differ by more than bfloat16's rounding, so the order is certain
                    scores = torch.stack([torch.randperm(16) for _ in range(5)]).to(dtype) / 4
                    yield from self.routed("5 tokens", scores, Experts(16, 4, 8, 0, sums, rounds))

    def test_random_routers(self) -> Values:
        for _ in range(20):
            count = numbers.randint(2, 40)
            experts = Experts(count, numbers.randint(1, count), 8, 0, numbers.random() < 0.5, numbers.random() < 0.5)
            yield from self.routed("random scores", 3 * torch.randn(4, count), experts)

    def test_large_scores_do_not_overflow(self) -> Values:
        scores = torch.tensor([[400.0, 399.0, 0.0, -400.0]])
        yield from self.routed("scores 400, 399, 0, -400", scores, Experts(4, 2, 8, 0, False, False))


class TestGrouped:
    def grouped(self, given: str, x: Tensor, weights: Tensor, chosen: Tensor) -> Values:
        runs: list[tuple[int, int]] = []
        run = loop.compute

        def compute(expert: int, rows: Tensor) -> Tensor:
            runs.append((int(expert), len(rows)))
            return run(int(expert), rows)

        with patch.object(loop, "compute", compute):
            outputs, read = loop.grouped(x, weights, chosen)
        yield f"{given}: runs of `compute`, once for each expert that was chosen, as expert and rows", sorted(runs)
        yield f"{given}: experts read", read
        yield f"{given}: the outputs, which are those of `dense`", close(outputs, atol=1e-3, rtol=1e-3)

    def test_each_expert_runs_once_on_its_tokens_and_the_sum_is_weighted(self) -> Values:
        for tokens in (1, 2, 8, numbers.randint(20, 64)):
            x = torch.randn(tokens, loop.HIDDEN)
            yield from self.grouped(f"{tokens} tokens", x, *loop.route(x))

    def test_weights_belong_to_pairs(self) -> Values:
        for _ in range(5):
            tokens = numbers.randint(2, 12)
            x, chosen = torch.randn(tokens, loop.HIDDEN), chosen_by(tokens, loop.EXPERTS, loop.PER_TOKEN)
            weights = torch.rand(tokens, loop.PER_TOKEN)
            yield from self.grouped(f"{tokens} tokens, random experts, weights whose sum is not 1", x, weights, chosen)

    def test_all_tokens_may_have_the_same_experts(self) -> Values:
        x = torch.randn(6, loop.HIDDEN)
        chosen = torch.arange(loop.PER_TOKEN).expand(6, -1).clone()
        yield from self.grouped("6 tokens with the same experts", x, torch.rand(6, loop.PER_TOKEN), chosen)


class TestBlocksOf:
    def blocks(self, given: str, chosen: Tensor, experts: int, rows: int) -> Values:
        order, of_block = blocks.blocks_of(chosen, experts, rows)
        given = f"{given}, {experts} experts, blocks of {rows}"
        yield f"{given}: number of blocks, and their rows", list(order.shape)
        yield f"{given}: the expert of each block", of_block.tolist()
        yield f"{given}: the pairs in its rows", order.tolist()

    def test_the_pairs_of_an_expert_fill_its_blocks_in_order(self) -> Values:
        chosen = torch.tensor([[0, 2], [2, 3], [0, 3]])
        for rows in (1, 2, 4):
            yield from self.blocks(f"experts {chosen.tolist()}", chosen, 4, rows)

    def test_random_choices(self) -> Values:
        for _ in range(30):
            experts = numbers.randint(1, 12)
            chosen = chosen_by(numbers.randint(1, 12), experts, numbers.randint(1, experts))
            yield from self.blocks(f"experts {chosen.tolist()}", chosen, experts, numbers.choice([1, 2, 3, 4, 16]))

    def test_one_expert_may_have_all_pairs(self) -> Values:
        yield from self.blocks("10 tokens that choose expert 2", torch.full((10, 1), 2), 5, 4)

    def test_nothing_depends_on_a_number_that_the_host_would_wait_for(self) -> Values:
        with FakeTensorMode(allow_non_fake_inputs=True):
            unknown = torch.zeros(6, 2, dtype=torch.int64)  # a tensor that has a shape, and no numbers
            error = error_of(lambda: blocks.blocks_of(unknown, 5, 4), RuntimeError, TypeError)
        yield "with a tensor of which only the shape is known (tolist, nonzero, … cannot run): raises", error

    def test_a_layer_of_blocks_gives_what_the_loop_gives(self) -> Values:
        x = torch.randn(numbers.randint(3, 20), loop.HIDDEN)
        outputs, computed = blocks.in_blocks(x, *loop.route(x))
        yield f"{len(x)} tokens: rows computed", computed
        yield f"{len(x)} tokens: outputs of a layer", close(outputs, atol=1e-3, rtol=1e-3)


class TestExpectedTouched:
    def test_a_uniform_router(self) -> Values:
        for count, per_token in ((128, 8), (64, 8), (8, 2), (8, 8), (1, 1), (numbers.randint(20, 90), 3)):
            for tokens in (0, 1, 2, 32, numbers.randint(3, 300)):
                touched = floor.expected_touched(count, per_token, tokens)
                yield f"{tokens} tokens, {per_token} of {count} experts each", close(touched, atol=1e-9, rtol=1e-9)


def configs() -> dict[str, PretrainedConfig]:
    """Models of all kinds, by name."""
    found = {name: preset_config(name) for name in ("qwen3-30b-a3b", "qwen2-moe-tiny", "mixtral-tiny")}
    mixed = preset_config("qwen3-moe-tiny")
    mixed.num_hidden_layers, mixed.decoder_sparse_step, mixed.mlp_only_layers = 6, 2, [3]
    found["qwen3-moe-tiny, experts in layers 1 and 5 of 6"] = mixed
    found["qwen2.5-0.5b, which has none"] = preset_config("qwen2.5-0.5b")
    return found


class TestWeightBytes:
    def test_bytes_of_a_step(self) -> Values:
        for name, config in configs().items():
            experts = getattr(config, "num_experts", 1)
            for bytes_per_number in (2, 4):
                model = ModelBytes(config, bytes_per_number)
                per_token = getattr(config, "num_experts_per_tok", 1)
                for touched in (per_token, experts, numbers.randint(per_token, experts), per_token + 0.25):
                    found = floor.weight_bytes(model, touched)
                    given = f"{name}, {bytes_per_number} bytes per number, {touched} experts touched in a layer"
                    yield given, close(found, atol=0.5, rtol=1e-9)


class Ranks:
    """Ranks as threads, with an all-to-all between them that records how many rows go where."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier = count, threading.Barrier(count, timeout=20)
        self.own, self.sent = threading.local(), [[] for _ in range(count)]
        self.mail: list[list[Tensor]] = [[] for _ in range(count)]
        self.ran: list[list[range]] = [[] for _ in range(count)]
        self.errors: list[BaseException] = []

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        assert len(parts) == self.count, f"all_to_all takes a part per rank, {self.count}; {len(parts)} were given"
        rank = self.own.rank
        self.sent[rank].append([len(part) for part in parts])
        self.mail[rank] = parts
        self.barrier.wait()
        found = [self.mail[other][rank].clone() for other in range(self.count)]
        self.barrier.wait()
        return found

    def add_experts(self, x: Tensor, weights: Tensor, experts: range, *rest: object) -> Tensor:
        self.ran[self.own.rank].append(experts)
        return ADD_EXPERTS(x, weights, experts, *rest)

    def run(self, x: Tensor) -> list[tuple[Tensor, int]]:
        """Run `dispatched` on all ranks, `x [ranks, tokens, hidden]`; return each rank's results."""
        found: list = [None] * self.count

        def as_rank(rank: int) -> None:
            self.own.rank = rank
            try:
                found[rank] = parallel_loop.dispatched(rank, x[rank])
            except BaseException as error:
                self.errors.append(error)
                self.barrier.abort()

        fakes = {"RANKS": self.count, "all_to_all": self.all_to_all, "add_experts": self.add_experts}
        with patch.multiple(parallel_loop, **fakes):
            threads = [threading.Thread(target=as_rank, args=(rank,), daemon=True) for rank in range(self.count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in self.errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not self.errors, "a rank waits in all_to_all for another one, which does not call it as often"
        return found


ADD_EXPERTS = parallel_loop.add_experts


class TestDispatched:
    def test_rows_go_to_the_ranks_of_their_experts_and_sums_come_back(self) -> Values:
        for count, tokens in ((2, 5), (2, numbers.randint(20, 64)), (4, numbers.randint(6, 12)), (1, 4)):
            ranks, x = Ranks(count), torch.randn(count, tokens, loop.HIDDEN)
            found = ranks.run(x)
            given = f"{count} ranks with {tokens} tokens each"
            for rank, (outputs, sent) in enumerate(found):
                whose = f"{given}, rank {rank}"
                yield f"{whose}: rows that it sends to each rank, to dispatch and to combine", ranks.sent[rank]
                yield f"{whose}: experts that it runs", sorted({(e.start, e.stop) for e in ranks.ran[rank]})
                yield f"{whose}: the outputs of its tokens", close(outputs, atol=1e-3, rtol=1e-3)
                yield f"{whose}: rows that it has sent to other ranks", sent

    def test_a_rank_may_have_nothing_to_send(self) -> Values:
        ranks, direction = Ranks(4), torch.zeros(loop.HIDDEN)
        x = torch.stack([direction.expand(3, -1) + 10 * loop.ROUTER[rank] for rank in (0, 20, 40, 60)])
        for rank, (outputs, sent) in enumerate(ranks.run(x)):
            yield f"equal tokens of rank {rank} of 4: rows that go to each rank", ranks.sent[rank]
            yield f"equal tokens of rank {rank} of 4: the outputs", close(outputs, atol=1e-3, rtol=1e-3)
            yield f"equal tokens of rank {rank} of 4: rows sent", sent


class TestPlaced:
    def test_copies_and_their_ranks(self) -> Values:
        cases = [
            ([8, 2, 2, 2, 1, 1], 2, 8),
            ([6, 6, 6], 2, 4),
            ([5, 4, 3, 2], 2, 4),
            ([0, 0, 0], 3, 6),
            ([100, 1, 1, 1], 4, 8),
            ([7], 1, 3),
        ]
        for _ in range(40):
            ranks = numbers.randint(1, 5)
            experts = numbers.randint(1, 12)
            slots = ranks * (-(-experts // ranks) + numbers.randint(0, 3))
            cases.append((some(experts, 0, 30), ranks, slots))
        for tokens, ranks, slots in cases:
            held = copies.placed(list(tokens), ranks, slots)
            given = f"tokens {tokens} of each expert, {ranks} ranks, {slots} slots"
            yield f"{given}: copies of each expert", [sum(r.count(e) for r in held) for e in range(len(tokens))]
            yield f"{given}: slots used of each rank", [len(rank) for rank in held]
            yield f"{given}: the experts of each rank", held

    def test_the_given_list_is_not_changed(self) -> Values:
        tokens = some(6, 1, 30)
        before = list(tokens)
        copies.placed(tokens, 2, 8)
        yield f"{before}: the list of tokens afterwards", tokens


class TestWholeStage:
    def test_the_tutor_which_has_no_experts_answers(self) -> Values:
        yield from whole_stage(LLM, num_kvcache_blocks=64)

    def test_a_model_with_experts_answers_in_a_batch(self) -> Values:
        prompts = [some(numbers.randint(3, 30), 1, 4000) for _ in range(4)]
        sampled = SamplingParams(temperature=1.0, seed=numbers.randrange(1000), max_tokens=12, ignore_eos=True)
        for preset in ("qwen3-moe-tiny", "mixtral-tiny"):
            llm = LLM(f"random:{preset}", device="cpu", dtype="float32", num_kvcache_blocks=64)
            try:
                outputs = llm.generate(prompts, [GREEDY, sampled, GREEDY, sampled], use_tqdm=False)
            finally:
                llm.close()
            for number, output in enumerate(outputs):
                yield f"{preset}, request {number}: tokens", output["token_ids"]

    def test_the_programs_say_what_the_lesson_says(self) -> Values:
        for program in (loop, blocks, copies):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                program.main()
            yield f"{program.__name__} prints", said.getvalue()
