# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sampled groups to packed batches: weights by hand, exact resume, and errors."""

import json
import math
import re
from collections import Counter
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from energon_ext import ConfigError, PromptTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.chats.templates import PlainChatTemplate
from energon_ext.errors import DataExhaustedError, SamplerError, StateFormatError
from energon_ext.rl import RLDataset, ScoredGroup, Unanswered
from energon_ext.rl.group_rows import balance_by_tokens
from energon_ext.state.schema import SEAL, seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.rl.prompts import Dice, Fixed, prompt_dataset, prompt_loader, write_prompts, write_sums
from tests.state.mutations import mutations
from tests.support import batch_hash, close_loaders, config, take, write_mix


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def one_prompt(tmp_path_factory):
    """Every prompt is "ab": 1, 101, 102 in bytes."""
    folder = tmp_path_factory.mktemp("one")
    return write_prompts(folder / "one.jsonl", [{"prompt": "ab"}] * 3)


def build(path, sampler, *, loader=None, **options):
    defaults = {"seq_len": 24, "rows": 2, "groups_per_batch": 3}
    loader = {"prompts_per_call": 2, **(loader or {})}
    return RLDataset(prompt_dataset(path, **loader), sampler, **{**defaults, **options})


def one_at_a_time(path, sampler, **options):
    """Build a dataset of one prompt per call, and one group and one row of 10 per batch."""
    defaults = {"seq_len": 10, "rows": 1, "groups_per_batch": 1}
    return build(path, sampler, loader={"prompts_per_call": 1}, **{**defaults, **options})


def test_response_tokens_weigh_the_advantage_of_their_sample(one_prompt):
    batch = next(one_at_a_time(one_prompt, Fixed([1, 0]))).validate()
    assert batch.tokens.tolist() == [1, 101, 102, 50, 51, 1, 101, 102, 60, 61]
    assert batch.labels.tolist()[:4] == [101, 102, 50, 51]
    # (1 - 0.5) / sqrt(0.5), on the labels of the response
    a = 0.5 / math.sqrt(0.5)
    assert batch.token_weights.tolist() == pytest.approx([0, 0, a, a, 0, 0, 0, -a, -a, 0])
    assert batch.log_probs.tolist() == [0, 0, -1, -2, 0, 0, 0, -3, -4, 0]
    assert batch.rewards.tolist() == [1, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 10]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4] * 2


def test_rewards_and_advantages_are_clipped(one_prompt):
    rewards = ([100, 0], [7, 5], [5, -5])
    dataset = one_at_a_time(one_prompt, Fixed(*rewards), reward_clip=1, advantage_clip=0.5)
    first, third = take(dataset, 2)  # both 7 and 5 are 1
    assert first.token_weights.abs().max() == third.token_weights.abs().max() == 0.5
    assert (first.rewards.tolist(), third.rewards.tolist()) == ([100, 0], [5, -5])
    assert dataset.metrics["zero_var_groups"] == 1


def test_groups_that_do_not_vary_are_dropped_and_counted(one_prompt):
    dataset = one_at_a_time(one_prompt, Fixed([1, 1], [0, 0], [1, 0], [0.5, 0.5], [0, 3]))
    next(dataset)
    assert dataset.metrics == {
        "zero_var_groups": 2,
        "too_long_groups": 0,
        "unanswered_groups": 0,
        "stale_groups": 0,
        "valid_groups": 1,
        "attempts_per_batch": 3,
        "staleness": 0,
        "response_length": 2,
        "entropy": 2.5,  # of log-probabilities -1 -2 and -3 -4
        "reward/mean": 0.5,  # of 1 1 0 0 1 0
        f"reward/mean/{one_prompt.name}": 0.5,
        "reward/std": pytest.approx(math.sqrt(6 * 0.25 / 5)),
    }
    next(dataset)
    assert dataset.metrics["attempts_per_batch"] == 2
    assert dataset.metrics["reward/mean"] == 1.0  # of .5 .5 0 3
    assert dataset.counts == {
        "groups": 5, "valid_groups": 2, "zero_var_groups": 3, "too_long_groups": 0,
        "unanswered_groups": 0, "stale_groups": 0, "batches": 2,
    }  # fmt: skip


