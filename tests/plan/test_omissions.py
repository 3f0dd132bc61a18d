# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Skipped steps and excluded documents, on many topologies and over resumes."""

import json

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder
from megatron.energon.epathlib import EPath

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder
from energon_ext.cli import forecast
from energon_ext.config.run_fields import run_fields
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.plan.runs import SEQ_LEN, Run, edit_yaml, numbered_documents, tokens_of, write_numbered
from tests.saves import save_cursor
from tests.support import write_dataset, write_mix, write_tokens

ROWS = 8
SIZES = {"a": (150, 100, 1), "b": (110, 10_000, 2)}
ENTRIES = [("a", {"linear": {0: 3, 20: 1}}), ("b", 1)]


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        write_numbered(tmp_path / name, *size)
    return tmp_path


def mix(folder, name="mix", **fields):
    """Write a metadataset with further top-level fields."""
    path = write_mix(folder / f"{name}.yaml", ENTRIES)
    edit_yaml(path, **fields)
    return path


def exclude(folder, *lines):
    (folder / "excluded.txt").write_text("\n".join(["# a loss spike", "", *lines]))
    return {"exclude": "excluded.txt"}


# Steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "workers", "batch"), [(1, 0, 2), (4, 0, 1), (2, 2, 2), (1, 3, 1)]
)
def test_skipping_steps_leaves_all_other_steps_unchanged(folder, ranks, workers, batch):
    all_steps = Run(mix(folder, "all"), rows=ROWS).steps(20)
    run = Run(
        mix(folder, skip=[[3, "5"], ["9", "1e1"], ["0.01k", 12]]),
        ranks=ranks, workers=workers, batch=batch, rows=ROWS,
    )  # fmt: skip
    assert run.steps(12) == [all_steps[n] for n in (0, 1, 2, 5, 6, 7, 8, 12, 13, 14, 15, 16)]


def test_a_skip_added_by_a_resume_changes_no_other_step(folder):
    all_steps = Run(mix(folder, "all"), rows=ROWS).steps(20)
    run = Run(mix(folder, "all"), rows=ROWS)
    run.steps(4)
    # Part of the range is before the resume: steps already read stay read.
    resumed = Run(mix(folder, skip=[[2, 6], [8, 10]]), ranks=2, batch=2, rows=ROWS)
    resumed.resume(run.state())
    assert resumed.steps(3) == [all_steps[n] for n in (6, 7, 10)]
    state = json.loads(resumed.state())
    assert state["skipped"] == [[4, 6], [8, 10]]
    again = Run(mix(folder, "all"), rows=ROWS).resume(resumed.state())
    assert again.steps(2) == all_steps[11:13]
    assert json.loads(again.state())["skipped"] == [[4, 6], [8, 10]]


def test_a_partly_read_step_cannot_be_skipped(folder):
    run = Run(mix(folder, "all"), batch=2, rows=ROWS)
    iterator = iter(run.loaders[0])
    for _ in range(5):  # one step and a quarter
        next(iterator)
    state = run.state()
    with pytest.raises(ConfigError, match="step 1 was partly read.*skip steps from 2 on"):
        Run(mix(folder, skip=[[1, 3]]), batch=2, rows=ROWS).resume(state).step()
    assert Run(mix(folder, skip=[[2, 3]]), batch=2, rows=ROWS).resume(state)


def test_schedule_positions_include_skipped_steps(folder):
    blend = find_blend(Run(mix(folder, skip=[[6, 8], [3, 5]]), rows=ROWS).loaders[0])
    assert [blend.position(step) for step in range(6)] == [0, 1, 2, 5, 8, 9]


def test_adjacent_and_overlapping_ranges_are_merged():
    found = run_fields(None, [[10, 12], [9, 10], [1, 6], [2, 3]], None, None, EPath("mix.yaml"))
    assert found.skip.ranges == ((1, 6), (9, 12))


