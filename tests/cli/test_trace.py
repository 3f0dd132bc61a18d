# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace`` matches the batches of a real run with a changed mix and resumes."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.cli.main import main
from energon_ext.plan.cursor import fork_at
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.trace import rows_of as rows_of_step
from energon_ext.prepare import shuffle
from energon_ext.state.schema import check_seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.plan.runs import SEQ_LEN, Run, edit_yaml, numbered_documents, write_numbered
from tests.saves import save_cursor
from tests.support import close_loaders, config, loader_for, take, write_mix, write_tokens

RANKS, BATCH, ROWS = 2, 2, 8
STEPS, MOVED_AT = 12, 8
SIZES = {"a": (150, 100, 1), "b": (110, 10_000, 2), "c": (90, 20_000, 3)}
#: --world-size and --micro-batch-size of the run.
TOPOLOGY = ("--world-size", str(RANKS), "--micro-batch-size", str(BATCH))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A run of twelve steps with a new mix after eight, saved every fourth step."""
    folder = tmp_path_factory.mktemp("trace")
    for name, (count, first, seed) in SIZES.items():
        write_numbered(folder / name, count, first, seed)
    mixes = [
        write_mix(folder / "first.yaml", [("a", 1), ("b", {"linear": {0: 1, 9: 4}})]),
        write_mix(folder / "second.yaml", [("a", 2), ("c", 1)]),
    ]
    steps, state = [], None
    while len(steps) < STEPS:
        run = Run(mixes[len(steps) >= MOVED_AT], ranks=RANKS, batch=BATCH, rows=ROWS)
        if state is not None:
            run.resume(state)
        iterators = [iter(loader) for loader in run.loaders]
        for _ in range(4):
            steps.append([[next(i) for _ in range(run.rounds)] for i in iterators])
        state = run.state()
        save_cursor(folder / "run", len(steps), json.loads(state))
        close_loaders()
    return folder, mixes, steps


def call(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


DOCUMENTS = {name: numbered_documents(*size) for name, size in SIZES.items()}


def tokens_of(row):
    """Return the padded inputs of a row according to its trace."""
    inputs = []
    for document, start, stop in row["contents"]:
        inputs += DOCUMENTS[row["source"]][document][start:stop]
    # In a full row the last token is only a label.
    return (inputs[:SEQ_LEN] + [0] * SEQ_LEN)[:SEQ_LEN]


@pytest.mark.parametrize("folder_of_states", [".", "data"])
def test_data_states_of_megatron_lm_give_the_same_trace(data, tmp_path, folder_of_states):
    folder, mixes, _ = data
    run = Run(mixes[0], ranks=RANKS, batch=BATCH, rows=ROWS)
    for iteration, steps in ((4, 4), (7, 3)):
        run.steps(steps)
        for rank, loader in enumerate(run.loaders):
            name = f"iter_{iteration:07d}/mp_rank_00/train_dataloader_dprank{rank:03d}.pt"
            path = tmp_path / folder_of_states / name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"dataloader_state_dict": loader.save_state_rank()}, path)
    options = (mixes[0], "--step", 5, "--json", *TOPOLOGY)
    assert rows_of(call(tmp_path, *options)) == rows_of(call(folder / "run", *options))


def test_a_run_folder_gives_the_same_trace_as_its_checkpoints_folder(data, tmp_path):
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
            expected = [r for r in rows if (r["rank"], r["micro_batch"]) == (rank, number)]
            assert [tokens_of(row) for row in expected] == batch.tokens.view(BATCH, -1).tolist()
    files = [(row["source"], file) for row in rows for file in row["files"]]
    assert all(file["file"] == str(folder / source) for source, file in files)


def steps_of_document(folder, mix, *arguments):
    result = call(folder / "run", mix, "--json", *arguments)
    return [row["step"] for row in rows_of(result)], result.stderr


def test_all_steps_that_read_a_document_are_found(data):
    folder, mixes, steps = data
    read = [
        {token for batch in sum(ranks, []) for token in batch.tokens.tolist()}
        for ranks in steps[:MOVED_AT]
    ]
    for step in (0, 5, 7):
        number = next(n for n, ids in enumerate(DOCUMENTS["a"]) if ids[0] in read[step])
        first = DOCUMENTS["a"][number][0]
        expected = [step for step, tokens in enumerate(read) if first in tokens]
        document = ("--document", f"a:{number}", "--step", MOVED_AT - 1)
        found, _ = steps_of_document(folder, mixes[0], *document)
        assert set(expected) <= set(found) and min(found) == min(expected)


def test_an_unread_document_is_reported(data):
    folder, mixes, steps = data
    tokens = {t for ranks in steps[:4] for batch in sum(ranks, []) for t in batch.tokens.tolist()}
    number = next(n for n, ids in enumerate(DOCUMENTS["b"]) if not tokens & set(ids))
    found, errors = steps_of_document(folder, mixes[0], "--document", f"b:{number}", "--step", 3)
    assert found == [] and f"b:{number}: not read in steps 0 to 3." in errors


def test_a_source_is_found_by_its_name(data):
    folder, mixes, _ = data
    named = folder / "named.yaml"
    content = json.loads(mixes[0].read_text())
    content["splits"]["train"]["blend"][0]["name"] = "Prose, 2023"
    named.write_text(json.dumps(content))
    options = ("--step", 3)
    by_key = steps_of_document(folder, named, "--document", "a:3", *options)
    assert steps_of_document(folder, named, "--document", "Prose, 2023:3", *options)[0] == by_key[0]


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
        (
            ["--step", "3", "--document", "a"],
            "--document a: SOURCE:NUMBER is needed",
        ),
        (
            ["--step", "3", "--document", "a:150"],
            "--document a:150: a has 150 documents,",
        ),
        (["--step", "3", "--rank", "5"], "--rank 5: must be below 1; see --world-size."),
        (["--step", "3", "--global-batch-size", "7", "--world-size", "2"], "rows_per_step: 7"),
    ],
)
def test_invalid_trace_options_are_one_line(data, arguments, message):
    folder, mixes, _ = data
    result = call(folder / "run", mixes[0], *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_spliced_source_is_traced_by_document_number(tmp_path):
    for name in ("a", "b"):
        write_numbered(tmp_path / name, *SIZES[name])
    splice = {"num_docs": 2, "content_length": 8}
    entries = [{"path": "a"}, {"path": "b", "splice": splice}]
    mix = write_mix(tmp_path / "mix.yaml", [])
    content = {**json.loads(mix.read_text()), "splits": {"train": {"blend": entries}}}
    mix.write_text(json.dumps(content))
    run = Run(mix, ranks=1, batch=ROWS, rows=ROWS)
    save_cursor(tmp_path / "run", 0, json.loads(run.state()))
    (batch,) = take(run.loaders[0], 1)
    rows = rows_of(call(tmp_path / "run", mix, "--step", 0, "--json"))
    shown = [row for row in rows if row["source"] == "b"]
    assert shown
    for row in shown:
        ((document, start, stop),) = row["contents"]
        tokens = DOCUMENTS["b"][document][start:stop]
        assert set(tokens) <= set(batch.tokens.tolist()) and row["files"][0]["document"] == document
    (document, *_) = shown[0]["contents"][0]
    found = rows_of(
        call(tmp_path / "run", mix, "--step", 0, "--document", f"b:{document}", "--json")
    )
    assert [row["row"] for row in found] == [
        row["row"] for row in shown if row["contents"][0][0] == document
    ]


def test_a_document_that_is_changed_when_it_is_read_shows_its_file_and_its_part(tmp_path):
    write_numbered(tmp_path / "a", *SIZES["a"])
    mix = write_mix(tmp_path / "mix.yaml", [])
    entry = {"path": "a", "transform": {"token_noise": {"rate": 0.1, "token": 5}}}
    content = {**json.loads(mix.read_text()), "splits": {"train": {"blend": [entry]}}}
    mix.write_text(json.dumps(content))
    run = Run(mix, ranks=1, batch=ROWS, rows=ROWS)
    save_cursor(tmp_path / "run", 0, json.loads(run.state()))
    for row in rows_of(call(tmp_path / "run", mix, "--step", 0, "--json")):
        for (document, start, stop), file in zip(row["contents"], row["files"], strict=True):
            place = f"a:{document} [{start}, {stop}), number {document} of {tmp_path / 'a'}"
            assert file["text"] == place


def test_documents_show_the_line_they_were_prepared_from(tmp_path):
    lines = [json.dumps({"text": f"{n} " * (5 + n % 7)}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:25]) + "\n\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[25:]))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    run = CliRunner().invoke(
        main,
        ["prepare", str(tmp_path / "web"), "--jsonl", *map(str, sources), "--val", "0"]
        + ["--tokenizer", "bytes"],
    )
    assert run.exit_code == 0, run.output
    mix = write_mix(tmp_path / "mix.yaml", [("web/train", 1)])
    dataset = get_train_dataset(
        mix,
        worker_config=config(),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
    )
    loader = loader_for(dataset)
    next(iter(loader))
    save_cursor(tmp_path / "run", 1, loader.state_dict())
    arguments = ["--step", 3, "--micro-batch-size", 2, "--json", "--tokenizer", "bytes"]
    rows = rows_of(call(tmp_path / "run", mix, *arguments))
    found = [document for row in rows for document in row["files"]]
    assert found
    for document in found:
        number = document["document"]
        file, line = ("a", number + 1) if number < 25 else ("b", number - 24)
        assert document["origin"] == f"{tmp_path}/{file}.jsonl:{line}"
        assert f"(from {document['origin']})" in document["text"]


def test_documents_in_random_order_are_traced_to_their_line_and_excluded(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 2000)
    lines = [json.dumps({"text": f"<{n}> " * (2 + n % 3)}) for n in range(160)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    call_of = ["prepare", str(tmp_path / "web"), "--jsonl", str(tmp_path / "a.jsonl"), "--val", "0"]
    run = CliRunner().invoke(main, [*call_of, "--tokenizer", "bytes", "--shuffle", "3"])
    assert run.exit_code == 0, run.output

    def steps_of(mix, count):
        encoder = PackedTaskEncoder(ByteTokenizer(), SEQ_LEN)
        options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
        loader = loader_for(get_train_dataset(mix, **options))
        batches = take(loader, count)
        save_cursor(tmp_path / mix.stem, count, loader.state_dict())
        return [ByteTokenizer().decode(batch.tokens.tolist()) for batch in batches]

    mix = write_mix(tmp_path / "mix.yaml", [("web/train", 1)])
    texts = steps_of(mix, 2)
    arguments = ["--step", 1, "--micro-batch-size", 2]
    rows = rows_of(call(tmp_path / "mix", mix, *arguments, "--json", "--tokenizer", "bytes"))
    found = [document for row in rows for document in row["files"]]
    assert len({document["file"] for document in found}) > 1
    for document in found:
        path, line = document["origin"].split(":")
        assert path == str(tmp_path / "a.jsonl") and f"<{int(line) - 1}> " in texts[1]
    moved = [d["document"] for d in found if d["origin"] != f"{path}:{d['document'] + 1}"]
    assert len(moved) > len(found) // 2
    excluded = call(tmp_path / "mix", mix, *arguments, "--exclude-lines").stdout
    assert excluded.count(f"(from {tmp_path}/a.jsonl:") == len(found)
    (tmp_path / "excluded.txt").write_text(excluded)
    without = write_mix(tmp_path / "without.yaml", [("web/train", 1)])
    edit_yaml(without, exclude="excluded.txt")
    rest = "".join(steps_of(without, 8))
    for document in found:
        assert f"<{int(document['origin'].split(':')[1]) - 1}> " not in rest


@pytest.mark.nightly
def test_ten_thousand_traced_rows_match_a_run_over_mixes_and_resumes(tmp_path):
    for name, (count, first, seed) in SIZES.items():
        write_numbered(tmp_path / name, count, first, seed)
    mixes = [
        write_mix(tmp_path / "first.yaml", [("a", 1), ("b", {"linear": {0: 1, 900: 4}})]),
        write_mix(tmp_path / "second.yaml", [("a", 2), ("c", 1)]),
    ]
    state, compared = None, 0
    for leg in range(10):  # of 125 steps, each resumed from the previous one
        options = {"ranks": RANKS, "batch": BATCH, "rows": ROWS}
        run = Run(mixes[leg % 2], **options)
        planner = find_blend(Run(mixes[leg % 2], **options).loaders[0])
        if state is not None:
            run.resume(state)
        blend_state = None if state is None else check_seal(json.loads(state))
        iterators = [iter(loader) for loader in run.loaders]
        fork = planner.fork() if state is None else fork_at(planner, blend_state)
        for step, _ in zip(fork.draw_steps(), range(125)):
            rows = list(rows_of_step(step, planner.topology, planner.keys))
            for number in range(run.rounds):
                for rank, iterator in enumerate(iterators):
                    expected = [r for r in rows if (r.rank, r.micro_batch) == (rank, number)]
                    read = next(iterator).tokens.view(BATCH, -1).tolist()
                    assert [tokens_of(row.to_json()) for row in expected] == read
                    compared += len(read)
        state = run.state()
        close_loaders()
    assert compared == 10_000


def test_steps_read_by_another_mix_are_reported_as_unknown(data):
    folder, mixes, _ = data
    found, errors = steps_of_document(folder, mixes[1], "--document", "a:3")
    assert all(step >= MOVED_AT for step in found)
    for steps in ("0 to 3", "4 to 7"):
        assert f"Steps {steps}: the run planned them with another metadataset" in errors
    _, errors = steps_of_document(folder, mixes[1], "--document", "c:89", "--step", 8)
    assert errors.endswith("c:89: not read in steps 8 to 8.\n")


def test_run_resume_and_commands_count_the_unit_in_the_file(tmp_path):
    for name, token in (("a", 65), ("b", 66)):
        write_tokens(tmp_path / name, [[token] * 50] * 40)
    weights = {"a": {"step": {0: 1, "1.5k": 0}}, "b": {"step": {0: 0, "15e2": 1}}}
    mix = write_mix(tmp_path / "mix.yaml", list(weights.items()))
    mix.write_text(json.dumps({**json.loads(mix.read_text()), "schedule_axis": "tokens"}))
    state, shares = None, []
    for ranks, batch in ((1, 8), (2, 2), (2, 1)):
        run = Run(mix, ranks=ranks, batch=batch, rows=ROWS)
        if state is not None:
            run.resume(state)
        for step in run.steps(2):
            shares.append(sum(tokens[0] == 66 for tokens, *_ in step))
        state = run.state()
        save_cursor(tmp_path / "run", len(shares), json.loads(state))
        close_loaders()
    # A step of 8 rows has 512 positions: 1500 are passed at the start of the fourth.
    assert shares == [0, 0, 0, 8, 8, 8]
    for step, share in enumerate(shares):
        rows = rows_of(call(tmp_path / "run", mix, "--step", step, "--json"))
        assert [row["source"] for row in rows].count("b") == share
    planned = ["plan", str(mix), "--seq-length", str(SEQ_LEN), "--global-batch-size", str(ROWS)]
    shown = CliRunner().invoke(main, [*planned, "--at", "1024,1536"]).stdout.splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["a", "100.00%", "0.00%"],
        ["b", "0.00%", "100.00%"],
    ]
    found = json.loads(CliRunner().invoke(main, [*planned, "--steps", "6", "--json"]).stdout)
    assert [share > 0 for share in found["sources"]["b"]["share"]] == [n > 0 for n in shares]
    read = found["sources"]["b"]["tokens"]
    assert [tokens > 0 for tokens in read] == [n > 0 for n in shares]