def test_a_deviation_at_the_limit_is_too_small(one_prompt):
    limit = math.sqrt(0.5)  # of 1 and 0
    dataset = one_at_a_time(one_prompt, Fixed([1, 0], [1.2, 0]), min_reward_std=limit)
    assert next(dataset).rewards.tolist() == pytest.approx([1.2, 0])


def test_every_sample_of_every_valid_group_is_in_one_batch(sums):
    sampler = Dice()
    groups = []
    answer = sampler.sample_and_score_batch

    def recorded(prompts, seeds):
        found = answer(prompts, seeds)
        groups.extend(zip(prompts, found))
        return found

    sampler.sample_and_score_batch = recorded
    dataset = build(sums, sampler, seq_len=40)
    seen = []
    for batch in take(dataset, 12):
        batch.validate()
        assert batch.num_tokens == 2 * 40
        counts = dict.fromkeys(batch.sources, 0)
        spans = zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), batch.rewards)
        for source, (start, end, reward) in zip(batch.source_ids.tolist(), spans):
            if source >= 0:
                key = batch.sources[source]
                counts[key] += 1
                seen.append((key, batch.tokens[start:end].tolist(), float(reward)))
        assert batch.source_documents.tolist() == list(counts.values())
    expected = [
        (prompt.source, group.tokens[sample, :length].tolist(), float(group.rewards[sample]))
        for prompt, group in groups
        if group.rewards.std() > 0
        for sample, length in enumerate(group.sample_lengths())
    ]
    assert {source for source, _, _ in seen} == {"easy.jsonl", "hard.jsonl"}
    assert len(expected) >= len(seen) == 12 * 3 * 3
    assert sorted(seen) == sorted(expected[: len(seen)])


def test_a_group_that_does_not_fit_moves_to_the_next_batch(one_prompt):
    # A group takes 10 of 16 positions: one fits a batch, though two were requested.
    sampler = Fixed([1, 0], [2, 0], [3, 0], [4, 0])
    dataset = build(one_prompt, sampler, rows=1, seq_len=16, groups_per_batch=2)
    batches = take(dataset, 3)
    assert [batch.rewards[:2].tolist() for batch in batches] == [[1, 0], [2, 0], [3, 0]]
    assert dataset.metrics["valid_groups"] == 1


def test_samples_are_aligned_for_context_parallelism(one_prompt):
    # A sample of 5 tokens takes 8 positions.
    batch = next(one_at_a_time(one_prompt, Fixed([1, 0]), alignment=4, seq_len=16)).validate()
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 16]
    with pytest.raises(SamplerError, match="1 too long for the rows"):
        options = {"alignment": 4, "seq_len": 12, "max_attempts": 1}
        next(one_at_a_time(one_prompt, Fixed([1, 0]), **options))


def test_the_longest_sample_goes_into_the_bin_with_the_fewest_tokens():
    # 9 | 8 | 7: then 6 to the 7, 5 to the 8, 4 to the 9; ties go to the lower bin
    assert balance_by_tokens([4, 5, 6, 7, 8, 9], 3, 13) == [[5, 0], [4, 1], [3, 2]]
    assert balance_by_tokens([3, 3, 3], 2, 6) == [[0, 2], [1]]
    assert balance_by_tokens([4, 5, 6, 7, 8, 9], 3, 12) is None
    assert balance_by_tokens([5], 1, 5) == [[0]]


class Lengths:
    """Returns two answers with rewards 1 and 0; the longer has the length given for the call."""

    def __init__(self, *lengths):
        self.lengths = iter(lengths)

    def sample_and_score(self, prompt):
        length = next(self.lengths)
        if length is None:
            return Unanswered("the server refused it")
        responses = [[50] * length, [60]]
        log_probs = [[-0.5] * length, [-0.25]]
        truncated = [length == 4, False]
        return ScoredGroup.from_responses(prompt.tolist(), responses, log_probs, [1, 0], truncated)


