"""Layers spread over stages: the tokens of one rank, several batches in flight, errors instead of hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contract.engines import GREEDY, MODEL, PROMPTS, ask
from ranks import admit_whoever_fits, children, forked_ranks, in_other_ranks, killed_soon, stop, within_seconds

import stage_e_batching
from beyond.options import Options
from beyond.ranks import Job, build_worker
from beyond.scale_out import LLM, pipeline_ranks
from beyond.scale_out.links import SENDER, Link, Position
from beyond.scale_out.pipeline_ranks import StageRank, build_stage
from beyond.scale_out.spans import idle_in_theory, idle_share, read_spans
from beyond.scale_out.stages import StageTensors, layers_of
from stage_a_naive.checkpoints.loading import resolve
from stage_a_naive.contract.errors import ModelError
from stage_a_naive.sampling import SamplingParams
from stage_d_paged.attention import pick_backend
from stage_d_paged.config import ModelConfig
from stage_d_paged.runtime import Plan, build_model
from stage_d_paged.weights import RandomWeights
from stage_f_graph_tp.ranks import build_ranks
from stage_f_graph_tp.tensor_parallel import RankGroup, Rendezvous, WorkerError
from stage_f_graph_tp.tensor_parallel.rank_group import CONNECT_TIMEOUT
from stage_f_graph_tp.tensor_parallel.watch import workers

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
CPU, F32 = torch.device("cpu"), torch.float32
TIGHT = {"num_kvcache_blocks": 40, "kvcache_block_size": 2, "max_num_batched_tokens": 20, "max_num_seqs": 6}


def staged(size: int = 2, **options: object) -> LLM:
    """An engine whose other stages are forks."""
    with forked_ranks():
        return LLM(MODEL, device="cpu", pipeline_parallel_size=size, **options)


@pytest.fixture(scope="module")
def one_rank() -> stage_e_batching.LLM:
    return stage_e_batching.LLM(MODEL, device="cpu", num_kvcache_blocks=256)


@pytest.fixture(scope="module")
def two_stages():
    """Small chunks and a pool that is too small for all requests at once."""
    llm = staged(**TIGHT)
    admit_whoever_fits(llm)
    yield llm
    llm.close()


def test_a_request_aborted_in_flight_does_not_disturb_the_one_that_gets_its_batch_slot(one_rank, two_stages):
    """Its token is sampled when another request could have its row of the sampler's penalties already."""
    penalised = SamplingParams(temperature=0, frequency_penalty=1.9, max_tokens=12, ignore_eos=True)
    expected = ask(one_rank, [[9, 9, 9]], penalised)
    for steps in range(2, 9):
        request_id = two_stages.add_request([8, 8, 8], penalised)
        for _ in range(steps):
            two_stages.step()
        two_stages.calls.abort(request_id)
        assert ask(two_stages, [[9, 9, 9]], penalised) == expected
        while not two_stages.is_finished():
            two_stages.step()


def test_ctrl_c_costs_its_call_and_leaves_the_stages_in_step(one_rank, two_stages):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for seconds in (0.05, 0.21, 0.4):
            timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
            with pytest.raises(KeyboardInterrupt):
                timer.start()  # here: outside it would end the tests
                for _ in range(200):
                    two_stages.generate(PROMPTS, GREEDY, False)
            timer.join()
            assert ask(two_stages, PROMPTS) == ask(one_rank, PROMPTS)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_just_before_a_step_is_sampled_does_not_leave_its_states_on_their_way(one_rank, two_stages, monkeypatch):
    commands, in_step = [], two_stages.runner.ranks.in_step

    def interrupted_once(command):
        commands.append(command)
        if len(commands) == 2:  # after the prefill; without a command, because stage 0 is one rank
            raise KeyboardInterrupt
        return in_step(command)

    monkeypatch.setattr(two_stages.runner.ranks, "in_step", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        two_stages.generate([[4, 2]], GREEDY, False)
    assert commands[1:] == [None, None], "they are received, and dropped"
    assert ask(two_stages, [[4, 2]], GREEDY) == ask(one_rank, [[4, 2]], GREEDY)


def test_a_stage_waits_for_one_that_takes_longer_than_a_connection_may(one_rank, two_stages):
    pause = lambda *_: time.sleep(2 * CONNECT_TIMEOUT.total_seconds())  # noqa: E731
    slow = two_stages.runner.model.layers[0].register_forward_pre_hook(pause)
    params = replace(GREEDY, max_tokens=1)
    assert ask(two_stages, [[4, 2]], params) == ask(one_rank, [[4, 2]], params)
    slow.remove()


@needs_proc
def test_a_killed_stage_is_an_error_within_seconds():
    with within_seconds():
        before = children()
        llm = LLM(MODEL, device="cpu", pipeline_parallel_size=2)  # not a fork: as engines start one
        [process] = children() - before
        with killed_soon(process), pytest.raises(WorkerError, match="rank 1 of 2 died .SIGKILL."):
            for _ in range(1000):
                ask(llm, PROMPTS)
        with pytest.raises(WorkerError, match="close it and make a new one"):
            ask(llm, PROMPTS)
        llm.close()


@needs_proc
def test_a_stage_that_stops_in_a_step_is_an_error_that_names_it_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 3.0)
    with within_seconds():
        with in_other_ranks(StageRank, "choose_run", lambda rank: rank.head.links.stage == 1 and stop()):
            llm = LLM("tutor", device="cpu", pipeline_parallel_size=3, **TIGHT)
        with pytest.raises(WorkerError, match="rank 1 of 3 is stopped and did not answer within 3 s"):
            ask(llm, PROMPTS)
        llm.close()


