# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From rewards to weights of tokens, with values worked out by hand."""

import functools
import json
import math

import pytest
import torch

from energon_ext import ConfigError, StateMismatchError
from energon_ext.batch.columns import Column
from energon_ext.errors import SampleError, SamplerError
from energon_ext.rl import RLDataset, ScoredGroup
from energon_ext.rl.advantages import compute_advantages, name_advantages, rloo
from energon_ext.rl.group_rows import WaitingGroup, build_row
from tests.rl.prompts import Dice, prompt_dataset, write_prompts, write_sums
from tests.support import batch_hash


@pytest.fixture(scope="module")
def one_prompt(tmp_path_factory):
    """Every prompt is "ab": 1, 101, 102 in bytes."""
    folder = tmp_path_factory.mktemp("one")
    return write_prompts(folder / "one.jsonl", [{"prompt": "ab"}] * 3)


class Groups:
    """Returns groups of answers of two tokens with the given fields, one group per call."""

    def __init__(self, *groups):
        self.groups = iter(groups)

    def sample_and_score(self, prompt):
        fields = dict(next(self.groups))
        rewards = fields.pop("rewards")
        named = isinstance(rewards, dict)
        count = len(next(iter(rewards.values()))) if named else len(rewards)
        answers = torch.arange(2 * count).reshape(count, 2) + 50
        values = {
            "tokens": torch.cat([prompt.repeat(count, 1), answers], dim=1),
            "log_probs": torch.full((count, 2), -0.5),
            "rewards": {name: torch.tensor(each) for name, each in rewards.items()}
            if named
            else torch.tensor(rewards),
            "prompt_len": len(prompt),
        }
        return ScoredGroup(**{**values, **fields})


def dataset_of(path, *groups, **options):
    """Return a dataset with one group per batch, in a row of 5 positions for each answer."""
    defaults = {"seq_len": 5, "rows": 3, "groups_per_batch": 1}
    loader = prompt_dataset(path, prompts_per_call=1)
    return RLDataset(loader, Groups(*groups), **{**defaults, **options})


def weights_of(path, *groups, **options):
    """Return the weights of the two tokens of each answer of the first batch."""
    batch = next(dataset_of(path, *groups, **options)).validate()
    return [[round(w, 6) for w in row[2:4]] for row in batch.token_weights.view(-1, 5).tolist()]


# Advantages by name ---------------------------------------------------------------------------

# Rewards 3, 0, 0 and 1: the first group has the mean 1 and the deviation sqrt(3), all 1 and so.
GROUPS = [torch.tensor([3.0, 0.0, 0.0]), torch.tensor([1.0, 0.0])]
ROOT = math.sqrt(3)


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ("grpo", [[2 / ROOT, -1 / ROOT, -1 / ROOT], [0.5**0.5, -(0.5**0.5)]]),
        ("dr_grpo", [[2, -1, -1], [0.5, -0.5]]),
        ("rloo", [[3, -1.5, -1.5], [1, -1]]),
        ("reinforce", [[2.2, -0.8, -0.8], [0.2, -0.8]]),  # the mean of all five is 0.8
        (lambda groups: [rewards * 2 for rewards in groups], [[6, 0, 0], [2, 0]]),
    ],
)
def test_advantages_by_name_and_by_a_function(advantages, expected):
    found = compute_advantages(advantages, GROUPS)
    assert [each.dtype for each in found] == [torch.float32] * 2
    for each, wanted in zip(found, expected):
        assert each.tolist() == pytest.approx(wanted, abs=1e-6)