def test_groups_with_too_long_answers_are_dropped_counted_and_logged(one_prompt, caplog):
    """An answer of 5 and the prompt of 3 fill a row of 8; the other answer needs a second row."""
    dataset = one_at_a_time(one_prompt, Lengths(6, None, 5, 3), rows=2, seq_len=8)
    batch = next(dataset)
    assert batch.cu_seqlens.tolist() == [0, 8, 12, 16]
    found = {name: count for name, count in dataset.metrics.items() if name.endswith("groups")}
    assert found == {
        "zero_var_groups": 0, "too_long_groups": 1, "unanswered_groups": 1, "stale_groups": 0,
        "valid_groups": 1,
    }  # fmt: skip
    assert dataset.metrics["attempts_per_batch"] == dataset.counts["groups"] == 3
    logged = r"prompt \d are dropped: .* 13 tokens, the longest 9, and a batch has 2 rows of 8"
    assert re.search(logged, caplog.text)
    assert re.search(r"Prompt \d is dropped: the server refused it", caplog.text)


def test_answers_that_never_fit_are_an_error_and_longer_rows_continue(one_prompt):
    """A resume accepts longer or more rows, as the error advises, with the waiting groups."""
    options = {"rows": 2, "max_attempts": 3}
    dataset = one_at_a_time(one_prompt, Lengths(6, None, 7), seq_len=8, **options)
    with pytest.raises(SamplerError) as error:
        next(dataset)
    assert re.fullmatch(
        r"Prompt \d: no group could be trained on \(max_attempts=3\): 2 too long for the rows, 1 "
        r"unanswered; limit the answers, or resume with longer or more rows \(seq_len, "
        r"rows\); the last one: the server refused it\. So far: groups 3, "
        r"valid_groups 0, zero_var_groups 0, too_long_groups 2, unanswered_groups 1, "
        r"stale_groups 0, batches 0\.",
        str(error.value),
    )
    resumed = one_at_a_time(one_prompt, Lengths(7), seq_len=10, rows=3, max_attempts=3)
    resumed.restore_state(dataset.save_state())
    assert next(resumed).validate().num_tokens == 30
    assert resumed.counts["groups"] == 4


def test_waiting_groups_that_no_longer_fit_are_dropped_by_a_resume(one_prompt):
    def fresh(lengths, seq_len):
        loader = {"prompts_per_call": 3}
        options = {"rows": 2, "groups_per_batch": 1, "seq_len": seq_len}
        return build(one_prompt, Lengths(*lengths), loader=loader, **options)

    dataset = fresh([2, 7, 3], seq_len=10)
    next(dataset)
    resumed = fresh([], seq_len=8)
    resumed.restore_state(dataset.save_state())
    assert next(resumed).segment_lengths().max() == 6  # the answer of 3
    assert resumed.counts["too_long_groups"] == 1


@pytest.mark.parametrize("kept", ["easy", "hard"])
def test_a_resume_accepts_other_prompts_and_drops_groups_of_removed_ones(sums, kept, caplog):
    """The error for groups that never vary advises it; otherwise every next() would raise."""
    options = {"loader": {"prompts_per_call": 8}, "groups_per_batch": 1}
    dataset = build(sums, Dice(), **options)
    next(dataset)
    waiting = dataset.save_state()
    failed = build(sums, Fixed(*[[1.0, 1.0]] * 8), max_attempts=8, **options)
    with pytest.raises(SamplerError, match="or use other prompts"):
        next(failed)
    entries = [(sums.parent / f"{kept}.jsonl", 1)]
    mix = write_mix(sums.parent / f"{kept}.yaml", [*entries, (sums.parent / "more.jsonl", 1)])
    write_prompts(sums.parent / "more.jsonl", [{"prompt": "m", "answer": 0}] * 3)
    for state in (waiting, failed.save_state()):
        resumed = build(mix, Dice(), **options)
        resumed.restore_state(state)
        for _ in range(12):
            assert set(next(resumed).validate().sources) == {f"{kept}.jsonl", "more.jsonl"}
        assert "reward/mean/more.jsonl" in resumed.metrics
    gone = {"easy": "hard", "hard": "easy"}[kept]
    assert f"groups of removed sources: ['{gone}.jsonl']" in caplog.text


