# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace`` knows which metadataset planned which steps, or refuses."""

import json
import shutil

import pytest

from energon_ext import PackedTaskEncoder
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import SEQ_LEN, Run, edit_yaml, numbered_documents, write_numbered
from tests.saves import save_cursor
from tests.support import close_loaders, write_mix, write_tokens

ROWS = 8
SIZES = {"a": (150, 100, 1), "b": (110, 10_000, 2), "c": (90, 20_000, 3)}
DOCUMENTS = {name: numbered_documents(*size) for name, size in SIZES.items()}
#: The metadataset that plans each step, in order; a state is saved every second step.
LEGS = ["first"] * 4 + ["second"] * 2 + ["third"] * 4
REFUSED = "the run planned them with another metadataset"


def read_legs(folder, run_folder, legs=LEGS, state=None, begin=0):
    """Read steps with the metadataset of each; save every second one; return their tokens."""
    steps, run, mix = [], None, None
    for number, name in enumerate(legs, begin + 1):
        if name != mix:
            close_loaders()
            run, mix = Run(folder / f"{name}.yaml", batch=ROWS, rows=ROWS), name
            if state is not None:
                run.resume(state)
        steps.append(sorted(tokens for tokens, *_ in run.step()))
        state = run.state()
        if number % 2 == 0:
            save_cursor(run_folder, number, json.loads(state))
    close_loaders()
    return steps


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    for name, size in SIZES.items():
        write_numbered(folder / name, *size)
    write_mix(folder / "first.yaml", [("a", 1), ("b", {"linear": {0: 1, 9: 4}})])
    write_mix(folder / "second.yaml", [("a", 2), ("c", 1)])
    write_mix(folder / "third.yaml", [("a", 2), ("c", 1)])
    (folder / "excluded.txt").write_text("a:3\nc:1\n")
    edit_yaml(folder / "third.yaml", exclude="excluded.txt")
    return folder, read_legs(folder, folder / "run")


@pytest.fixture
def mixes(data):
    return [data[0] / f"{name}.yaml" for name in ("third", "first", "second")]


def trace(run, *arguments):
    return energon_ext("trace", run, *arguments)


def tokens_of(row):
    """Return the padded inputs of a row according to its trace."""
    inputs = []
    for document, start, stop in row["contents"]:
        inputs += DOCUMENTS[row["source"]][document][start:stop]
    return tuple((inputs[:SEQ_LEN] + [0] * SEQ_LEN)[:SEQ_LEN])


def traced(run, mixes, step):
    """Return the sorted tokens of a step's rows according to its trace."""
    result = trace(run, *mixes, "--step", step, "--json")
    assert result.exit_code == 0, result.output
    return sorted(tokens_of(json.loads(line)) for line in result.stdout.splitlines())


def keep_only(folder, target, *kept):
    """Copy a run, and only these of its saves."""
    shutil.copytree(folder, target)
    for save in target.glob("iter_*"):
        if int(save.name[5:]) not in kept:
            shutil.rmtree(save)
    return target


@pytest.mark.parametrize("kept", [(2, 4, 6, 8, 10), (10,), (6, 10), (4, 8, 10)])
def test_each_step_is_planned_with_the_metadataset_of_its_time(data, mixes, tmp_path, kept):
    folder, steps = data
    run = keep_only(folder / "run", tmp_path / "run", *kept)
    for step in range(len(LEGS)):
        assert traced(run, mixes, step) == steps[step], step


@pytest.mark.parametrize("step", range(len(LEGS)))
def test_a_step_of_another_metadataset_is_refused(data, step):
    folder, steps = data
    for name in ("first", "second", "third"):
        path = folder / f"{name}.yaml"
        if name == LEGS[step]:
            assert traced(folder / "run", [path], step) == steps[step]
        else:
            message = error_line(trace(folder / "run", path, "--step", step))
            # The newest state before it was saved after an even number of steps.
            steps_refused = f"Steps {step - 1} to {step}" if step % 2 else f"Step {step}"
            assert message.startswith(f"{steps_refused}: {REFUSED}"), message


