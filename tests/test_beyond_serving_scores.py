"""Log-probabilities of prompts: those of the model, whatever the prefix cache holds and however long a prompt is."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from serving import CHAT, QUESTION, ask, assert_idle, engine, get, running, wait_until
from transformers import AutoModelForCausalLM

from beyond.serving import async_llm
from beyond.serving.scoring import groups, score_prompts
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract import logprobs
from stage_a_naive.sampling import SamplingParams
from stage_d_paged import scoring
from stage_f_graph_tp import LLM as StageF

ANSWER = QUESTION + " It stores the keys and values of earlier tokens, so that no step computes them again."

llm = engine(max_num_seqs=4, num_kvcache_blocks=24, kvcache_block_size=16)


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as server:
        yield server


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
        found = score_prompts(prompts, 2, llm.calls)
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
    [whole] = score_prompts([ids], 1, llm.calls)
    monkeypatch.setattr(scoring, "MOST_TOKENS", 7)
    monkeypatch.setattr(logprobs, "ROWS", 3)
    [cut] = score_prompts([ids], 1, llm.calls)
    assert len(cut) == len(whole) and cut[0] is None
    for one, other in zip(cut[1:], whole[1:], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_stage_f_scores_between_its_overlapped_steps():
    with closing(StageF("tutor", device="cpu", num_kvcache_blocks=64)) as llm:
        ids = llm.tokenizer.encode(ANSWER)
        before = score_prompts([ids], 1, llm.calls)
        expected = llm.generate([QUESTION], SamplingParams(temperature=0, max_tokens=8), False)[0]["token_ids"]
        request_id = llm.add_request(QUESTION, SamplingParams(temperature=0, max_tokens=8))
        llm.step()  # one more is in flight now
        assert score_prompts([ids], 1, llm.calls) == before
        ended = []
        while not llm.is_finished():
            ended += llm.step()[0]
        assert ended == [(request_id, expected)]


def test_prompts_without_free_blocks_are_scored_when_others_have_given_theirs_back(server, llm):
    assert score_prompts([[5] * 100] * 4, 1, llm.calls) is None  # 28 blocks; there are 24
    assert_idle(llm)
    refusals = []
    find = score_prompts
    hog = {"prompt": [7] * 200, "max_tokens": 150, "ignore_eos": True, "temperature": 0}

    def watched(*given):
        refusals.append((found := find(*given)) is None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "score_prompts", watched)
        other = threading.Thread(target=partial(ask, server, **hog))
        other.start()
        wait_until(lambda: llm.calls.stats()["num_used_blocks"] > 12)
        answer = ask(server, prompt=[9] * 190, echo=True, logprobs=1, max_tokens=0)
        other.join(60)
    assert answer.status_code == 200 and refusals[0] and not refusals[-1]


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
    [scores] = score_prompts([ids], 1, llm.calls)
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
    [scores] = score_prompts([ids], 3, llm.calls)
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