def test_a_run_that_skips_its_last_steps_ends(folder):
    path = mix(folder, skip=[[2, 10**5]])
    edit_yaml(path, lambda split: [entry.update(max_epochs=1) for entry in split["blend"]])
    run = Run(path, rows=ROWS)
    assert [step is None for step in run.steps(3)] == [False, False, True]


# Documents ---------------------------------------------------------------------------------------

EXCLUDED = {"a": [0, 7, 33, 120], "b": [5]}
LINES = [f"{source}:{number}" for source, numbers in EXCLUDED.items() for number in numbers]


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 0, 8), (2, 1, 2)])
def test_an_excluded_document_reads_like_an_empty_one(
    folder, tmp_path_factory, ranks, workers, batch
):
    """Token files in which these documents are empty give the same rows."""
    emptied = tmp_path_factory.mktemp("emptied")
    for name, size in SIZES.items():
        documents = numbered_documents(*size)
        for number in EXCLUDED[name]:
            documents[number] = []
        write_tokens(emptied / name, documents, np.int32)
    expected = Run(mix(emptied), rows=ROWS).steps(30)
    run = Run(
        mix(folder, **exclude(folder, *LINES)),
        ranks=ranks, workers=workers, batch=batch, rows=ROWS,
    )  # fmt: skip
    assert run.steps(30) == expected


def test_a_document_excluded_on_resume_is_in_no_later_pack_plan(folder):
    plain, fields = mix(folder, "all"), exclude(folder, *LINES)
    run = Run(plain, rows=ROWS)
    run.steps(2)
    resumed = Run(mix(folder, **fields), rows=ROWS).resume(run.state())
    # The open plan contains at most one epoch, so it is finished after forty steps.
    resumed.steps(40)
    # An epoch takes up to 25 steps, and a document may wait for a second one if it is carried over.
    read = tokens_of(resumed.steps(60))
    for name, size in SIZES.items():
        for number, document in enumerate(numbered_documents(*size)):
            is_read = any(read[token] for token in document[:-1])
            assert is_read == (number not in EXCLUDED[name]), (name, number)


@pytest.mark.parametrize(
    "steps", [5, 27, *(pytest.param(steps, marks=pytest.mark.nightly) for steps in (1, 13))]
)
def test_a_resume_is_exact_if_exclusions_grow_inside_a_plan(folder, steps):
    """The rows of the open plan stay, also after a second save inside it."""
    run = Run(mix(folder, "all"), rows=ROWS)
    run.steps(3)
    some = mix(folder, "some", **exclude(folder, *LINES[:2]))
    first = Run(some, rows=ROWS).resume(run.state())
    first.steps(steps)
    (folder / "excluded.txt").write_text("\n".join(LINES))
    grown = Run(some, rows=ROWS).resume(first.state())
    expected = grown.steps(12)
    again = Run(some, ranks=2, workers=1, batch=2, rows=ROWS).resume(first.state())
    assert again.steps(4) == expected[:4]
    third = Run(some, rows=ROWS).resume(again.state())
    assert third.steps(8) == expected[4:]


def test_exclusions_do_not_change_the_open_plan(folder):
    run = Run(mix(folder, "all"), rows=ROWS)
    run.steps(1)
    state = run.state()
    rest = run.steps(3)  # from a plan of about 70 rows
    fields = exclude(folder, *(f"a:{number}" for number in range(100)))
    assert Run(mix(folder, **fields), rows=ROWS).resume(state).steps(3) == rest


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "skip", [5, [5], [[5]], [[5, 5]], [[-1, 2]], [[1.5, 2.0]], [[0, True]], "x"]
)
def test_an_invalid_range_of_steps_is_refused(folder, skip):
    with pytest.raises(ConfigError, match=r"mix.yaml: skip: .* ranges of steps are needed"):
        Run(mix(folder, skip=skip), rows=ROWS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a", "line 3: 'a' found, SOURCE:NUMBER is needed"),
        ("a:-1", "SOURCE:NUMBER is needed"),
        ("a:²", "SOURCE:NUMBER is needed"),
        (":5", "SOURCE:NUMBER is needed"),
        ("a:" + "9" * 400, "SOURCE:NUMBER is needed"),
        ("aa:5", "no source 'aa'; the sources are a, b; did you mean a"),
        ("a:150", "cannot exclude document 150; there are only 150"),
    ],
)
def test_an_invalid_exclusion_is_refused(folder, line, words):
    with pytest.raises(ConfigError, match=words):
        Run(mix(folder, **exclude(folder, line)), rows=ROWS)