def test_rewards_are_clipped_before_and_advantages_after():
    found = compute_advantages("dr_grpo", GROUPS, reward_clip=2.0, advantage_clip=1.0)
    # 2, 0, 0 have the mean 2/3
    assert found[0].tolist() == pytest.approx([1, -2 / 3, -2 / 3])
    assert found[1].tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda groups: groups[:1], r"returned \[\[3\]\], needed is .* \[\[3\], \[2\]\]"),
        (lambda groups: [[0.0] * len(each) for each in groups], r"returned \['list', 'list'\]"),
        (lambda groups: [each / 0 for each in groups], "returned .inf, nan, nan.; finite needed"),
    ],
)
def test_a_function_of_advantages_that_returns_something_else_is_named(function, message):
    with pytest.raises(SampleError, match=f"advantages: the function {message}"):
        compute_advantages(function, GROUPS)


def test_the_baseline_of_reinforce_is_that_of_the_batch(one_prompt):
    """Groups of one answer with rewards 1, 0 and 0."""
    groups = [{"rewards": [reward]} for reward in (1.0, 0.0, 0.0)]
    options = {"groups_per_batch": 3, "advantages": "reinforce", "drop_equal": False}
    a = round(1 / 3, 6)
    expected = [[2 * a + 1e-6, 2 * a + 1e-6], [-a, -a], [-a, -a]]
    found = weights_of(one_prompt, *groups, **options)
    for each, wanted in zip(found, expected):
        assert each == pytest.approx(wanted, abs=2e-6)


# Fields of a group ------------------------------------------------------------------------------


def test_advantages_of_a_sampler_are_used_as_they_are(one_prompt):
    group = {"rewards": [1.0, 1.0], "advantages": torch.tensor([0.25, -4.0])}
    assert weights_of(one_prompt, group) == [[0.25, 0.25], [-4, -4], [0, 0]]
    assert weights_of(one_prompt, group, advantage_clip=1.0)[1] == [-1, -1]
    group["advantages"] = torch.tensor([[0.25, 0.5], [0.0, -2.0]])
    assert weights_of(one_prompt, group) == [[0.25, 0.5], [0, -2], [0, 0]]
    alone = {"rewards": [1.0], "advantages": torch.tensor([3.0])}
    assert weights_of(one_prompt, alone) == [[3, 3], [0, 0], [0, 0]]


def test_a_group_whose_own_advantages_are_zero_is_dropped(one_prompt):
    nothing = {"rewards": [1.0, 0.0], "advantages": torch.zeros(2)}
    dataset = dataset_of(one_prompt, nothing, {"rewards": [1.0, 0.0]})
    next(dataset)
    assert dataset.metrics["zero_var_groups"] == 1


def test_masked_tokens_of_a_response_are_read_but_not_trained(one_prompt):
    """As the output of a tool: its log-probability is not the sampler's."""
    mask = torch.tensor([[True, False], [True, True]])
    log_probs = torch.tensor([[-1.0, 0.0], [-2.0, -3.0]])
    group = {"rewards": [1.0, -1.0], "response_mask": mask, "log_probs": log_probs}
    dataset = dataset_of(one_prompt, group, advantages="dr_grpo")
    batch = next(dataset).validate()
    assert batch.tokens[:5].tolist() == [1, 101, 102, 50, 51]
    assert batch.token_weights.view(3, 5)[:, 2:4].tolist() == [[1, 0], [-1, -1], [0, 0]]
    assert dataset.metrics["entropy"] == (1 + 2 + 3) / 3
    assert dataset.metrics["response_length"] == 2


def test_the_weight_of_an_answer_does_not_change_the_mean_of_its_group(one_prompt):
    group = {"rewards": [2.0, 0.0, 1.0], "sample_weights": torch.tensor([1.0, 0.0, 0.5])}
    found = weights_of(one_prompt, group, advantages="dr_grpo")
    assert found == [[1, 1], [0, 0], [0, 0]]
    group["rewards"] = [4.0, 0.0, 2.0]
    group["sample_weights"] = torch.tensor([0.5, 0.0, 1.0])
    assert weights_of(one_prompt, group, advantages="dr_grpo") == [[1, 1], [0, 0], [0, 0]]