def test_a_chain_that_lacks_a_metadataset_is_refused_where_it_breaks(data, mixes, tmp_path):
    run = keep_only(data[0] / "run", tmp_path / "run", 10)
    third, first, second = mixes
    assert traced(run, [first, third], 3) == data[1][3]
    message = error_line(trace(run, first, third, "--step", 5))
    assert message.startswith(f"Steps 4 to 5: {REFUSED}")
    for given in ([second, third], [third, first]):
        message = error_line(trace(run, *given, "--step", 8))
        assert REFUSED in message or "no state at their beginning" in message


def test_a_document_is_found_in_all_steps_of_a_chain(data, mixes):
    folder, steps = data
    for number in (0, 3, 7, 11, 50):
        result = trace(folder / "run", *mixes, "--document", f"a:{number}", "--json")
        found = {json.loads(line)["step"] for line in result.stdout.splitlines()}
        token = DOCUMENTS["a"][number][0]
        expected = {step for step, rows in enumerate(steps) if any(token in row for row in rows)}
        assert expected <= found and result.exit_code == 0
        assert "not read in" not in result.stderr or not found
    lines = trace(folder / "run", mixes[0], "--document", "a:3").stderr.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [
        "Steps 0 to 1", "Steps 2 to 3", "Steps 4 to 5",
    ]  # fmt: skip


def test_steps_after_the_newest_state_are_shown_with_a_doubt_if_the_mix_is_another(data, mixes):
    folder, _ = data
    third, first, _ = mixes
    sure = trace(folder / "run", first, third, "--step", 11)
    assert sure.exit_code == 0 and "right only if" not in sure.stderr
    doubted = trace(folder / "run", first, "--step", 11)
    assert doubted.exit_code == 0
    assert "Step 11 is after the newest state, of step 10" in doubted.stderr
    assert f"right only if the run has continued with {first}." in doubted.stderr


def test_states_of_a_branch_that_the_run_has_left_are_ignored(data, mixes, tmp_path):
    """The run went back to step 4, and did not change its mix this time."""
    folder, steps = data
    run = keep_only(folder / "run", tmp_path / "run", 4)
    state = (run / "iter_0000004" / "data.json").read_text()
    other = read_legs(folder, run, ["first"] * 4, state, begin=4)
    shutil.rmtree(run / "iter_0000006")
    shutil.copytree(folder / "run" / "iter_0000006", run / "iter_0000006")
    for step in range(4, 8):
        assert traced(run, mixes, step) == other[step - 4], step
    for step in range(4):
        assert traced(run, mixes, step) == steps[step], step


# Digests ------------------------------------------------------------------------------------------


def test_a_state_has_one_digest_for_each_span_of_steps(data):
    folder, _ = data
    digests = {
        name: find_blend(Run(folder / f"{name}.yaml", rows=ROWS).loaders[0]).data_digest
        for name in ("first", "second", "third")
    }
    assert len(set(digests.values())) == 3
    state = json.loads((folder / "run" / "iter_0000010" / "data.json").read_text())
    assert state["data_digests"] == [
        [4, digests["first"]], [6, digests["second"]], [10, digests["third"]],
    ]  # fmt: skip


def test_a_run_saved_before_its_first_step_adds_no_span(data):
    folder, _ = data
    state = (folder / "run" / "iter_0000004" / "data.json").read_text()
    for name in ("second", "first", "third", "first"):
        run = Run(folder / f"{name}.yaml", batch=ROWS, rows=ROWS).resume(state)
        state = run.state()
        assert len(json.loads(state)["data_digests"]) == (1 if name == "first" else 2)


# Runs without a state -----------------------------------------------------------------------------