class NotedLink(Link):
    """A link whose messages are lists of sent tensors, and which records its waits."""

    def __init__(self) -> None:
        super().__init__(Rendezvous(None, SENDER, 2), CPU, None, max_unsent=2)
        self.waited = []

    def _start(self, operation: str, tensor: torch.Tensor, *to: object) -> torch.Tensor:
        return tensor

    def _wait(self, tensor: torch.Tensor) -> None:
        self.waited.append(int(tensor[0, 0]))


def test_a_link_waits_for_the_oldest_tensor_where_too_many_have_not_arrived():
    link = NotedLink()
    for i in range(5):
        link.send(torch.full((2, 3), float(i)), number=7)
    assert link.waited == [0, 1, 2] and link.num_bytes == 5 * 2 * 3 * 4


def test_a_stage_does_not_take_the_states_of_another_command_for_its_own():
    store = dist.HashStore()

    def work(rank: int) -> None:
        link = Link(Rendezvous(store, rank, 2), CPU, None, max_unsent=2)
        link.connect()
        out = torch.zeros(2, 3)
        if rank == SENDER:
            link.send(torch.ones(2, 3), number=7)
            link.send(torch.ones(2, 3), number=9)
        else:
            assert link.receive(out, number=7).tolist() == [[1.0] * 3] * 2
            with pytest.raises(RuntimeError, match="out of step: command 9 came where command 8 was expected"):
                link.receive(out, number=8)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


# ---- contents of a stage ------------------------------------------------------------------------------------------


def test_a_layer_that_the_model_does_not_have_is_not_taken_for_another_stages():
    whole = SimpleNamespace(names=lambda: {f"model.layers.{layer}.mlp" for layer in range(5)})
    tensors = StageTensors(whole, layers=range(2), num_layers=4, has_tables=True)
    assert tensors.names() == {"model.layers.0.mlp", "model.layers.1.mlp", "model.layers.4.mlp"}, "refused"