def test_waiting_groups_age_by_step_and_stale_ones_are_dropped(one_prompt):
    """Four groups a call, one a batch: they are 0, 1, 2 and 3 steps old."""

    def ages(count, **options):
        rewards = [[1, 0]] * 16
        dataset = build(
            one_prompt, Fixed(*rewards), loader={"prompts_per_call": 4}, groups_per_batch=1,
            **options,
        )  # fmt: skip
        found = []
        for _ in range(count):
            next(dataset)
            found.append((dataset.metrics["staleness"], dataset.metrics["stale_groups"]))
        return found, dataset.counts

    assert ages(5) == ([(0, 0), (1, 0), (2, 0), (3, 0), (0, 0)], ANY)
    found, counts = ages(4, max_staleness=1)
    assert found == [(0, 0), (1, 0), (0, 2), (1, 0)]
    assert (counts["groups"], counts["stale_groups"]) == (8, 2)
    assert ages(3, max_staleness=0)[0] == [(0, 0), (0, 3), (0, 3)]  # the surplus of each step
    # Two batches are one step, with one policy.
    assert ages(4, batches_per_step=2)[0] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert ages(4, batches_per_step=2, max_staleness=0)[0] == [(0, 0), (0, 0), (0, 2), (0, 0)]


def test_metrics_of_answers_by_hand(sums):
    """Answers of 4 (cut), 2 and, twice, 1 tokens; each token of the longer has -0.5, else -0.25."""
    options = {"loader": {"prompts_per_call": 2}, "groups_per_batch": 2, "seq_len": 24}
    dataset = build(sums, Lengths(4, 2), **options)
    next(dataset)
    found = dataset.metrics
    assert found["response_length"] == (4 + 1 + 2 + 1) / 4
    assert found["truncated"] == 1 / 4
    assert found["entropy"] == (4 * 0.5 + 0.25 + 2 * 0.5 + 0.25) / 8
    by_source = [value for name, value in found.items() if name.startswith("reward/mean/")]
    assert by_source and set(by_source) == {0.5}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_continues_exactly_at_every_batch(sums, num_workers):
    def fresh():
        loader = {"num_workers": num_workers, "prompts_per_call": 3}
        return build(sums, Dice(), loader=loader, groups_per_batch=2)

    reference, expected, states = fresh(), [], []
    for _ in range(8):
        states.append(reference.save_state())
        expected.append((batch_hash(next(reference)), reference.metrics))
    assert any(state["groups"] for state in states)
    for stop, state in [*enumerate(states)][:: 1 + 3 * num_workers]:
        text = json.dumps(state, allow_nan=False)
        assert json.loads(text) == state  # tuples and arrays would not be equal
        resumed = fresh()
        resumed.restore_state(json.loads(text))
        assert resumed.save_state() == state
        found = [(batch_hash(next(resumed)), resumed.metrics) for _ in range(8 - stop)]
        assert found == expected[stop:]
        assert resumed.counts == reference.counts
        close_loaders()


def test_sampling_after_a_save_does_not_change_the_state(sums):
    dataset = build(sums, Dice(), loader={"prompts_per_call": 8}, groups_per_batch=1)
    next(dataset)
    state = dataset.save_state()
    text = json.dumps(state)
    take(dataset, 5)
    assert json.dumps(state) == text


