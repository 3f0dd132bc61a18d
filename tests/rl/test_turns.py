# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers of several turns: what the policy drew is trained on, and nothing else."""

import json
import math

import pytest
import torch

from energon_ext.cli.shown_rows import describe_answers
from energon_ext.errors import SampleError
from energon_ext.metrics.run_log import RunLog
from energon_ext.rl import Response, RLDataset, ScoredGroup, Turn
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.cli.runs import write_run
from tests.rl.prompts import prompt_dataset, write_prompts

A, B, C, D = 101, 102, 103, 104  # the bytes a, b, c and d


@pytest.fixture(scope="module")
def one_prompt(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("one") / "one.jsonl", [{"prompt": "ab"}] * 3)


class Asks:
    """Calls a tool in the first answer, and answers at once in the second."""

    def sample_and_score_batch(self, prompts, seeds):
        turns = [Turn([C, D], [-1.0, -2.0]), Turn([A, A, A]), Turn([D], [-0.5])]
        answers = [Response.from_turns(turns, "stop"), Response([B], [-3.0], "length")]
        return [ScoredGroup.from_answers(each.tokens, answers, [1.0, 0.0]) for each in prompts]


def batch_of(path):
    prompts = prompt_dataset(path, prompts_per_call=1)
    return next(RLDataset(prompts, Asks(), seq_len=16, rows=1, groups_per_batch=1)).validate()


def test_the_output_of_a_tool_is_read_but_not_trained_on(one_prompt):
    batch = batch_of(one_prompt)
    assert batch.tokens.tolist()[:9] == [1, A, B, C, D, A, A, A, D]
    # (1 - 0.5) / sqrt(0.5) on the labels c d, not on a a a, and on the last d
    a = 0.5 / math.sqrt(0.5)
    assert batch.token_weights.tolist()[:9] == pytest.approx([0, 0, a, a, 0, 0, 0, a, 0])
    assert batch.log_probs.tolist()[:9] == [0, 0, -1, -2, 0, 0, 0, -0.5, 0]
    assert batch.token_weights.tolist()[9:13] == pytest.approx([0, 0, -a, 0])
    assert batch.position_ids.tolist()[:9] == [*range(9)]


def test_turns_become_an_answer_with_a_mask():
    group = ScoredGroup.from_answers(
        [7], [Response.from_turns([Turn([5], [-1.0]), Turn([6, 6])]), Response([8], [-2.0])], [1, 0]
    )
    assert group.response_mask.tolist() == [[True, False, False], [True, False, False]]
    assert group.truncated is None
    assert ScoredGroup.from_answers([7], [Response([8], [-2.0])] * 2, [1, 0]).response_mask is None


def test_a_turn_needs_a_log_probability_for_each_of_its_tokens():
    with pytest.raises(SampleError, match="turn 1: 2 tokens with 1 log-probabilities"):
        Response.from_turns([Turn([5], [-1.0]), Turn([6, 6], [-1.0])])


def test_the_mask_is_shown_by_peek_and_in_the_report(one_prompt, tmp_path):
    answers = describe_answers([batch_of(one_prompt)], ByteTokenizer())
    assert answers == [
        {"source": "one.jsonl", "reward": 1.0, "text": "«<bos>ab»cd«aaa»d"},
        {"source": "one.jsonl", "reward": 0.0, "text": "«<bos>ab»b"},
    ]
    run_dir = write_run(tmp_path / "run", steps=5)
    with RunLog(run_dir) as log:
        log.write_answers(5, answers)
    shown = energon_ext("peek", run_dir, "--rows", 1).stdout.splitlines()
    assert shown == ["step 5: reward 0", "  one.jsonl:", "    «<bos>ab»b"]
    shown = energon_ext("peek", run_dir, "--rows", 3, "--source", "one").stdout.splitlines()
    assert shown[:3] == ["step 5: reward 1", "  one.jsonl:", "    «<bos>ab»cd«aaa»d"]
    assert shown[-1] == "Found 2 of 3 answers."
    for ignored in (("--png", tmp_path / "answers.png"), ("--seq-length", 64)):
        refused = energon_ext("peek", run_dir, *ignored)
        assert refused.exit_code == 2
        assert f"{ignored[0]}: has no effect on the answers of the run" in refused.output
    assert energon_ext("report", run_dir).exit_code == 0
    page = (run_dir / "report.html").read_text()
    assert "<td>«&lt;bos&gt;ab»cd«aaa»d</td>" in page


def test_answers_after_the_step_of_a_resume_are_forgotten(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=5)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    answer = {"source": "one", "reward": 1.0, "text": "old"}
    event = json.dumps({"event": "answers", "step": 5, "answers": [answer]})
    again = [json.dumps({**json.loads(lines[0]), "step": 4}), lines[5]]
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, event, *again]) + "\n")
    assert energon_ext("peek", run_dir).stdout.startswith("No answers found:")


def test_the_mask_survives_a_state(one_prompt):
    def fresh():
        prompts = prompt_dataset(one_prompt, prompts_per_call=3)
        return RLDataset(prompts, Asks(), seq_len=16, rows=1, groups_per_batch=1)

    dataset = fresh()
    next(dataset)
    resumed = fresh()
    resumed.restore_state(json.loads(json.dumps(dataset.save_state())))
    first, second = next(dataset), next(resumed)
    assert torch.equal(first.token_weights, second.token_weights)