def test_a_binary_file_of_exclusions_is_refused(folder):
    (folder / "excluded.txt").write_bytes(bytes(range(128, 250)))
    with pytest.raises(ConfigError, match="line 1: .* SOURCE:NUMBER is needed"):
        Run(mix(folder, exclude="excluded.txt"), rows=ROWS)


def test_a_missing_file_of_exclusions_is_refused(folder):
    with pytest.raises(ConfigError, match="gone.txt: does not exist"):
        Run(mix(folder, exclude="gone.txt"), rows=ROWS)


def test_excluding_all_documents_of_a_source_is_refused(folder):
    lines = [f"b:{number}" for number in range(SIZES["b"][0])]
    with pytest.raises(ConfigError, match="b: all documents are empty or excluded"):
        Run(mix(folder, **exclude(folder, *lines)), rows=ROWS)


class Plain(DynamicBlendMixin, DefaultTaskEncoder):
    """Streams its samples."""

    plan_samples = False


@pytest.mark.parametrize("fields", [{"skip": [[1, 2]]}, {"exclude": "excluded.txt"}])
def test_streamed_sources_support_neither_skip_nor_exclude(folder, fields):
    write_dataset(folder / "web", ["x" * 30] * 20)
    path = write_mix(folder / "mix.yaml", [("web", 1)])
    exclude(folder, "web:train:3")
    edit_yaml(path, **fields)
    with pytest.raises(ConfigError, match="streamed"):
        Run(path, rows=ROWS, encoder=Plain())


def test_only_one_metadataset_may_set_skip(folder):
    inner = mix(folder, "inner")
    outer = write_mix(folder / "outer.yaml", [(inner, 1)])
    all_steps = Run(outer, rows=ROWS).steps(3)
    mix(folder, "inner", skip=[[1, 2]])
    assert Run(outer, rows=ROWS).steps(2) == [all_steps[0], all_steps[2]]
    edit_yaml(outer, skip=[[5, 6]])
    with pytest.raises(ConfigError, match="inner.yaml and .*outer.yaml: `skip` in both; remove it"):
        Run(outer, rows=ROWS)


# Commands ----------------------------------------------------------------------------------------


def test_commands_show_skipped_steps_and_excluded_documents(folder):
    for name in SIZES:  # the command uses the tokenizer of bytes
        write_tokens(folder / name, [[65 + n % 26] * (3 + n % 40) for n in range(150)])
    path = mix(folder, skip=[[1, 3], [7, 8]], **exclude(folder, *LINES))
    run = Run(path, rows=ROWS, encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN))
    run.steps(3)
    save_cursor(folder / "run", 3, json.loads(run.state()))
    lines = energon_ext("checkpoint", "diff", folder / "run", path).stdout.splitlines()
    assert "steps skipped: 1 to 2" in lines
    assert "steps to be skipped: 7 to 7" in lines
    assert "a: 4 documents are excluded" in lines
    blend = find_blend(run.loaders[0])
    last = forecast.forecast_text(
        forecast.make_forecast(blend, 9, None, False), blend, 9
    ).splitlines()[-1]
    assert last == "Steps 1 to 2, 7 to 7 are planned but skipped; they are counted here."
    traced = energon_ext("trace", folder / "run", path, "--step", 7, "--global-batch-size", ROWS)
    assert "Step 7 is skipped" in traced.stderr