def test_a_state_keeps_waiting_groups(sums):
    dataset = build(sums, Dice(), loader={"prompts_per_call": 8}, groups_per_batch=1)
    next(dataset)
    state = dataset.save_state()
    assert len(state["groups"]) >= 2
    asked = []
    sampler = Dice()
    sampler.sample_and_score_batch = lambda prompts, seeds: asked.append(seeds)
    resumed = build(sums, sampler, loader={"prompts_per_call": 8}, groups_per_batch=1)
    resumed.restore_state(state)
    take(resumed, 2)
    assert not asked


def test_prompts_with_max_epochs_end_after_the_last_group(sums, tmp_path):
    """Each of 19 prompts is answered once, in batches of 3 groups; then the run ends."""
    entries = [
        {"path": str(sums.parent / f"{name}.jsonl"), "weight": 1, "max_epochs": 1}
        for name in ("easy", "hard")
    ]
    path = tmp_path / "capped.yaml"
    splits = {"train": {"blend": entries}}
    header = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**header, "splits": splits}))
    dataset = build(path, Fixed(*[[1, 0]] * 30), rows=3)
    groups = []
    with pytest.raises(DataExhaustedError, match=r"max_epochs \(.*easy.*: 1.*no batch 7"):
        while True:
            next(dataset)
            groups.append(dataset.metrics["valid_groups"])
    assert groups == [3] * 6 + [1]
    with pytest.raises(DataExhaustedError):
        next(dataset)


def test_ranks_that_cannot_share_the_prompts_are_refused(sums):
    with pytest.raises(ConfigError, match="2 data-parallel ranks .* initialize torch.distributed"):
        build(sums, Dice(), loader={"rank": 0, "world_size": 2})


def test_anything_but_a_planned_dataset_of_prompts_is_refused(sums):
    sizes = {"seq_len": 24, "rows": 2, "groups_per_batch": 3}
    with pytest.raises(ConfigError, match="prompts: a ExactDataLoader found; pass the dataset"):
        RLDataset(prompt_loader(sums), Dice(), **sizes)
    with pytest.raises(ConfigError, match="prompts: a dataset with repeat=False found"):
        RLDataset(prompt_dataset(sums, repeat=False), Dice(), **sizes)


def test_prompts_that_need_streaming_are_refused(sums):
    class Own(PromptTaskEncoder):
        def build_streamed_source(self, *arguments, **options):
            return super().build_streamed_source(*arguments, **options)

    with pytest.raises(ConfigError, match="Own: prompts are planned by number, but the encoder ov"):
        get_train_dataset(
            sums, worker_config=config(), batch_size=2, task_encoder=Own(ByteTokenizer())
        )


def group_of(prompt, **changes):
    values = {
        "tokens": torch.cat([prompt.repeat(2, 1), torch.tensor([[5, 6], [7, 8]])], dim=1),
        "log_probs": torch.zeros(2, 2),
        "rewards": torch.tensor([1.0, 0.0]),
        "prompt_len": len(prompt),
        **changes,
    }
    return ScoredGroup(**values)


class Changed:
    """Returns a valid group except for some fields."""

    def __init__(self, **changes):
        self.changes = changes

    def sample_and_score(self, prompt):
        return group_of(prompt, **self.changes)


class Raises:
    def sample_and_score(self, prompt):
        raise KeyError("no such tool")


class ReturnsNone:
    def sample_and_score(self, prompt):
        return None


class HalfToken:
    def sample_and_score(self, prompt):
        return ScoredGroup.from_responses(prompt, [[5], [6.5]], [[-1], [-1]], [0, 1])