def test_stages_have_consecutive_layers_and_the_first_ones_no_more_than_the_others():
    for num_layers in range(1, 30):
        for num_stages in range(1, num_layers + 1):
            parts = [layers_of(stage, num_stages, num_layers) for stage in range(num_stages)]
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert len(parts[0]) == min(map(len, parts)) and max(map(len, parts)) - len(parts[0]) <= 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_its_layers_only_and_the_tables_are_stage_0s(tied):
    config = replace(ModelConfig.from_hf(resolve("random:qwen2-tiny").config), tie_word_embeddings=tied)
    names: list[str] = []

    class Stored(RandomWeights):
        """Random weights with a known list of names, like a checkpoint."""

        known: set[str] | None = None

        def names(self):
            return self.known

        def lazy(self, name, shape):
            names.append(name)
            return super().lazy(name, shape)

    backend = pick_backend("reference", CPU, F32, config.head_dim)
    whole = Stored("stored", 0, CPU, F32)
    plan = Plan(config, backend, 64, whole, F32, CPU)
    build_model(plan)
    whole.known, read = set(names), []
    for rank in range(2):
        names.clear()
        group = RankGroup(Rendezvous(None, 0, 1), CPU)
        model = build_stage(plan, group, Position(rank, 2, 1))
        assert len(model.layers) == config.num_layers // 2
        assert sum(weight.numel() for weight in model.embed_tokens.parameters()) == config.hidden_size * (
            1 if rank else config.vocab_size
        )
        read.append(set(names))
    assert read[0] | read[1] == whole.known and read[0] & read[1] == {"model.norm.weight"}
    assert not any("embed" in name or "head" in name or ".layers.0." in name for name in read[1])
    whole.known -= {"model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ModelError, match="whose layer 0 is the model's layer 1: .*layers.0.mlp.up_proj.weight is miss"):
        build_stage(plan, group, Position(1, 2, 1))
    whole.known |= {"model.layers.1.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight"}
    with pytest.raises(ModelError, match="1 weights that the model does not have: model.layers.9"):
        build_stage(plan, group, Position(1, 2, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer, 1 or more, got 0"),
        ({"pipeline_parallel_size": None}, "pipeline_parallel_size must be an integer, 1 or more, got None"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size must be an integer, 1 or more, got True"),
        ({"num_micro_batches": 0}, "num_micro_batches must be None or an integer, 1 or more, got 0"),
        ({"num_micro_batches": 2}, "num_micro_batches=2 needs pipeline_parallel_size above 1"),
        ({"pipeline_parallel_size": 2, "without": "overlap"}, r"without=\('overlap',\) cannot be combined with"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5, but the model has 2 layers"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_starts(options, message):
    with within_seconds(), pytest.raises(ValueError, match=message):
        LLM(MODEL, device="cpu", **options)


def test_more_ranks_than_gpus_are_refused_by_the_options_that_ask_for_them():
    gpus, config = torch.cuda.device_count(), ModelConfig.from_hf(resolve(MODEL).config)
    options = Options(pipeline_parallel_size=gpus + 2, tensor_parallel_size=2)
    job = Job.of(MODEL, torch.device("cuda"), torch.bfloat16, 0, options)
    asked = f"pipeline_parallel_size={gpus + 2}, tensor_parallel_size=2, but there are {gpus} GPUs"
    with pytest.raises(ValueError, match=asked):
        build_ranks(job, config, build_worker)


def test_all_stages_have_the_blocks_that_every_one_has_room_for_and_the_scheduler_its_options(monkeypatch):
    here = os.getpid()
    monkeypatch.setattr(pipeline_ranks, "choose_num_blocks", lambda *_: 30 if os.getpid() == here else 20)
    llm = staged(enable_prefix_caching=False, enable_chunked_prefill=False, max_num_seqs=3, max_num_batched_tokens=64)
    scheduler = llm.engine.scheduler
    llm.close()
    assert (llm.kv_cache.num_blocks, scheduler.block_manager.num_blocks) == (20, 20)
    assert scheduler.block_manager.enable_prefix_caching is scheduler.enable_chunked_prefill is False
    assert (scheduler.num_micro_batches, scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (2, 3, 64)


def test_a_stage_that_cannot_be_built_is_an_error_that_names_it():
    def fail(config: ModelConfig) -> None:
        raise MemoryError("no room for the layers of this stage")

    reason = "rank 1 of 2 failed: MemoryError: no room for the layers of this stage"
    with in_other_ranks(pipeline_ranks, "build_stage", fail), pytest.raises(WorkerError, match=reason):
        LLM(MODEL, device="cpu", pipeline_parallel_size=2)


def test_rank_0_alone_writes_a_stages_trace(tmp_path):
    llm = staged(tensor_parallel_size=2, trace=str(tmp_path / "trace.jsonl"))
    ask(llm, [[3, 4, 5]])
    llm.close()
    for stage in range(2):
        spans = read_spans(tmp_path / f"trace.jsonl.stage{stage}")
        assert len({(span["step"], span["work"]) for span in spans}) == len(spans) > 0


# ---- measurements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2])
def test_the_trace_shows_in_which_order_the_stages_worked(batches, tmp_path):
    """Compare only events that wait for each other, so that no machine is too slow for the test."""
    trace = str(tmp_path / "trace.jsonl")
    llm = staged(num_micro_batches=batches, trace=trace)
    llm.generate([[5 + i] for i in range(8)], replace(GREEDY, max_tokens=8), False)
    llm.close()
    stages = [read_spans(f"{trace}.stage{stage}") for stage in range(2)]
    assert sum(span["tokens"] for span in stages[0] if span["work"] == "head") == 8 * 8
    assert all(span["start"] <= span["end"] for spans in stages for span in spans)
    layers, head = ({s["step"]: s for s in stages[0] if s["work"] == work} for work in ("layers", "head"))
    after = {span["step"]: span for span in stages[1]}
    assert {span["work"] for span in stages[1]} == {"layers"} and layers.keys() == head.keys() == after.keys()
    for step in layers:
        assert layers[step]["start"] < after[step]["start"] < after[step]["end"] < head[step]["start"]
    early = [step for step in layers if step > 1 and layers[step]["start"] < head[step - 1]["start"]]
    assert bool(early) == (batches > 1), "with two batches stage 0 begins one before the other has come back"
    assert 0 < idle_share(stages) < 1


def test_idle_share_is_what_is_left_of_all_stages_time():
    def spans(*times):
        return [{"start": start, "end": end} for start, end in times]

    assert idle_share([spans((0.0, 1.0), (2.0, 3.0)), spans((1.0, 2.0))]) == pytest.approx(0.5)
    assert [idle_in_theory("decode", batches, 2) for batches in (1, 2, 4)] == [0.5, 0, 0]


def test_a_stage_sends_a_hidden_state_per_token_and_the_last_one_per_sampled_token(two_stages):
    before = two_stages.runner.head.links.num_bytes
    two_stages.generate([[3, 4, 5, 6, 7]], replace(GREEDY, max_tokens=4), False)
    hidden = two_stages.runtime.config.hidden_size * 4  # bytes, in float32
    assert two_stages.runner.head.links.num_bytes - before == (5 + 3) * hidden


def test_as_many_batches_as_stages_are_in_flight_or_as_many_as_asked_for():
    options = Options(pipeline_parallel_size=3)
    assert [replace(options, num_micro_batches=n).batches_in_flight for n in (None, 1, 5)] == [3, 1, 5]
    assert Options(num_micro_batches=1).batches_in_flight == 1, "one stage has one batch"
    assert type(Options(pipeline_parallel_size=np.int64(3)).pipeline_parallel_size) is int