def test_a_run_without_a_state_is_planned_from_its_beginning(tmp_path):
    for name in ("a", "b"):
        documents = [[65 + n % 26] * (3 + (n * 7) % 40) for n in range(120)]
        write_tokens(tmp_path / name, documents)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 3), ("b", 1)])
    run = Run(mix, batch=ROWS, rows=ROWS, encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN))
    expected = [sorted(tokens for tokens, *_ in step) for step in run.steps(3)]
    (tmp_path / "run").mkdir()
    message = error_line(trace(tmp_path / "run", mix, "--step", 2))
    assert "no data.json of a planned run" in message
    assert "or --seq-length and --global-batch-size of a run that has saved nothing yet" in message
    settings = ("--seq-length", SEQ_LEN, "--global-batch-size", ROWS, "--tokenizer", "bytes")
    for step in range(3):
        result = trace(tmp_path / "run", mix, "--step", step, "--json", *settings)
        found = []
        for row in map(json.loads, result.stdout.splitlines()):
            inputs = []
            for document, start, stop in row["contents"]:
                inputs += [65 + document % 26] * (stop - start)
            found.append(tuple((inputs[:SEQ_LEN] + [0] * SEQ_LEN)[:SEQ_LEN]))
        assert sorted(found) == expected[step]
    settings = ("--encoder", "tests.cli.test_trace_of_changed_mixes:encoder", *settings)
    message = error_line(trace(tmp_path / "run", mix, "--step", 2, *settings))
    assert "--seq-length: is set by --encoder; remove it." in message  # as `plan` says
    settings = settings[:2] + settings[4:]
    result = trace(tmp_path / "run", mix, "--step", 2, "--json", *settings)
    assert len(result.stdout.splitlines()) == ROWS and "text" in result.stdout


def encoder():
    return PackedTaskEncoder(ByteTokenizer(), SEQ_LEN)


def test_settings_that_a_state_contains_are_refused(data, mixes):
    message = error_line(trace(data[0] / "run", *mixes, "--step", 1, "--seq-length", 32))
    assert "--seq-length: " in message and "has states, which contain it; leave it out." in message


# Lines for `exclude` ------------------------------------------------------------------------------


def test_lines_of_a_step_can_be_excluded_as_they_are_printed(data, mixes, tmp_path):
    folder, steps = data
    for name, size in SIZES.items():
        write_numbered(tmp_path / name, *size)
    result = trace(folder / "run", *mixes, "--step", 1, "--exclude-lines")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    assert len(set(lines)) == len(lines)
    tokens = {token for row in steps[1] for token in row}
    expected = {
        f"{name}:{number}"
        for name in ("a", "b")
        for number, document in enumerate(DOCUMENTS[name])
        if tokens & set(document)
    }
    assert expected <= set(lines)  # a document of which only the last token was read has no input
    (tmp_path / "excluded.txt").write_text(result.stdout)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 1), ("b", 1)])
    edit_yaml(mix, exclude="excluded.txt")
    read = {token for step in Run(mix, rows=ROWS).steps(20) for row in step for token in row[0]}
    assert not read & {
        token
        for line in lines
        for token in DOCUMENTS[line.partition(":")[0]][int(line.partition(":")[2])]
    } - {0}


def test_exclude_takes_the_name_of_a_source_as_well_as_its_key(data, tmp_path):
    for name, size in SIZES.items():
        write_numbered(tmp_path / name, *size)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 1), ("b", 1)])
    edit_yaml(mix, lambda split: split["blend"][0].update(name="Prose, 2023: best"))
    edit_yaml(mix, exclude="excluded.txt")
    steps = []
    for lines in ("a:3\na:5\nb:1\n", "Prose, 2023: best:3\na:5\nb:1\n", "# no line\n"):
        (tmp_path / "excluded.txt").write_text(lines)
        steps.append(Run(mix, rows=ROWS).steps(10))
    assert steps[0] == steps[1] != steps[2]
