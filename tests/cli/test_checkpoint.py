# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint diff`` predicts what a resume does."""

import json
import logging
import re

import pytest
import torch
from click.testing import CliRunner

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.cli.main import main
from energon_ext.encoders.splice import MultiSpliceTaskEncoder
from energon_ext.errors import EnergonExtError
from energon_ext.splice import MultiSpliceConfig
from energon_ext.state.files import write_file
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.saves import save_cursor
from tests.support import config, loader_for, take, write_mix, write_tokens


@pytest.fixture
def data(tmp_path):
    for name in ("book", "math"):
        write_tokens(tmp_path / name, [[5, 6, 7, 8] * 6] * 40)
    return tmp_path


def new_loader(mix, *, encoder=None, seq_len=32, packing="bin", rank=0, ranks=1, **options):
    encoder = encoder or PackedTaskEncoder(
        ByteTokenizer(), seq_len, packing=packing, packing_buffer_docs=8
    )
    dataset = get_train_dataset(
        mix,
        worker_config=config(options.pop("workers", 0), rank, ranks),
        batch_size=options.pop("batch_size", 1),
        task_encoder=encoder,
        **options,
    )
    return loader_for(dataset)


def save_planned_run(data, batches=6, entries=(("book", 1), ("math", 1)), **options):
    """Save a planned run with two rows per step; return its folder and its cursor."""
    loader = new_loader(write_mix(data / "mix.yaml", entries), rows_per_step=2, **options)
    take(loader, batches)
    cursor = loader.state_dict()
    save_cursor(data / "run", batches, cursor)
    return data / "run", cursor


def diff(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "diff", *map(str, arguments)])


def lines(result):
    return [" ".join(line.split()) for line in result.output.splitlines()]


def check_agrees(result, resume):
    """Check that the command refuses if and only if the resume does, with the same reason."""
    try:
        resume()
    except EnergonExtError as error:
        assert result.exit_code == 1, result.output
        assert lines(result)[-1] == f"refused: {' '.join(str(error).split())}"
        return False
    assert result.exit_code == 0, result.output
    assert lines(result)[-1].startswith("can resume on")
    return True


# Planned runs -------------------------------------------------------------------------------------


def test_every_source_is_kept_new_moved_or_retained(data):
    saved, cursor = save_planned_run(data)
    write_tokens(data / "extra", [[1] * 20] * 10)
    (data / "later").mkdir()
    entries = [("../extra", 1), ("../book", 5)]
    mix = write_mix(data / "later" / "mix.yaml", entries)
    result = diff(saved, mix)
    assert result.exit_code == 0, result.output
    found = lines(result)
    assert found[0].endswith("iter_0000006: saved after 6 rows")
    drawn = {k: s["tokens"] for k, s in cursor["plan"]["sources"].items()}
    documents = {k: s["documents"] for k, s in cursor["plan"]["sources"].items()}
    assert sum(drawn.values()) > 100
    by_source = {line.split()[0]: line for line in found[2:5]}
    share = {key: f"{tokens / sum(drawn.values()):.2%}" for key, tokens in drawn.items()}
    # Weights 5 and 1 are 83.33 % and 16.67 % of the next rows.
    assert by_source == {
        "../book": f"../book moved (was book) {documents['book']} {drawn['book']} "
        f"{share['book']} 83.33%",
        "../extra": "../extra new 0 0 0.00% 16.67%",
        "math": f"math retained {documents['math']} {drawn['math']} {share['math']} 0.00%",
    }
    assert found[5].startswith("must stay: seed=0, tokenizer={")
    assert found[6].startswith("may change: alignment=1, ") and "seq_len=32" in found[6]
    assert found[7] == "can resume on any number of ranks and workers"
    resumed = new_loader(mix, rows_per_step=2)
    resumed.load_state_dict(cursor)
    assert [str(change.change) for change in resumed.changes] == ["moved", "new", "retained"]