def test_truncated_answers_may_be_masked(one_prompt):
    group = {"rewards": [2.0, 0.0], "truncated": torch.tensor([False, True])}
    options = {"advantages": "dr_grpo"}
    assert weights_of(one_prompt, group, **options) == [[1, 1], [-1, -1], [0, 0]]
    masked = weights_of(one_prompt, group, mask_truncated=True, **options)
    assert masked == [[1, 1], [0, 0], [0, 0]]
    del group["truncated"]
    with pytest.raises(SamplerError, match="truncated is None, but mask_truncated needs"):
        weights_of(one_prompt, group, mask_truncated=True)


def test_answers_may_have_prompts_of_their_own(one_prompt):
    """[7] 50 51 52 and [7 8 9] 60, in rows of 5."""
    group = {
        "rewards": [1.0, -1.0],
        "tokens": torch.tensor([[7, 50, 51, 52], [7, 8, 9, 60]]),
        "log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]),
        "prompt_len": torch.tensor([1, 3]),
    }
    batch = next(dataset_of(one_prompt, group, advantages="dr_grpo")).validate()
    assert batch.tokens.view(3, 5)[:2].tolist() == [[7, 50, 51, 52, 0], [7, 8, 9, 60, 0]]
    weights = [[1, 1, 1, 0, 0], [0, 0, -1, 0, 0], [0] * 5]
    assert batch.token_weights.view(3, 5).tolist() == weights
    log_probs = [[-1, -2, -3, 0, 0], [0, 0, -4, 0, 0], [0] * 5]
    assert batch.log_probs.view(3, 5).tolist() == log_probs


def test_named_rewards_are_added_and_logged(one_prompt):
    rewards = {"exact": [1.0, 0.0], "form": [0.0, 1.0]}
    factors = {"exact": 2, "form": 0.5}
    dataset = dataset_of(one_prompt, {"rewards": rewards}, reward_weights=factors)
    batch = next(dataset)
    assert batch.rewards[:2].tolist() == [2, 0.5]
    assert dataset.metrics["reward/mean"] == 1.25
    assert (dataset.metrics["reward/exact"], dataset.metrics["reward/form"]) == (0.5, 0.5)


def test_groups_of_equal_rewards_may_be_kept(one_prompt):
    groups = [{"rewards": [1.0, 1.0]}, {"rewards": [0.0, 0.0]}]
    options = {"groups_per_batch": 2, "rows": 4, "advantages": "reinforce", "drop_equal": False}
    dataset = dataset_of(one_prompt, *groups, **options)
    weights = next(dataset).token_weights.view(4, 5)[:, 2:4].tolist()
    assert sorted(weights) == [[-0.5, -0.5]] * 2 + [[0.5, 0.5]] * 2
    assert dataset.metrics["zero_var_groups"] == 0


def test_columns_travel_to_the_batch_with_a_mask_of_what_is_trained(one_prompt):
    group = {
        "rewards": [1.0, 1.0],
        "columns": {"ref_log_probs": torch.tensor([[-0.5, -1.5], [-2.5, -3.5]])},
        "response_mask": torch.tensor([[True, True], [False, True]]),
    }
    masked = {**group, "sample_weights": torch.tensor([1.0, 0.0])}
    options = {"advantages": "dr_grpo", "drop_equal": False}
    batch = next(dataset_of(one_prompt, group, **options)).validate()
    expected = [[0, 0, -0.5, -1.5, 0], [0, 0, -2.5, -3.5, 0], [0] * 5]
    assert batch.columns["ref_log_probs"].view(3, 5).tolist() == expected
    assert not batch.token_weights.any()
    expected = [[0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0] * 5]
    assert batch.columns["response_mask"].view(3, 5).tolist() == expected
    batch = next(dataset_of(one_prompt, masked, **options))
    expected[1] = [0] * 5
    assert batch.columns["response_mask"].view(3, 5).tolist() == expected


DESCRIBED = {
    "experts": Column("int16", (2,), at="input", fill=-1),
    "top": Column("int32", (2,), fill=-1),
    "level": Column("int8", per="document", fill=9),
}


