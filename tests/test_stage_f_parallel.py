"""A model split over several ranks computes the same as the whole model, and each rank reads only its part.

A `RankGroup` is an object and not global, so the ranks of most tests here are threads of one process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fake_model import completion_of
from ranks import within_seconds
from safetensors.torch import save_file

import stage_f_graph_tp
from stage_a_naive.checkpoints.loading import random_tensor, resolve
from stage_d_paged.attention import pick_backend
from stage_d_paged.batch import Chunk, flat_batch
from stage_d_paged.config import ModelConfig
from stage_d_paged.kv_cache import KVCache, PoolShape
from stage_d_paged.layers import Embedding
from stage_d_paged.runtime import Plan, Runtime, build_model
from stage_d_paged.sequence import Sequence
from stage_d_paged.weights import RandomWeights, SafetensorsDirectory, TensorSource
from stage_f_graph_tp.options import GraphOptions
from stage_f_graph_tp.ranks import Job, build_worker
from stage_f_graph_tp.tensor_parallel import rank_group, start_ranks
from stage_f_graph_tp.tensor_parallel.rank_group import RankGroup
from stage_f_graph_tp.tensor_parallel.sharding import (
    VocabParallelEmbedding,
    build_sharded_model,
    check_divisible,
)
from stage_f_graph_tp.tensor_parallel.watch.rendezvous import (
    Rendezvous,
)

CPU, F32 = torch.device("cpu"), torch.float32


def on_ranks(size: int, work: Callable[[RankGroup], object]) -> list:
    """Run `work` on `size` ranks at the same time; returns their results by rank."""
    store = dist.HashStore()

    def run(rank: int) -> object:
        group = RankGroup(Rendezvous(store, rank, size), CPU)
        group.connect()
        return work(group)

    with torch.inference_mode(), ThreadPoolExecutor(size) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "COLLECTIVE_TIMEOUT", timedelta(seconds=30))  # where a rank has failed
        return list(pool.map(run, range(size)))


def config_of(preset: str, **changes: object) -> ModelConfig:
    return replace(ModelConfig.from_hf(resolve(f"random:{preset}").config), **changes)


def run_model(
    config: ModelConfig, tensors: TensorSource, group: RankGroup | None = None, **how: object
) -> torch.Tensor:
    """Logits after a prefill of two prompts and after a decode step: `[4, vocab]`. `group`: of a rank's share."""
    plan = Plan(config, pick_backend("reference", CPU, F32, config.head_dim), 64, tensors, F32, CPU, **how)
    model = build_model(plan) if group is None else build_sharded_model(plan, group)
    shape = PoolShape(config.num_layers, 16, 4, model.config.num_kv_heads, config.head_dim, F32, CPU)
    pool = KVCache(shape)
    sequences = [Sequence(completion_of(range(3 + i, 12 + 3 * i))) for i in range(2)]
    for i, sequence in enumerate(sequences):
        sequence.block_table = list(range(8 * i, 8 * i + 8))
    logits = []
    for step in range(2):
        chunks = [Chunk(s, step * (len(s) - 1), 1 if step else len(s)) for s in sequences]
        batch = flat_batch(chunks, 4, CPU)
        with torch.inference_mode():
            hidden = model(batch.input_ids, batch.positions, pool, batch.metadata)
            logits.append(model.compute_logits(hidden[batch.last_rows]))
        for sequence in sequences:
            sequence.token_ids.append(7)
    return torch.cat(logits)


def random_weights() -> RandomWeights:
    return RandomWeights("random", 0, CPU, F32)


def test_the_three_collectives():
    def work(group: RankGroup) -> tuple[torch.Tensor, ...]:
        own = torch.full((2, 3), float(group.rank + 1))
        told = torch.full((2,), group.rank + 5)
        group.broadcast(told)
        residual = torch.full((2, 3), 0.5)
        assert group.all_reduce(own.clone(), residual) is residual
        assert group.gather("who", f"rank {group.rank}") == ["rank 0", "rank 1", "rank 2"]
        return group.all_reduce(own.clone()), residual, group.all_gather(own), told

    for total, residual, gathered, told in on_ranks(3, work):
        assert total.tolist() == [[6.0] * 3] * 2
        assert residual.tolist() == [[6.5] * 3] * 2
        assert gathered.tolist() == [[1.0] * 3 + [2.0] * 3 + [3.0] * 3] * 2
        assert told.tolist() == [5, 5]


def test_a_rank_may_be_late_for_a_collective():
    def work(group: RankGroup) -> torch.Tensor:
        if group.rank == 1:
            time.sleep(2 * rank_group.CONNECT_TIMEOUT.total_seconds())
        return group.all_reduce(torch.ones(1))

    assert on_ranks(2, work) == [torch.tensor([2.0])] * 2


class ReleasedGroup(RankGroup):
    """A group whose collectives an abort has ended, as on a GPU."""

    def __init__(self) -> None:
        super().__init__(Rendezvous(dist.HashStore(), 0, 2), CPU)
        self._released = True


def test_no_collective_begins_after_the_ranks_were_released():
    with pytest.raises(RuntimeError, match="the other ranks have been released"):
        ReleasedGroup().broadcast(torch.ones(1))