class TooFew:
    def sample_and_score_batch(self, prompts, seeds):
        return []


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Raises(), "the sampler raised KeyError: 'no such tool'"),
        (ReturnsNone(), "the sampler returned a NoneType, not a ScoredGroup"),
        (HalfToken(), "the sampler raised TypeError: 'float' object cannot be interpreted"),
        (TooFew(), "the sampler returned 0 groups for 1 prompts"),
        (Changed(rewards=torch.tensor([math.nan, 0.0])), "rewards must be finite, got .nan, 0.0"),
        (Changed(rewards=torch.tensor([math.inf, 0.0])), "rewards must be finite, got .inf, 0.0"),
        (Changed(rewards=torch.zeros(3)), r"rewards must be .2., got float32 .3."),
        (Changed(log_probs=torch.zeros(2, 3)), r"log_probs must be .2, 2., got float32 .2, 3."),
        (Changed(log_probs=torch.full((2, 2), math.nan)), "log_probs must be finite"),
        (Changed(prompt_len=2), r"prompt_len is 2 in int64 .2, 5. tokens; the prompt has 3"),
        (Changed(tokens=torch.zeros(2, 5)), r"tokens must be integers .*got float32 .2, 5."),
        (Changed(tokens=torch.ones(1, 5).long()), "tokens must be integers"),
        (Changed(tokens=torch.ones(2, 5).long()), "tokens do not begin with the prompt"),
        (Changed(tokens=torch.ones(2, 3).long()), "prompt_len is 3 in int64 .2, 3. tokens"),
        (Changed(response_lens=torch.tensor([2, 3])), "response_lens must be integers from 1 to 2"),
        (Changed(response_lens=torch.tensor([0, 2])), "response_lens must be integers from 1 to 2"),
        (Changed(response_lens=torch.tensor([1.0, 2.0])), "response_lens must be integers"),
        (Changed(response_lens=[2, 2]), "response_lens must be a tensor, got a list"),
        (Changed(rewards=[1.0, 0.0]), "rewards must be a tensor, got a list"),
        (Changed(rewards=None), "rewards must be a tensor, got a NoneType"),
        (Changed(log_probs=np.zeros((2, 2))), "log_probs must be a tensor, got a ndarray"),
        (Changed(tokens=[[1, 101, 102, 5, 6]]), "tokens must be a tensor, got a list"),
        (Changed(prompt_len=3.0), r"prompt_len is 3.0 in int64 .2, 5. tokens"),
        (Changed(prompt_len=None), r"prompt_len is None in int64 .2, 5. tokens"),
        (
            Changed(tokens=torch.tensor([[1, 101, 102, 5, -1], [1, 101, 102, 5, 6]])),
            r"tokens of a response must be in .* .0, 260., got .-1.",
        ),
        (
            Changed(tokens=torch.tensor([[1, 101, 102, 5, 6], [1, 101, 102, 259, 260]])),
            r"tokens of a response must be in .* .0, 260., got .260.",
        ),
    ],
)
def test_a_bad_answer_is_named_with_its_prompt_and_the_counts(one_prompt, sampler, message):
    dataset = one_at_a_time(one_prompt, sampler)
    with pytest.raises(SamplerError, match=rf"^Prompt \d: {message}") as error:
        next(dataset)
    assert re.fullmatch(r"\d", error.value.key)
    assert error.value.counts == dataset.counts
    assert str(error.value).endswith(
        "So far: groups 0, valid_groups 0, zero_var_groups 0, too_long_groups 0, "
        "unanswered_groups 0, stale_groups 0, batches 0."
    )


def test_groups_may_have_other_dtypes_and_gradients(one_prompt):
    """As from a model in half precision outside of no_grad; -100 follows a short response."""
    tokens = torch.tensor([[1, 101, 102, 5, 6], [1, 101, 102, 7, -100]], dtype=torch.int32)
    sampler = Changed(
        tokens=tokens,
        log_probs=torch.full((2, 2), -0.5, dtype=torch.bfloat16, requires_grad=True),
        rewards=torch.tensor([True, False]),
        response_lens=torch.tensor([2, 1]),
    )
    batch = next(one_at_a_time(one_prompt, sampler)).validate()
    assert batch.tokens[:9].tolist() == [1, 101, 102, 5, 6, 1, 101, 102, 7]
    assert batch.log_probs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.5, 0, 0]
    assert batch.rewards.tolist() == [1, 0, 0]