def described_columns():
    return {
        "experts": torch.arange(20).reshape(2, 5, 2),
        "top": torch.arange(8).reshape(2, 2, 2),
        "level": torch.tensor([3, 4]),
    }


def test_described_columns_belong_to_inputs_labels_or_answers(one_prompt):
    group = {"rewards": [1.0, 0.0], "columns": described_columns()}
    dataset = dataset_of(one_prompt, group, columns=DESCRIBED)
    batch = next(dataset).validate()
    experts = batch.columns["experts"].view(3, 5, 2)
    assert experts[:2].tolist() == torch.arange(20).reshape(2, 5, 2).tolist()
    assert experts.dtype == torch.int16 and (experts[2] == -1).all()
    fill = [[-1, -1]] * 2
    expected = [[*fill, [0, 1], [2, 3], [-1, -1]], [*fill, [4, 5], [6, 7], [-1, -1]]]
    assert batch.columns["top"].view(3, 5, 2)[:2].tolist() == expected
    assert batch.segments["level"].tolist() == [3, 4, 9]


def test_groups_with_described_columns_wait_in_a_state(one_prompt):
    group = {"rewards": [1.0, 0.0], "columns": described_columns()}
    other = {"rewards": [0.0, 1.0], "columns": {k: v + 1 for k, v in described_columns().items()}}
    options = {"seq_len": 5, "rows": 2, "groups_per_batch": 1, "columns": DESCRIBED}
    prompts = functools.partial(prompt_dataset, one_prompt, prompts_per_call=2)
    dataset = RLDataset(prompts(), Groups(group, other), **options)
    next(dataset)
    state = json.loads(json.dumps(dataset.save_state()))
    expected = next(dataset)
    resumed = RLDataset(prompts(), Groups(), **options)
    resumed.restore_state(state)
    batch = next(resumed)
    assert batch.columns["experts"].tolist() == expected.columns["experts"].tolist()
    assert batch.segments["level"].tolist() == expected.segments["level"].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"top": None}, r"columns lacks \['top'\], which the RLDataset describes"),
        ({"top": torch.zeros(2, 5, 2)}, r"columns\['top'\] must be \[2, 2, 2\], got float32"),
        ({"top": torch.zeros(2, 2, 2)}, r"columns\['top'\] must be integers from -2147483648"),
        ({"level": torch.tensor([3, 300])}, r"columns\['level'\] must be integers from -128"),
        ({"experts": torch.zeros(2, 2, 2)}, r"columns\['experts'\] must be \[2, 5, 2\]"),
        ({"top": torch.full((2, 2, 2), 2**31)}, r"columns\['top'\] must be integers .* int64"),
        ({"half": torch.full((2, 2), 7e4)}, r"columns\['half'\] must fit float16, got 70000"),
        ({"half": torch.full((2, 2), 2049)}, r"columns\['half'\] must fit float16, got 2049"),
    ],
)
def test_columns_that_are_not_as_described_are_refused(one_prompt, change, fault):
    columns = {**described_columns(), **change}
    columns = {name: values for name, values in columns.items() if values is not None}
    group = {"rewards": [1.0, 0.0], "columns": columns}
    described = {**DESCRIBED, **({"half": Column("float16")} if "half" in change else {})}
    with pytest.raises(SamplerError, match=fault):
        next(dataset_of(one_prompt, group, columns=described))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([123456789.125, 2.0], dtype=torch.float64), "float64"),
        (torch.tensor([60000, 2], dtype=torch.int32).to(torch.uint16), "uint16"),
        (torch.tensor([70000, 2]).to(torch.uint32), "int64"),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "float32"),
        (torch.tensor([True, False]), "bool"),
    ],
)
def test_described_columns_arrive_exactly_in_their_own_type(one_prompt, values, dtype):
    group = {"rewards": [1.0, 0.0], "columns": {"own": values}}
    options = {"seq_len": 5, "rows": 2, "groups_per_batch": 1}
    columns = {"own": Column(dtype, per="document")}
    prompts = functools.partial(prompt_dataset, one_prompt, prompts_per_call=2)
    dataset = RLDataset(prompts(), Groups(group, group), columns=columns, **options)
    next(dataset)
    resumed = RLDataset(prompts(), Groups(), columns=columns, **options)
    resumed.restore_state(json.loads(json.dumps(dataset.save_state())))
    for each in (next(dataset), next(resumed)):
        found = each.segments["own"]
        assert str(found.dtype) == f"torch.{dtype}"
        assert found[each.source_ids >= 0].tolist() == values.tolist()