def test_ranks_that_execute_different_commands_notice_it_before_any_tensor_is_mixed_up():
    def work(group: RankGroup) -> None:
        group.agree_on(7)
        if group.rank == 0:
            group.agree_on(9)
        else:
            with pytest.raises(RuntimeError, match="out of step: command 9 came where command 8 was expected"):
                group.agree_on(8)

    on_ranks(2, work)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_model_gives_the_whole_models_logits(preset, ranks, tied):
    # 4 ranks share 2 KV heads; 4099 is no multiple of anything.
    config = config_of(preset, vocab_size=4099, tie_word_embeddings=tied)
    whole = run_model(config, random_weights())
    shards = on_ranks(ranks, lambda group: run_model(config, random_weights(), group))
    for logits in shards:
        assert logits.shape == (4, 4099)
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, shards[0]), "all ranks see the same logits"


@pytest.mark.parametrize(("vocab", "ranks"), [(10, 2), (11, 2), (5, 4), (4096, 3)])
def test_every_token_is_looked_up_and_scored_by_exactly_one_rank(vocab, ranks):
    table, hidden = torch.randn(vocab, 8), torch.randn(3, 8)

    def work(group: RankGroup) -> tuple[torch.Tensor, ...]:
        share = -(-vocab // ranks)
        rows = Embedding(share, 8, F32, CPU)
        rows.weight.zero_()
        own = table[group.rank * share : (group.rank + 1) * share]
        rows.weight[: len(own)] = own
        embedding = VocabParallelEmbedding(rows, vocab, group)
        return embedding(torch.arange(vocab)), embedding.logits(hidden)

    for rows, logits in on_ranks(ranks, work):
        assert torch.equal(rows, table)
        torch.testing.assert_close(logits, hidden @ table.T)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """llama-tiny with 2 KV heads as a directory of two safetensors files."""
    path = tmp_path_factory.mktemp("checkpoint")
    config = config_of("llama-tiny")
    shapes: dict[str, tuple[int, ...]] = {}

    class Recorder(RandomWeights):
        def lazy(self, name, shape):
            shapes[name] = shape
            return super().lazy(name, shape)

    run_model(config, Recorder("random", 0, CPU, F32))
    tensors = {name: random_tensor(name, shape, 0, CPU, F32).contiguous() for name, shape in shapes.items()}
    files = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path, config, sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_only_its_slices_of_the_files(checkpoint, ranks):
    path, config, total = checkpoint
    whole = run_model(config, random_weights())

    class Counting(SafetensorsDirectory):
        count = 0

        def lazy(self, name, shape):
            stored = super().lazy(name, shape)

            class Slices:
                def __getitem__(_, index):  # noqa: N805
                    self.count += stored[index].numel()
                    return stored[index]

            return Slices()

    def work(group: RankGroup) -> tuple[torch.Tensor, int]:
        source = Counting(path)
        return run_model(config, source, group), source.count

    norms = config.hidden_size * (2 * config.num_layers + 1)
    copies = max(1, ranks // config.num_kv_heads)  # of each KV head
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
    for logits, count in on_ranks(ranks, work):
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        assert count == norms + (total - norms - kv) // ranks + kv * copies // ranks


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (3, {}, "tensor_parallel_size=3 does not divide the model's 4 attention heads"),
        (8, {}, "tensor_parallel_size=8 does not divide the model's 4 attention heads"),
        (4, {"intermediate_size": 322}, "does not divide the model's 322 intermediate features"),
        (6, {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 60}, "4 KV heads do not divide one another"),
    ],
    ids=str,
)
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(ranks, changes, message):
    with pytest.raises(ValueError, match=message):
        check_divisible(config_of("qwen2-tiny", **changes), ranks)


def test_the_engine_refuses_them_and_more_ranks_than_gpus_before_anything_starts():
    with within_seconds(), pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide"):
        stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", tensor_parallel_size=3)
    gpus = torch.cuda.device_count()
    with within_seconds(), pytest.raises(ValueError, match=f"^tensor_parallel_size=9, but there are {gpus} GPUs"):
        start_ranks(gpus + 1, "tensor_parallel_size=9", torch.device("cuda"), build_worker)


def test_under_torchrun_which_has_started_processes_of_its_own_no_others_are_started(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ValueError, match="tensor_parallel_size=2 under torchrun: use `from beyond import LLM`"):
        stage_f_graph_tp.LLM("random:qwen2-tiny", device="cpu", tensor_parallel_size=2)


def test_ranks_with_unequal_memory_take_the_smallest_number_of_blocks():
    events, connecting, free = [], threading.Event(), ["50", "30"]

    class UnequalMemory(Rendezvous):
        def gather(self, key: str, value: str, check: Callable[[], None]) -> list[str]:
            return super().gather(key, free[self.rank] if key == "blocks" else value, check)

        @property
        def own_address(self) -> str:  # the first that connecting asks for
            connecting.set()
            events.append("connects")
            return super().own_address

    class SlowJob(Job):
        def load(self, options: GraphOptions, device: torch.device, build: partial) -> Runtime:
            runtime = super().load(options, device, build)
            if build.keywords["group"].rank == 1:
                connecting.wait(0.3)  # rank 0 would have gone on by then, but must not
            events.append("loaded")
            return runtime

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = store, dist.TCPStore("127.0.0.1", store.port, is_master=False)
    job = SlowJob.of("random:qwen2-tiny", CPU, F32, 0, GraphOptions(tensor_parallel_size=2, max_model_len=64))
    with ThreadPoolExecutor(2) as pool:
        meetings = [UnequalMemory(own, rank, 2) for rank, own in enumerate(stores)]
        runners = [rank.runner for rank in pool.map(job.build, meetings)]
    assert events == ["loaded"] * 2 + ["connects"] * 2, "a collective is entered when all ranks will enter it"
    assert [runner.kv_cache.num_blocks for runner in runners] == [30, 30]
    assert {runner.kv_cache.tensor.shape[-2] for runner in runners} == {1}, "one of the two KV heads each"