def test_a_resume_reports_the_same_and_a_moved_source_continues(data, caplog):
    saved, cursor = save_planned_run(data)
    (data / "later").mkdir()
    moved = new_loader(write_mix(data / "later" / "mix.yaml", [("../book", 1)]), rows_per_step=2)
    with caplog.at_level(logging.INFO, "energon_ext"):
        moved.load_state_dict(cursor)
    changes = {change.key: change.to_json() for change in moved.changes}
    assert changes["../book"]["change"] == "moved" and changes["../book"]["saved_key"] == "book"
    assert changes["math"]["change"] == "retained"
    assert caplog.text.count("../book: moved, was book, ") == 1
    # The same documents in the same order as without the move.
    unmoved = new_loader(write_mix(data / "unmoved.yaml", [("book", 1)]), rows_per_step=2)
    unmoved.load_state_dict(cursor)
    for one, other in zip(take(moved, 6), take(unmoved, 6)):
        assert one.tokens.equal(other.tokens)


@pytest.mark.parametrize(
    ("batches", "options", "possible"),
    [
        (6, {}, True),
        (6, {"ranks": 2, "workers": 3}, True),
        (5, {}, True),  # inside a step
        (5, {"workers": 2}, True),
        (5, {"ranks": 2}, False),
        (6, {"seq_len": 64}, True),
        (6, {"packing": "sequential"}, True),
        (5, {"seq_len": 64}, False),
    ],
)
def test_diff_agrees_with_the_resume_of_a_planned_run(data, batches, options, possible):
    saved, cursor = save_planned_run(data, batches)
    names = {"ranks": "world-size", "workers": "num-workers", "seq_len": "seq-length"}
    arguments = [x for k, v in options.items() for x in (f"--{names.get(k, k)}", v)]
    result = diff(saved, data / "mix.yaml", *arguments)
    next_run = new_loader(data / "mix.yaml", rows_per_step=2, **options)
    assert check_agrees(result, lambda: next_run.load_state_dict(cursor)) is possible
    is_repacked = "Rows are packed differently from here on: " in result.output
    assert is_repacked is (possible and not {"seq_len", "packing"}.isdisjoint(options))


def test_diff_accepts_a_balanced_run_inside_a_step(data):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8, balance="attention")
    saved, cursor = save_planned_run(data, 5, encoder=encoder)
    resumed = new_loader(data / "mix.yaml", encoder=encoder, rows_per_step=2)
    result = diff(saved, data / "mix.yaml")
    assert check_agrees(result, lambda: resumed.load_state_dict(cursor)) is True


def change_documents(data):
    write_tokens(data / "book", [[5, 6, 7, 8] * 6] * 39)
    return write_mix(data / "next.yaml", [("book", 1), ("math", 1)])


def drop_a_source(data):
    return write_mix(data / "next.yaml", [("book", 1)])


@pytest.mark.parametrize(("change", "possible"), [(change_documents, False), (drop_a_source, True)])
def test_diff_detects_changed_sources(data, change, possible):
    saved, cursor = save_planned_run(data)
    mix = change(data)
    next_run = new_loader(mix, rows_per_step=2)
    result = diff(saved, mix)
    assert check_agrees(result, lambda: next_run.load_state_dict(cursor)) is possible


def test_a_refusal_names_the_source_and_the_change(data):
    saved, _ = save_planned_run(data)
    result = diff(saved, change_documents(data))
    assert "book: tokens: saved 960, now 936" in lines(result)[-1]


def test_a_special_token_without_its_tokenizer_is_refused(data):
    saved, _ = save_planned_run(data)
    line = error_line(energon_ext("checkpoint", "diff", saved, data / "mix.yaml", "--eos-token", 1))
    assert line == "--eos-token: is for --tokenizer; give both."


def test_the_next_run_is_planned_with_the_saved_options(data):
    encoder = PackedTaskEncoder(ByteTokenizer(), 64, alignment=4, packing_carry=0.5)
    saved, _ = save_planned_run(data, encoder=encoder)
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert "alignment=4" in result.output and "'carry': 0.5" in result.output
    assert "task_encoder" not in result.output


def test_an_extra_fingerprint_field_must_stay(data):
    class Marked(PackedTaskEncoder):
        def state_fingerprint(self):
            return {**super().state_fingerprint(), "marks": [1, 2]}

    saved, _ = save_planned_run(data, encoder=Marked(ByteTokenizer(), 32))
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 0 and "marks=[1, 2]" in result.output
    options = ("--encoder", "tests.cli.test_checkpoint:unmarked")
    result = diff(saved, data / "mix.yaml", *options)
    assert result.exit_code == 1 and "marks: saved [1, 2], now None" in result.output