@pytest.mark.parametrize("together", [False, True])
def test_groups_of_a_batch_must_have_the_same_columns(one_prompt, together):
    """In one call of the sampler and over two; in one row or in two."""
    plain = {"rewards": [1.0, 0.0]}
    groups = [{**plain, "columns": {"values": torch.ones(2, 2)}}, plain, plain]
    sizes = {"seq_len": 10, "rows": 2, "groups_per_batch": 2}
    prompts = prompt_dataset(one_prompt, prompts_per_call=2 if together else 1)
    dataset = RLDataset(prompts, Groups(*groups), **sizes)
    message = (
        r"^Prompt \d: columns has the names \[\], but that of another prompt \['values'\]; all"
    )
    with pytest.raises(SamplerError, match=message):
        next(dataset)


def test_a_row_never_mixes_answers_with_and_without_a_column():
    fields = {"tokens": torch.tensor([[7, 8]]), "log_probs": torch.zeros(1, 1), "prompt_len": 1}
    columns = [{"values": torch.ones(1, 1)}, None]
    groups = [
        WaitingGroup(
            0, "p", "web", ScoredGroup(**fields, rewards=torch.ones(1), columns=each), 0, 0
        )
        for each in columns
    ]
    with pytest.raises(SampleError, match="Only some groups of a batch have the column values"):
        build_row(groups, [torch.ones(1, 1)] * 2, [(0, 0), (1, 0)])


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"response_mask": torch.ones(2).bool()},
            r"response_mask must be \[2, 2\], got bool \[2\]",
        ),
        ({"truncated": torch.tensor([0.5, 0.0])}, r"truncated must be bool, got float32 \[2\]"),
        ({"response_lens": torch.tensor([True, True])}, "response_lens must be integers, got bool"),
        (
            {"advantages": torch.zeros(2, 2, 1)},
            r"advantages must be \[2\] or \[2, 2\], got float32",
        ),
        ({"advantages": torch.tensor([math.inf, 1])}, "advantages must be finite"),
        ({"advantages": torch.tensor([1e300, 1]).double()}, "advantages must be finite"),
        ({"advantages": "grpo"}, "advantages must be a tensor, got a str"),
        ({"sample_weights": torch.tensor([1 + 1j, 0])}, "sample_weights must be a dense tensor of"),
        ({"advantages": torch.tensor([1.0, 0.0]).to_sparse()}, "advantages must be a dense tensor"),
        ({"log_probs": torch.zeros(2, 2) * 1j}, r"log_probs must be a dense .*, got complex64"),
        ({"columns": [torch.zeros(2, 2)]}, "columns must be tensors by name, got"),
        ({"columns": {3: torch.zeros(2, 2)}}, "columns must be tensors by name, got"),
        ({"columns": {"ref": None}}, r"columns\['ref'\] must be a tensor, got a NoneType"),
        ({"tokens": torch.ones(2, 5).bool()}, r"tokens must be integers .*, got bool \[2, 5\]"),
        ({"response_mask": torch.ones(2, 1).bool()}, r"response_mask must be \[2, 2\], got bool"),
        ({"response_mask": torch.ones(2, 2)}, r"response_mask must be bool, got float32 \[2, 2\]"),
        ({"response_mask": [[True]]}, "response_mask must be a tensor, got a list"),
        ({"advantages": torch.zeros(3)}, r"advantages must be \[2\] or \[2, 2\], got float32 \[3"),
        ({"advantages": torch.tensor([math.nan, 0])}, "advantages must be finite"),
        ({"advantages": [0.0, 1.0]}, "advantages must be a tensor, got a list"),
        ({"columns": {"v": torch.ones(2)}}, r"columns\['v'\] must be \[2, 2\], got float32 \[2\]"),
        ({"columns": {"v": torch.full((2, 2), math.nan)}}, r"columns\['v'\] must be finite"),
        ({"columns": {"response_mask": torch.ones(2, 2)}}, "columns has the name 'response_mask'"),
        ({"sample_weights": torch.ones(2, 2)}, r"sample_weights must be \[2\], got float32 \[2, 2"),
        ({"sample_weights": torch.tensor([math.inf, 0])}, "sample_weights must be finite"),
        ({"sample_weights": torch.tensor([math.nan, 0])}, "sample_weights must be finite"),
        (
            {"sample_weights": torch.tensor([-0.5, 1.0])},
            r"sample_weights must be at least 0, got \[-0.5, 1.0\]",
        ),
        ({"sample_weights": [1.0, 1.0]}, "sample_weights must be a tensor, got a list"),
        ({"log_probs": torch.full((2, 2), 0.5)}, "log_probs must be at most 0, got 0.5"),
        ({"log_probs": torch.full((2, 2), -math.inf)}, "log_probs must be finite"),
        ({"log_probs": torch.zeros(2, 1)}, r"log_probs must be \[2, 2\], got float32 \[2, 1\]"),
        ({"truncated": torch.tensor([True])}, r"truncated must be \[2\], got bool \[1\]"),
        ({"response_lens": torch.tensor([2])}, r"response_lens must be \[2\], got int64 \[1\]"),
        (
            {"columns": {"v": torch.ones(2, 2, 3)}},
            r"columns\['v'\] must be \[2, 2\], got float32 \[2, 2, 3\]",
        ),
        ({"columns": {"tokens": torch.ones(2, 2)}}, "columns has the name 'tokens', which the bat"),
        ({"columns": {"rewards": torch.ones(2, 2)}}, "columns has the name 'rewards'"),
        ({"prompt_len": -1}, r"prompt_len is -1 in int64 \[2, 5\] tokens; the prompt has 3 tokens"),
        ({"prompt_len": torch.tensor([-1, 3])}, r"prompt_len is \[-1, 3\] in int64 \[2, 5\] token"),
        (
            {"prompt_len": [3, 3]},
            r"prompt_len is \[3, 3\] in int64 \[2, 5\] tokens; the prompt has",
        ),
        (
            # The prompts are not those of the dataset, so their tokens are checked as well.
            {"prompt_len": torch.tensor([3, 3]), "tokens": torch.tensor([[-1, 2, 3, 4, 5]] * 2)},
            r"tokens of a response must be in the tokenizer's range \[0, 260\), got \[-1, -1\]",
        ),
        ({"prompt_len": torch.tensor([3])}, r"prompt_len must be an integer or integers \[2\], go"),
        ({"prompt_len": torch.tensor([3, 5])}, r"prompt_len is \[3, 5\] in int64 \[2, 5\] tokens"),
        ({"prompt_len": torch.tensor([3, 0])}, r"prompt_len is \[3, 0\]"),
        ({"prompt_len": torch.tensor([3.0, 3])}, "prompt_len must be an integer or integers"),
        (
            {"prompt_len": torch.tensor([3, 4]), "response_lens": torch.tensor([2, 2])},
            r"response_lens must be integers from 1 to 2, got \[2, 2\]",
        ),
        (
            {"rewards": {"exact": [0.0, 1.0]}},
            r"rewards have the names \['exact'\], needed are ",
        ),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_prompt(one_prompt, fields, message):
    group = {"rewards": [1.0, 0.0], **fields}
    with pytest.raises(SamplerError, match=rf"^Prompt \d: {message}"):
        next(dataset_of(one_prompt, group))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0, 0.0], r"names \[\], needed are those of reward_weights, \['exact'\]"),
        ({"exact": [1.0, 0.0], "form": [0.0, 0.0]}, r"names \['exact', 'form'\], needed are those"),
        ({"exact": [1.0, math.nan]}, r"rewards\['exact'\] must be finite"),
        ({"exact": [[1.0], [0.0]]}, r"rewards\['exact'\] must be \[2\], got float32 \[2, 1\]"),
    ],
)
def test_named_rewards_must_be_those_of_the_weights(one_prompt, rewards, message):
    with pytest.raises(SamplerError, match=message):
        next(dataset_of(one_prompt, {"rewards": rewards}, reward_weights={"exact": 1.0}))