def test_after_a_failure_the_same_prompts_are_asked_again(sums):
    class FailsOnce(Dice):
        fails = True

        def sample_and_score_batch(self, prompts, seeds):
            if self.fails:
                raise OSError("server gone")
            return super().sample_and_score_batch(prompts, seeds)

    expected = [batch_hash(batch) for batch in take(build(sums, Dice()), 4)]
    sampler = FailsOnce()
    dataset = build(sums, sampler)
    with pytest.raises(SamplerError, match="and 1 more in the same call.: .*OSError: server gone"):
        next(dataset)
    text = json.dumps(dataset.save_state())
    sampler.fails = False
    assert [batch_hash(batch) for batch in take(dataset, 4)] == expected
    state = json.loads(text)
    assert len(state["drawn"]) == 2  # prompts
    for _ in range(2):  # a state may be restored again
        resumed = build(sums, Dice())
        resumed.restore_state(state)
        assert [batch_hash(batch) for batch in take(resumed, 4)] == expected


def test_groups_that_never_vary_are_an_error_after_max_attempts(one_prompt):
    rewards = [[1, 0], *[[0, 0]] * 6, [1, 0]]
    dataset = one_at_a_time(one_prompt, Fixed(*rewards), max_attempts=3)
    next(dataset)
    for batches in ("groups 4, valid_groups 1", "groups 7, valid_groups 1"):
        with pytest.raises(SamplerError, match="3 whose rewards do not vary; check") as error:
            next(dataset)
        assert batches in str(error.value)
    assert next(dataset).rewards.tolist() == [1, 0]  # it may go on


def test_states_of_other_runs_are_refused(sums):
    dataset = build(sums, Dice(), seed=1)
    next(dataset)
    state = dataset.save_state()
    with pytest.raises(StateMismatchError, match="reward_clip: saved None, now 2.0"):
        build(sums, Dice(), seed=1, reward_clip=2.0).restore_state(state)
    with pytest.raises(StateMismatchError, match="seed: saved 1, now 0"):
        build(sums, Dice()).restore_state(state)
    content = {key: value for key, value in state.items() if key != SEAL}
    with pytest.raises(StateFormatError, match="version 9 was found, only 3 is"):
        build(sums, Dice()).restore_state(seal({**content, "version": 9}))
    with pytest.raises(StateFormatError, match="A NoneType is not a data state"):
        build(sums, Dice()).restore_state(None)
    for field in ("fingerprint", "drawn", "groups", "place", "rollout"):
        with pytest.raises(StateFormatError, match=f"state.{field}: None found"):
            build(sums, Dice(), seed=1).restore_state(seal({**content, field: None}))
    with pytest.raises(ConfigError, match="before the first batch"):
        dataset.restore_state(state)


def test_a_resume_with_another_chat_template_is_refused(sums):
    class Shouted(PlainChatTemplate):
        def fingerprint(self):
            return {"kind": "shouted"}

    dataset = build(sums, Dice())
    next(dataset)
    other = build(sums, Dice(), loader={"chat_template": Shouted()})
    with pytest.raises(StateMismatchError, match="chat_template: saved .*plain.*, now .*shouted"):
        other.restore_state(dataset.save_state())


def test_a_changed_state_is_refused_and_nothing_starts(sums):
    dataset = build(sums, Dice(), seed=1, groups_per_batch=2, rows=1)
    for _ in range(3):
        next(dataset)
    state = dataset.save_state()
    assert state["groups"]  # groups are waiting
    resumed = build(sums, Dice(), seed=1, groups_per_batch=2, rows=1)
    for what, mutated in mutations(state, 200, seed=0):
        with pytest.raises(StateFormatError):
            resumed.restore_state(mutated)
            pytest.fail(f"accepted: {what}")
    fresh = build(sums, Dice(), seed=1, groups_per_batch=2, rows=1)
    assert batch_hash(next(resumed)) == batch_hash(next(fresh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows: 0 found"),
        ({"groups_per_batch": 0}, "groups_per_batch: 0 found"),
        ({"max_attempts": 0}, "max_attempts: 0 found"),
        ({"seq_len": 24.0}, "seq_len: 24.0 found"),
        ({"rows": True}, "rows: True found, an integer >= 1 is needed"),
        ({"pad_id": -1}, "pad_id: -1 found"),
        ({"min_reward_std": math.nan}, "min_reward_std: nan found"),
        ({"reward_clip": -1}, "reward_clip: .* found, a number > 0"),
        ({"columns": {"v": "float32"}}, "RLDataset: columns: v: .float32. found, a Column"),
    ],
)
def test_bad_arguments_are_refused(sums, options, message):
    with pytest.raises(ConfigError, match=message):
        build(sums, Dice(), **options)