def unmarked():
    return PackedTaskEncoder(ByteTokenizer(), 32)


def test_spliced_documents_are_restored_too(data):
    splice = MultiSpliceConfig(num_docs=2, content_length=8, dataset_name="book")
    encoder = MultiSpliceTaskEncoder(ByteTokenizer(), 32, splice)
    saved, _ = save_planned_run(data, encoder=encoder)
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert {line.split()[0] for line in lines(result)[2:4]} == {"book", "math"}
    write_tokens(data / "math", [[5] * 24] * 39)
    assert "math: tokens: saved 960, now 936" in diff(saved, data / "mix.yaml").output


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_megatron_lm_checkpoints_are_read(data, ranks):
    """For a planned run the file of any rank is enough."""
    mix = write_mix(data / "mix.yaml", [("book", 1), ("math", 1)])
    folder = data / "data" / "iter_0000003" / "mp_rank_00_000"
    folder.mkdir(parents=True)
    for rank in ranks:
        loader = new_loader(mix, rank=rank, ranks=2, rows_per_step=2)
        take(loader, 3)
        state = {"dataloader_state_dict": loader.save_state_rank()}
        torch.save(state, folder / f"train_dataloader_dprank{rank:03d}.pt")
    result = diff(data / "data", mix, "--world-size", 1, "--num-workers", 2)
    assert result.exit_code == 0, result.output
    assert lines(result)[0].endswith("saved after 6 rows")
    assert lines(result)[-1] == "can resume on any number of ranks and workers"


def test_diff_uses_the_newest_checkpoint_in_a_run_folder(data):
    loader = new_loader(write_mix(data / "mix.yaml", [("book", 1)]), rows_per_step=2)
    for step in (1, 2):
        take(loader, 2)
        save_cursor(data / "run" / "checkpoints", step, loader.state_dict())
    result = diff(data / "run", data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert lines(result)[0].endswith("checkpoints/iter_0000002: saved after 4 rows")


# Files without a cursor ---------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{"row": 3}, [1, 2], "text", 7])
def test_a_file_without_a_cursor_is_refused(data, content):
    saved, _ = save_planned_run(data)
    write_file(saved / "iter_0000006" / "data.json", json.dumps(content).encode())
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 2 and "data state" in result.output


def test_a_damaged_file_is_named(data):
    saved, _ = save_planned_run(data)
    file = saved / "iter_0000006" / "data.json"
    file.write_bytes(file.read_bytes()[:-10])
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 2 and "data.json: is damaged" in result.output


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "does not exist"), ("", "no data.json of a planned run")]
)
def test_a_folder_without_data_states_is_named(data, name, message):
    mix = write_mix(data / "mix.yaml", [("book", 1)])
    result = diff(data / name, mix)
    assert result.exit_code == 2 and message in result.output


def test_a_changed_breakpoint_unit_is_reported(data):
    run, _ = save_planned_run(data)
    mix = data / "mix.yaml"
    mix.write_text(json.dumps({**json.loads(mix.read_text()), "schedule_axis": "tokens"}))
    expected = "schedule_axis: breakpoints counted steps; from here on they count tokens."
    assert expected in lines(diff(run, mix))


@pytest.mark.parametrize(
    ("batches", "steps"),
    [(6, "3 steps of 2 rows"), (5, "2 steps of 2 rows, 1 rows of the next step, on 1 rank(s)")],
)
def test_show_needs_no_data_files(data, batches, steps):
    run, cursor = save_planned_run(data, batches=batches)
    for path in data.glob("*.bin"):
        path.unlink()
    result = CliRunner().invoke(main, ["checkpoint", "show", str(run)])
    head, digests, axis, options, _, *sources = lines(result)
    assert re.fullmatch("data digest [0-9a-f]{16}, state digest [0-9a-f]{16}", digests)
    assert head.endswith(steps) and axis == "breakpoints count steps" and "seq_len=32" in options
    read = {key: source["tokens"] for key, source in cursor["plan"]["sources"].items()}
    assert {line.split()[0]: int(line.split()[2]) for line in sources} == read
    assert sum(read.values()) == batches // 2 * 2 * 24  # one document per row, whole steps only
