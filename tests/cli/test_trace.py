# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace`` against the batches of a real run, over a change of the mix and resumes."""

import json
import shutil

import pytest
from click.testing import CliRunner

from energon_ext.cli.main import main
from energon_ext.state.checkpoint import CheckpointStore
from tests.plan.runs import SEQ_LEN, Run, numbered_documents, write_numbered
from tests.support import close_loaders, write_dataset, write_mix

RANKS, BATCH, ROWS = 2, 2, 8
STEPS, MOVED_AT = 12, 8
SIZES = {"a": (150, 100, 1), "b": (110, 10_000, 2), "c": (90, 20_000, 3)}
#: --world-size and --micro-batch-size of the run.
TOPOLOGY = ("--world-size", str(RANKS), "--micro-batch-size", str(BATCH))


@pytest.fixture(autouse=True)
def loaders_end():
    yield
    close_loaders()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A run of twelve steps that gets another mix after eight, saved every fourth step."""
    folder = tmp_path_factory.mktemp("trace")
    for name, (count, first, seed) in SIZES.items():
        write_numbered(folder / name, count, first, seed)
    mixes = [
        write_mix(folder / "first.yaml", [("a", 1), ("b", {"linear": {0: 1, 9: 4}})]),
        write_mix(folder / "second.yaml", [("a", 2), ("c", 1)]),
    ]
    steps, state = [], None
    with CheckpointStore(folder / "run", keep=9) as store:
        while len(steps) < STEPS:
            run = Run(mixes[len(steps) >= MOVED_AT], ranks=RANKS, batch=BATCH, rows=ROWS)
            if state is not None:
                run.resume(state)
            iterators = [iter(loader) for loader in run.loaders]
            for _ in range(4):
                steps.append([[next(each) for _ in range(run.rounds)] for each in iterators])
            state = run.state()
            store.save(len(steps), data=json.loads(state))
            close_loaders()
    return folder, mixes, steps


def call(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


DOCUMENTS = {name: numbered_documents(*size) for name, size in SIZES.items()}


def tokens_of(row):
    """The inputs of a row, padded, as its trace says."""
    inputs = []
    for document, start, stop in row["contents"]:
        inputs += DOCUMENTS[row["source"]][document][start:stop]
    # The last token is a label alone where the row is full.
    return (inputs[:SEQ_LEN] + [0] * SEQ_LEN)[:SEQ_LEN]


def test_the_folder_of_a_run_is_as_good_as_that_of_its_checkpoints(data, tmp_path):
    folder, mixes, _ = data
    shutil.copytree(folder / "run", tmp_path / "a" / "checkpoints")
    options = (mixes[0], "--step", 5, "--json", *TOPOLOGY)
    assert rows_of(call(tmp_path / "a", *options)) == rows_of(call(folder / "run", *options))


@pytest.mark.parametrize("step", range(STEPS))
def test_every_row_of_every_step_is_what_the_run_read(data, step):
    folder, mixes, steps = data
    mix = mixes[step >= MOVED_AT]
    rows = rows_of(call(folder / "run", mix, "--step", step, "--json", *TOPOLOGY))
    assert [row["row"] for row in rows] == list(range(ROWS))
    for rank in range(RANKS):
        for number, batch in enumerate(steps[step][rank]):
            own = [r for r in rows if (r["rank"], r["micro_batch"]) == (rank, number)]
            assert [tokens_of(row) for row in own] == batch.tokens.view(BATCH, -1).tolist()
    files = [(row["source"], each) for row in rows for each in row["files"]]
    assert all(each["file"] == str(folder / source) for source, each in files)


def test_the_steps_that_read_a_document_are_found(data):
    folder, mixes, steps = data
    read = [
        {token for batch in sum(ranks, []) for token in batch.tokens.tolist()}
        for ranks in steps[:MOVED_AT]
    ]
    number = next(n for n, ids in enumerate(DOCUMENTS["a"]) if ids[0] in read[5])
    first = DOCUMENTS["a"][number][0]
    expected = [step for step, tokens in enumerate(read) if first in tokens]
    found = []
    for last in (3, 7):  # each from the state before it
        result = call(
            folder / "run", mixes[0], "--step", last, "--document", f"a:{number}", "--json"
        )
        found += [row["step"] for row in rows_of(result)]
    assert sorted(set(found)) == sorted(set(expected))


def test_rows_of_a_rank_are_shown_with_file_and_text(data):
    folder, mixes, _ = data
    result = call(
        *(folder / "run", mixes[0], "--step", 2, "--rank", 1, "--tokenizer", "bytes"), *TOPOLOGY
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("row 2, rank 1, micro-batch 0: ")
    assert "rank 0" not in result.stdout
    assert f" of {folder}/" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3", "--document", "a"], "--document a: SOURCE:NUMBER is needed; sources are"),
        (["--step", "3", "--global-batch-size", "7", "--world-size", "2"], "rows_per_step: 7"),
    ],
)
def test_what_cannot_be_traced_is_one_line(data, arguments, message):
    folder, mixes, _ = data
    result = call(folder / "run", mixes[0], *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_without_a_cursor_is_named(data, tmp_path):
    result = call(tmp_path, data[1][0], "--step", 1)
    assert result.exit_code == 2
    assert "no checkpoint with a data.json" in result.stderr


def test_what_is_not_a_token_file_is_refused_by_name(data, tmp_path):
    folder = data[0]
    write_dataset(folder / "texts", [f"text {number}" for number in range(40)])
    mix = write_mix(folder / "third.yaml", [("a", 1), ("texts", 1)])
    result = call(folder / "run", mix, "--step", 3)
    assert result.exit_code == 2
    assert "texts:train: is streamed or spliced; only token files are traced." in result.stderr