@pytest.mark.parametrize("options", [{}, {"advantages": "rloo", "drop_equal": False}])
def test_a_group_of_one_needs_advantages_that_do_not_compare(one_prompt, options):
    message = r"tokens must be integers \[N >= 2, T\].*; groups of one answer need drop_equal=False"
    with pytest.raises(SamplerError, match=message):
        next(dataset_of(one_prompt, {"rewards": [1.0]}, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": "gae"}, "advantages: 'gae' found"),
        ({"reward_weights": {"mean": 1.0}}, "reward_weights: the name 'mean' found"),
        ({"reward_weights": {"exact": math.nan}}, "reward_weights.'exact'.: nan found"),
        ({"advantage_clip": 0}, "advantage_clip: 0 found, a number > 0"),
    ],
)
def test_bad_options_are_refused(one_prompt, options, message):
    with pytest.raises(ConfigError, match=message):
        dataset_of(one_prompt, **options)


# State ------------------------------------------------------------------------------------------


class Detailed(Dice):
    """Adds all optional fields."""

    def sample_and_score_batch(self, prompts, seeds):
        groups = super().sample_and_score_batch(prompts, seeds)
        for group, seed in zip(groups, seeds):
            count, longest = group.log_probs.shape
            values = torch.linspace(-1, 1, count * longest).view(count, longest)
            yield_fields = {
                "rewards": {"exact": group.rewards, "form": values[:, 0]},
                "response_mask": values < 0.5,
                "sample_weights": values[:, 0].abs(),
                "advantages": values if seed % 2 else None,
                "prompt_len": torch.tensor(group.prompt_lengths()),
                "columns": {"values": values},
            }
            for name, value in yield_fields.items():
                object.__setattr__(group, name, value)
        return groups


def build(path, sampler, **options):
    loader = prompt_dataset(path, prompts_per_call=3)
    return RLDataset(loader, sampler, seq_len=24, rows=2, groups_per_batch=2, **options)


def test_a_resume_with_all_fields_continues_exactly(tmp_path):
    path = write_sums(tmp_path)
    options = {"reward_weights": {"exact": 1.0, "form": 0.5}, "advantages": "reinforce"}
    reference = build(path, Detailed(), **options)
    states, expected = [], []
    for _ in range(6):
        states.append(json.dumps(reference.save_state()))
        expected.append((batch_hash(next(reference)), reference.metrics))
    for stop, state in enumerate(states):
        resumed = build(path, Detailed(), **options)
        resumed.restore_state(json.loads(state))
        assert [(batch_hash(next(resumed)), resumed.metrics) for _ in range(6 - stop)] == (
            expected[stop:]
        )
    with pytest.raises(StateMismatchError, match="advantages: saved 'reinforce', now None"):
        build(path, Detailed()).restore_state(json.loads(states[-1]))


def test_a_state_names_advantages_by_their_name_function_or_class():
    names = {"grpo": "grpo", rloo: "rloo", functools.partial(rloo): "partial"}
    assert {each: name_advantages(each) for each in names} == names