def test_anything_but_a_sampler_is_refused(sums):
    with pytest.raises(ConfigError, match="sampler: a dict found; it needs sample_and_score_batch"):
        build(sums, {})


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_no_prompt_meets_is_refused(sums, limit):
    with pytest.raises(ConfigError, match=f"max_prompt_tokens: {limit} found"):
        prompt_loader(sums, max_prompt_tokens=limit)


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_without_samples_are_padding(one_prompt, alignment):
    """Answers grow in training until one group fits where two did, and fills two of three rows."""
    dataset = one_at_a_time(one_prompt, Fixed([1, 0]), rows=3, seq_len=8, alignment=alignment)
    batch = next(dataset).validate()
    assert batch.num_tokens == 24
    assert batch.source_ids.tolist() == [0, -1, 0, -1, -1]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 13, 16, 24]
    assert batch.rewards.tolist() == [1, 0, 0, 0, 0]
    assert batch.source_documents.tolist() == [2]
    assert batch.token_weights[16:].tolist() == batch.tokens[16:].tolist() == [0] * 8
    if alignment > 1:
        assert batch.cu_seqlens_padded.tolist() == [0, 8, 16, 24]


def test_prompts_keep_their_metadata_and_name_their_source(sums):
    prompts = [p for batch in take(prompt_loader(sums), 30) for p in batch]
    for prompt in prompts:
        text = ByteTokenizer().decode(prompt.tokens)
        assert prompt.tokens[0] == 1
        assert text == f"{prompt.source[0]}{prompt.metadata['answer']}?"
    assert {prompt.source for prompt in prompts} == {"easy.jsonl", "hard.jsonl"}


def test_conversations_without_an_answer_are_prompts(tmp_path):
    question = [{"role": "user", "content": "hi"}]
    path = write_prompts(tmp_path / "chat.jsonl", [{"messages": question, "n": 1}])
    ((prompt,),) = take(prompt_loader(path, prompts_per_call=1), 1)
    assert ByteTokenizer().decode(prompt.tokens) == "user: hi\nassistant:"
    assert prompt.metadata == {"n": 1}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "no prompt"}, "needs `prompt` or `messages`; it has ['text']."),
        ({"prompt": "x" * 40}, "prompt has 41 tokens; at most 30 are allowed"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_replaced_and_counted(tmp_path, caplog, record, reason):
    path = write_prompts(tmp_path / "chat.jsonl", [{"prompt": "a"}, record])
    loader = prompt_loader(path, prompts_per_call=2, max_prompt_tokens=30)
    for prompts in take(loader, 3):
        assert [prompt.__key__ for prompt in prompts] == ["0", "0"]
    (logged,) = [each for each in caplog.messages if "skipped" in each]
    assert logged.startswith("chat.jsonl:1: sample skipped (1 so far): Sample 1: ")
    assert reason in logged


def test_an_interleave_counts_each_prompt_as_one(tmp_path):
    for name, length in (("long", 50), ("short", 2)):
        write_prompts(tmp_path / f"{name}.jsonl", [{"prompt": "x" * length}] * 9)
    entries = [{"path": f"{name}.jsonl", "weight": 1} for name in ("long", "short")]
    header = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    content = {**header, "splits": {"train": {"interleave": entries}}}
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    prompts = [p for call in take(prompt_loader(tmp_path / "mix.yaml"), 10) for p in call]
    assert Counter(prompt.source for prompt in prompts) == {"long.jsonl": 10, "short.jsonl": 10}
