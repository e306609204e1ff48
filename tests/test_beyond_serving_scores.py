"""Log-probabilities of prompts: those of the model, whatever the prefix cache holds and however long a prompt is."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial

import pytest
import torch
from serving import CHAT, QUESTION, ask, assert_idle, engine, get, served, streamed, wait_until
from transformers import AutoModelForCausalLM

from beyond.serving.async_llm import groups
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract import logprobs
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import scoring
from stage_e_batching.calls import Calls
from stage_e_batching.scoring import WAIT_SECONDS, score_prompts
from stage_f_graph_tp import LLM as StageF


def scored(prompts: list[list[int]], count: int, calls: Calls) -> list:
    """Score prompts while no step runs."""
    return next(filter(None, score_prompts(prompts, count, calls)))


ANSWER = QUESTION + " It stores the keys and values of earlier tokens, so that no step computes them again."

llm = engine(max_num_seqs=4, num_kvcache_blocks=24, kvcache_block_size=16)
server = served()


@pytest.fixture(scope="module")
def expected():
    """What transformers says: a function of token ids; returns log-probabilities `[tokens - 1, vocab]`."""
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return logprobs


def test_the_log_probabilities_of_prompts_are_the_models_also_where_the_cache_holds_their_beginning(llm, expected):
    ids = llm.tokenizer.encode(ANSWER)
    llm.generate([ANSWER], SamplingParams(max_tokens=1), False)  # now the prefix cache has its full blocks
    for prompts in ([ids], [ids, ids[5:], ids[:1]]):
        found = scored(prompts, 2, llm.calls)
        for prompt, told in zip(prompts, found, strict=True):
            assert told[0] is None and len(told) == len(prompt)
            for token_id, one, row in zip(prompt[1:], told[1:], expected(prompt) if prompt[1:] else (), strict=True):
                values, best = row.topk(2)
                assert list(one)[:2] == best.tolist() and token_id in one and len(one) <= 3
                assert one[token_id] == pytest.approx(row[token_id].item(), abs=1e-3)
                assert [one[i] for i in best.tolist()] == pytest.approx(values.tolist(), abs=1e-3)
    assert_idle(llm)


def test_pieces_of_rows_and_chunks_of_a_long_prompt_give_the_same(llm, monkeypatch):
    ids = llm.tokenizer.encode(ANSWER)
    [whole] = scored([ids], 1, llm.calls)
    monkeypatch.setattr(scoring, "MOST_TOKENS", 7)
    monkeypatch.setattr(logprobs, "ROWS", 3)
    [cut] = scored([ids], 1, llm.calls)
    assert len(cut) == len(whole) and cut[0] is None
    for one, other in zip(cut[1:], whole[1:], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_stage_f_scores_between_its_overlapped_steps():
    with closing(StageF("tutor", device="cpu", num_kvcache_blocks=64)) as llm:
        ids = llm.tokenizer.encode(ANSWER)
        before = scored([ids], 1, llm.calls)
        expected = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=8), False)[0]["token_ids"]
        request_id = llm.add_request(QUESTION, SamplingParams(temperature=0, max_tokens=8))
        llm.step()  # one more is in flight now
        assert scored([ids], 1, llm.calls) == before
        ended = []
        while not llm.is_finished():
            ended += llm.step()[0]
        assert ended == [(request_id, expected)]


def test_a_prompt_waits_for_blocks_and_then_keeps_them_until_it_is_done(server, llm, monkeypatch):
    monkeypatch.setattr(scoring, "MOST_TOKENS", 50)
    used = []
    run = scoring.Scoring.step

    def watched(self, pool):
        has_run = run(self, pool)
        used.append(len(self._left[0][0].block_table) if self._left else has_run)
        return has_run

    monkeypatch.setattr(scoring.Scoring, "step", watched)
    hog = {"prompt": [7] * 200, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    other = threading.Thread(target=partial(ask, server, **hog))
    other.start()
    wait_until(lambda: llm.calls.stats()["num_used_blocks"] > 12)
    answer = ask(server, prompt=[9] * 190, echo=True, logprobs=1, max_tokens=0)
    other.join(60)
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 190
    assert used[0] == 0 and used[-4:] == [12, 12, 12, True]
    assert_idle(llm)


def test_a_long_prompt_is_scored_while_others_keep_coming(server, llm):
    ended, is_scored = [], threading.Event()

    def keep_asking(i: int) -> None:
        while not is_scored.is_set():
            ended.append(ask(server, prompt=[i + 5] * 60, max_tokens=20, ignore_eos=True).status_code)

    others = [threading.Thread(target=keep_asking, args=(i,)) for i in range(8)]
    for other in others:
        other.start()
    wait_until(lambda: len(ended) > 4)
    answer = ask(server, prompt=[9] * 370, echo=True, logprobs=1, max_tokens=0)  # all 24 blocks
    is_scored.set()
    for other in others:
        other.join(60)
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 370
    assert set(ended) == {200}
    assert_idle(llm)


def test_a_prompt_whose_blocks_another_thread_has_waits_without_spinning(llm, monkeypatch):
    monkeypatch.setattr(scoring, "MOST_TOKENS", 16)
    first = score_prompts([[5] * 300], 1, llm.calls)
    assert [next(first), next(first)] == [None, None]  # it has begun, and has its blocks
    tries = []
    run = scoring.Scoring.step
    monkeypatch.setattr(scoring.Scoring, "step", lambda self, pool: tries.append(run(self, pool)) or tries[-1])
    found = []
    other = threading.Thread(target=lambda: found.append(llm._score([9] * 300, 1)))
    other.start()
    time.sleep(0.3)
    assert 1 <= len(tries) <= 0.3 / WAIT_SECONDS + 1 and not any(tries)
    first.close()
    other.join(60)
    assert [len(one) for one in found] == [300]
    assert_idle(llm)


def test_prompts_that_the_pool_cannot_hold_together_are_scored_one_after_another(llm):
    ids = llm.tokenizer.encode(ANSWER) * 8
    found = scored([ids[:150], ids[:140], ids[:130]], 1, llm.calls)  # 28 blocks; there are 24
    assert [len(one) for one in found] == [150, 140, 130]
    assert_idle(llm)


def test_others_get_a_token_behind_every_chunk_of_a_long_prompt(server, llm, monkeypatch):
    monkeypatch.setattr(scoring, "MOST_TOKENS", 16)
    order = []
    run, step = scoring.Scoring.step, llm.engine.run_step
    monkeypatch.setattr(scoring.Scoring, "step", lambda self, pool: order.append("chunk") or run(self, pool))
    monkeypatch.setattr(llm.engine, "run_step", lambda: order.append("step") or step())
    with streamed(server, max_tokens=60) as response:
        lines = response.iter_lines()
        next(lines)
        answer = ask(server, prompt=[9] * 128, echo=True, logprobs=1, max_tokens=0)
        rest = list(lines)
    assert answer.status_code == 200 and rest[-2] == "data: [DONE]"
    first, last = order.index("chunk"), len(order) - order[::-1].index("chunk")
    assert order[first:last] == ["chunk", *["step", "chunk"] * 7]


def test_a_prompt_is_scored_right_when_a_failed_step_emptied_the_pool(llm, monkeypatch):
    ids = llm.tokenizer.encode(ANSWER)
    [right] = scored([ids], 1, llm.calls)
    monkeypatch.setattr(scoring, "MOST_TOKENS", 10)
    task = score_prompts([ids], 1, llm.calls)
    assert [next(task), next(task), next(task)] == [None] * 3
    mailbox = llm.calls.new_mailbox()
    llm.calls.add_request(*llm.requests([QUESTION], SamplingParams(max_tokens=40)), mailbox)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no device"):
        patch.setattr(llm.runner, "launch", lambda step: (_ for _ in ()).throw(OSError("no device")))
        llm.calls.advance(mailbox)
    mailbox.take()
    llm.calls.advance(mailbox)  # it takes the blocks that the prompt had
    [found] = next(filter(None, task))
    for one, other in zip(found[1:], right[1:], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    while llm.calls.has_unfinished():
        mailbox.take()
        llm.calls.advance(mailbox)
    assert_idle(llm)


def test_a_prompt_that_is_given_up_leaves_no_block(llm, monkeypatch):
    monkeypatch.setattr(scoring, "MOST_TOKENS", 10)
    with closing(score_prompts([[5] * 100], 1, llm.calls)) as task:
        assert [next(task), next(task)] == [None, None] and llm.calls.stats()["num_used_blocks"] == 7
        assert llm.generate([QUESTION], SamplingParams(max_tokens=1), False)[0]["token_ids"], "it may be idle again"
    assert_idle(llm)


def test_groups_hold_so_many_tokens_or_one_prompt_that_is_longer():
    prompts = [[1] * length for length in (3, 4, 9, 2, 6)]
    assert [[len(one) for one in group] for group in groups(prompts, 8)] == [[3, 4], [9], [2, 6]]


def test_an_engine_of_several_ranks_refuses_by_name(server, monkeypatch):
    monkeypatch.setitem(vars(server.llm.llm.options), "tensor_parallel_size", 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 cannot score prompts"):
        scoring.check_can_score(server.llm.llm.options)
    refused = ask(server, echo=True, logprobs=1)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_has_the_prompts_tokens_and_text_before_its_own(server, llm, max_tokens, n):
    ids = llm.tokenizer.encode(ANSWER)
    [scores] = scored([ids], 1, llm.calls)
    shape = {"max_tokens": max_tokens, "n": n, "temperature": 0, "echo": True, "logprobs": 1}
    answers = [ask(server, prompt=prompts, **shape).json() for prompts in ([ANSWER, ANSWER], [ids, ids])]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2 * n * max_tokens] * 2
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert len(choices) == 4 * n
    for choice in choices:
        told = choice["logprobs"]
        assert choice["text"].startswith(ANSWER) and {len(column) for column in told.values()} == {
            len(ids) + max_tokens
        }
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(ids)] == [one[i] for i, one in zip(ids[1:], scores[1:], strict=True)]
        assert "".join(told["tokens"]) == choice["text"]
        for token, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert choice["text"].startswith(token, at)
    plain = ask(server, prompt=ANSWER, echo=True, max_tokens=2, temperature=0).json()["choices"][0]
    assert plain["text"].startswith(ANSWER) and plain["logprobs"] is None


def test_prompt_logprobs_are_told_by_token_ids_with_their_ranks(server, llm):
    ids = llm.tokenizer.encode(ANSWER)
    [scores] = scored([ids], 3, llm.calls)
    [choice] = ask(server, prompt=ids, prompt_logprobs=2, max_tokens=0).json()["choices"]
    assert choice["text"] == "" and choice["prompt_logprobs"][0] is None
    for token_id, told, one in zip(ids[1:], choice["prompt_logprobs"][1:], scores[1:], strict=True):
        best = list(one)[:2]
        assert [int(i) for i, value in told.items() if value["rank"]] == best
        assert told[str(token_id)]["logprob"] == one[token_id] and set(map(int, told)) == {*best, token_id}
        assert told[str(token_id)]["decoded_token"] == llm.tokenizer.decode([token_id])


def test_one_token_is_generated_even_if_it_is_the_end(server, llm):
    [whole] = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=200), False)
    assert whole["finish_reason"] == "stop"
    prompt = whole["prompt_token_ids"] + whole["token_ids"][:-1]
    [choice] = ask(server, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


def test_the_tokenizers_special_tokens_and_template_are_told(server, llm):
    told = get(server, "/tokenizer_info").json()
    assert told["eos_token"] == llm.tokenizer.eos_token and told["chat_template"] == llm.tokenizer.chat_template
