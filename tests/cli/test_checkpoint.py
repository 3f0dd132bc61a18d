# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint diff`` says what a resume does, and a resume does what it says."""

import logging

import pytest
import torch
from click.testing import CliRunner
from megatron.energon import DefaultTaskEncoder
from megatron.energon import get_train_dataset as stock_train_dataset

from energon_ext import DynamicBlendMixin, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.cli.main import main
from energon_ext.encoders.splice import MultiSpliceTaskEncoder
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.errors import EnergonExtError
from energon_ext.splice import MultiSpliceConfig
from energon_ext.state.checkpoint_folder import write_state
from energon_ext.state.plain import to_plain
from tests.rl.prompts import prompt_loader, write_sums
from tests.saves import newest_cursor, save_cursor, save_states
from tests.support import (
    close_loaders,
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)


class PlainEncoder(DynamicBlendMixin, DefaultTaskEncoder):
    """Energon's order: buffers lie behind the draw."""


@pytest.fixture
def data(tmp_path):
    for name in ("web", "code"):
        write_dataset(tmp_path / name, [f"{name} {number}" for number in range(40)])
    for name in ("book", "math"):
        write_tokens(tmp_path / name, [[5, 6, 7, 8] * 6] * 40)
    return tmp_path


def new_loader(mix, *, encoder=None, seq_len=32, packing="bin", rank=0, ranks=1, **options):
    encoder = encoder or PackedTaskEncoder(
        ByteTokenizer(), seq_len, packing=packing, packing_buffer_docs=8
    )
    loader_options = {k: options.pop(k) for k in ("save_every",) if k in options}
    dataset = get_train_dataset(
        mix,
        worker_config=config(options.pop("workers", 0), rank, ranks),
        batch_size=options.pop("batch_size", 1),
        task_encoder=encoder,
        **options,
    )
    return loader_for(dataset, **loader_options)


def planned_run(data, batches=6, entries=(("book", 1), ("math", 1)), **options):
    """A run folder with the cursor of a planned run, two rows a step."""
    loader = new_loader(write_mix(data / "mix.yaml", entries), rows_per_step=2, **options)
    take(loader, batches)
    save_cursor(data / "run", batches, loader.state_dict())
    return data / "run"


def streamed_run(data, batches=6, entries=(("web", 1), ("book", 1)), ranks=1, **options):
    """A run folder with the states of all ranks, and these states."""
    mix = write_mix(data / "mix.yaml", entries)
    states = []
    for rank in range(ranks):
        loader = new_loader(mix, rank=rank, ranks=ranks, **options)
        take(loader, batches)
        states.append(loader.save_state_rank())
    close_loaders()
    save_states(data / "run", batches, *states)
    return data / "run", states


def save_as_megatron_lm(state, folder, rank=0):
    saved = {"dataloader_state_dict": to_plain(state)}
    torch.save(saved, folder / f"train_dataloader_dprank{rank:03d}.pt")


def diff(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "diff", *map(str, arguments)])


def lines(result):
    return [" ".join(line.split()) for line in result.output.splitlines()]


def check_agrees(result, resume):
    """That the command refuses exactly where the resume does, for the same reason."""
    try:
        resume()
    except EnergonExtError as error:
        assert result.exit_code == 1, result.output
        assert lines(result)[-1] == f"refused: {' '.join(str(error).split())}"
        return False
    assert result.exit_code == 0, result.output
    assert lines(result)[-1].startswith("possible")
    return True


# Planned runs -------------------------------------------------------------------------------------


def test_every_source_is_kept_new_moved_or_retained(data):
    saved = planned_run(data)
    write_tokens(data / "extra", [[1] * 20] * 10)
    (data / "later").mkdir()
    entries = [("../extra", 1), ("../book", 5)]
    mix = write_mix(data / "later" / "mix.yaml", entries)
    result = diff(saved, mix)
    assert result.exit_code == 0, result.output
    found = lines(result)
    assert found[0].endswith("iter_0000006: planned, after 6 rows")
    cursor = newest_cursor(saved)
    drawn = {k: s["tokens"] for k, s in cursor["plan"]["sources"].items()}
    documents = {k: s["documents"] for k, s in cursor["plan"]["sources"].items()}
    assert sum(drawn.values()) > 100
    by_source = {line.split()[0]: line for line in found[2:5]}
    assert by_source == {
        "../book": f"../book moved (was book) {documents['book']} {drawn['book']}",
        "../extra": "../extra new 0 0",
        "math": f"math retained {documents['math']} {drawn['math']}",
    }
    assert found[5].startswith("must stay: alignment=1, ") and "seq_len=32" in found[5]
    assert found[6] == "possible on any number of ranks and workers"
    resumed = new_loader(mix, rows_per_step=2)
    resumed.load_state_dict(cursor)
    assert [str(change.change) for change in resumed.changes] == ["moved", "new", "retained"]


def test_a_resume_says_the_same_and_a_moved_source_goes_on_where_it_was(data, caplog):
    saved = planned_run(data)
    (data / "later").mkdir()
    cursor = newest_cursor(saved)
    moved = new_loader(write_mix(data / "later" / "mix.yaml", [("../book", 1)]), rows_per_step=2)
    with caplog.at_level(logging.INFO, "energon_ext"):
        moved.load_state_dict(cursor)
    changes = {change.key: change.to_json() for change in moved.changes}
    assert changes["../book"]["change"] == "moved" and changes["../book"]["saved_key"] == "book"
    assert changes["math"]["change"] == "retained"
    assert caplog.text.count("../book: moved, was book, ") == 1
    # The same documents in the same order as without the move.
    beside = new_loader(write_mix(data / "beside.yaml", [("book", 1)]), rows_per_step=2)
    beside.load_state_dict(cursor)
    for one, other in zip(take(moved, 6), take(beside, 6)):
        assert one.tokens.equal(other.tokens)


@pytest.mark.parametrize(
    ("batches", "options", "possible"),
    [
        (6, {}, True),
        (6, {"ranks": 2, "workers": 3}, True),
        (5, {}, True),  # inside a step
        (5, {"workers": 2}, True),
        (5, {"ranks": 2}, False),
        (6, {"seq_len": 64}, False),
        (6, {"packing": "sequential"}, False),
    ],
)
def test_a_planned_run_is_possible_where_its_resume_is(data, batches, options, possible):
    saved = planned_run(data, batches)
    cursor = newest_cursor(saved)
    names = {"ranks": "world-size", "workers": "num-workers", "seq_len": "seq-length"}
    arguments = [x for k, v in options.items() for x in (f"--{names.get(k, k)}", v)]
    result = diff(saved, data / "mix.yaml", *arguments)
    next_run = new_loader(data / "mix.yaml", rows_per_step=2, **options)
    assert check_agrees(result, lambda: next_run.load_state_dict(cursor)) is possible


def test_a_balanced_run_is_possible_inside_a_step_too(data):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8, balance="attention")
    mix = write_mix(data / "mix.yaml", [("book", 1), ("math", 1)])
    loader = new_loader(mix, encoder=encoder, rows_per_step=2)
    take(loader, 5)
    cursor = loader.state_dict()
    save_cursor(data / "run", 5, cursor)
    resumed = new_loader(mix, encoder=encoder, rows_per_step=2)
    assert check_agrees(diff(data / "run", mix), lambda: resumed.load_state_dict(cursor)) is True


def change_documents(data):
    write_tokens(data / "book", [[5, 6, 7, 8] * 6] * 39)
    return write_mix(data / "next.yaml", [("book", 1), ("math", 1)])


def add_text(data):
    return write_mix(data / "next.yaml", [("book", 1), ("math", 1), ("web", 1)])


def drop_a_source(data):
    return write_mix(data / "next.yaml", [("book", 1)])


@pytest.mark.parametrize(
    ("change", "possible"), [(change_documents, False), (add_text, False), (drop_a_source, True)]
)
def test_what_has_changed_under_a_planned_run_is_seen(data, change, possible):
    saved = planned_run(data)
    mix = change(data)
    cursor = newest_cursor(saved)
    next_run = new_loader(mix, rows_per_step=2)
    result = diff(saved, mix)
    assert check_agrees(result, lambda: next_run.load_state_dict(cursor)) is possible


def test_the_sources_are_listed_before_a_refusal(data):
    saved = planned_run(data)
    result = diff(saved, change_documents(data))
    assert lines(result)[2].startswith("book kept ")
    assert "book: tokens: saved 960, now 936" in lines(result)[-1]


def test_an_encoder_of_the_user_is_what_the_state_says(data):
    """Whatever it is called and whatever it adds to the fingerprint."""

    class Marked(PackedTaskEncoder):
        def state_fingerprint(self):
            return {**super().state_fingerprint(), "marks": [1, 2]}

    saved = planned_run(data, encoder=Marked(ByteTokenizer(), 64, alignment=4, packing_carry=0.5))
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert "marks=[1, 2]" in result.output and "task_encoder" not in result.output


def test_spliced_documents_are_compared_by_name_only(data):
    splice = MultiSpliceConfig(num_docs=2, content_length=8, dataset_name="book")
    encoder = MultiSpliceTaskEncoder(ByteTokenizer(), 32, splice)
    saved = planned_run(data, encoder=encoder)
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert {line.split()[0] for line in lines(result)[2:4]} == {"book", "math"}
    # Those that are not spliced are restored as ever.
    write_tokens(data / "math", [[5] * 24] * 39)
    assert "math: tokens: saved 960, now 936" in diff(saved, data / "mix.yaml").output


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_the_files_of_megatron_lm_are_read(data, ranks):
    """Of a planned run that of any rank is enough."""
    mix = write_mix(data / "mix.yaml", [("book", 1), ("math", 1)])
    folder = data / "data" / "iter_0000003" / "mp_rank_00_000"
    folder.mkdir(parents=True)
    for rank in ranks:
        loader = new_loader(mix, rank=rank, ranks=2, rows_per_step=2)
        take(loader, 3)
        save_as_megatron_lm(loader.save_state_rank(), folder, rank)
    result = diff(data / "data", mix, "--world-size", 4, "--num-workers", 2)
    assert result.exit_code == 0, result.output
    assert lines(result)[0].endswith("planned, after 6 rows")
    assert lines(result)[-1] == "possible on any number of ranks and workers"


def test_the_newest_checkpoint_in_the_folder_of_a_run_is_the_one_that_is_looked_at(data):
    loader = new_loader(write_mix(data / "mix.yaml", [("book", 1)]), rows_per_step=2)
    for step in (1, 2):  # of a batch each, one row of one rank
        take(loader, 2)
        save_cursor(data / "run" / "checkpoints", step, loader.state_dict())
    result = diff(data / "run", data / "mix.yaml")
    assert result.exit_code == 0, result.output
    assert lines(result)[0].endswith("checkpoints/iter_0000002: planned, after 4 rows")


def test_the_newest_iteration_of_megatron_lm_is_the_one_that_is_looked_at(data):
    loader = new_loader(write_mix(data / "mix.yaml", [("book", 1)]), rows_per_step=2)
    for iteration in (1, 2):
        folder = data / "saved" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        take(loader, 2)
        save_as_megatron_lm(loader.save_state_rank(), folder)
    result = diff(data / "saved", data / "mix.yaml")
    assert lines(result)[0].endswith("iter_0000002: planned, after 4 rows")


def test_files_of_different_steps_are_refused(data):
    mix = write_mix(data / "mix.yaml", [("book", 1)])
    (data / "data").mkdir()
    states = []
    for rank, batches in enumerate((3, 4)):
        loader = new_loader(mix, rank=rank, ranks=2, rows_per_step=2)
        take(loader, batches)
        states.append(loader.save_state_rank())
        write_state(data / "data" / f"data_rank{rank:05d}.json", states[-1])
    next_run = new_loader(mix, rank=0, ranks=2, rows_per_step=2)
    assert not check_agrees(diff(data / "data", mix), lambda: next_run.restore_states(states))


# Streamed runs ------------------------------------------------------------------------------------


def resume_all_ranks(mix, states, ranks, **options):
    for rank in range(ranks):
        new_loader(mix, rank=rank, ranks=ranks, **options).restore_states(states)


@pytest.mark.parametrize(
    ("saved_as", "next_as", "possible"),
    [
        ((1, 2, 6), (1, 2), True),
        ((1, 2, 6), (2, 1), True),
        ((1, 2, 6), (2, 0), True),
        ((1, 2, 6), (1, 3), False),
        ((1, 2, 6), (2, 2), False),
        ((1, 2, 5), (1, 2), True),
        ((1, 2, 5), (2, 1), False),  # between two workers
        ((2, 1, 4), (1, 2), True),
        ((2, 1, 4), (4, 0), False),
    ],
)
def test_a_streamed_run_is_possible_where_its_resume_is(data, saved_as, next_as, possible):
    ranks, workers, batches = saved_as
    saved, states = streamed_run(data, batches, ranks=ranks, workers=workers)
    mix = data / "mix.yaml"
    ranks, workers = next_as
    result = diff(saved, mix, "--world-size", ranks, "--num-workers", workers)
    agreed = check_agrees(result, lambda: resume_all_ranks(mix, states, ranks, workers=workers))
    assert agreed is possible
    if possible:
        assert lines(result)[-1] == (
            "possible on 2 workers in all (ranks x workers); text was not restored, for want of "
            "--tokenizer"
        )


@pytest.mark.parametrize(("batches", "possible"), [(6, True), (7, False)])
def test_a_state_that_lags_behind_its_batches_stays_where_it_is(data, batches, possible):
    """Saved off the interval, it makes some batches again; no other worker can."""
    saved, states = streamed_run(data, batches, workers=2, save_every=6)
    mix = data / "mix.yaml"
    assert diff(saved, mix).exit_code == 0
    result = diff(saved, mix, "--world-size", 2, "--num-workers", 1)
    resume = check_agrees(result, lambda: resume_all_ranks(mix, states, 2, workers=1))
    assert resume is possible


@pytest.mark.parametrize(("batches", "possible"), [(5, True), (7, False)])
def test_virtual_epochs_are_looked_at(data, batches, possible):
    saved, states = streamed_run(data, batches, workers=2, virtual_epoch_length=8)
    mix = data / "mix.yaml"
    next_run = new_loader(mix, workers=2, virtual_epoch_length=8)
    result = diff(saved, mix)
    assert check_agrees(result, lambda: next_run.restore_states(states)) is possible


def test_with_a_tokenizer_text_is_restored_as_well(data):
    saved, _ = streamed_run(data, 6, ranks=2, workers=1, shuffle_buffer_size=5)
    result = diff(saved, data / "mix.yaml", "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    assert lines(result)[-1] == "possible on 2 workers in all (ranks x workers)"
    changed = diff(saved, data / "mix.yaml", "--tokenizer", "bytes", "--seq-length", 64)
    assert lines(changed)[-1].startswith("refused: ") and "seq_len: saved 32, now 64" in (
        changed.output
    )


def test_what_was_read_is_summed_over_ranks_and_workers(data):
    read, states = 0, []
    mix = write_mix(data / "mix.yaml", [("book", 1), ("web", 1)])
    for rank in (0, 1):
        loader = new_loader(mix, workers=2, rank=rank, ranks=2)
        read += sum(batch.tokens_per_source().get("book", 0) for batch in take(loader, 5))
        states.append(loader.save_state_rank())
    save_states(data / "run", 5, *states)
    result = diff(data / "run", mix)
    assert lines(result)[0].endswith("2 rank(s) with 2 worker(s)")
    assert lines(result)[2].split()[:2] == ["book", "kept"]
    assert lines(result)[2].endswith(f" {read:,}")


def test_the_state_of_a_rank_that_is_missing_is_named(data):
    saved, _ = streamed_run(data, 4, ranks=2)
    (saved / "iter_0000004" / "data_rank00000.json").unlink()
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 1
    assert lines(result)[-1] == "refused: The states of all ranks are needed, [1] found."


def test_prompts_of_reinforcement_learning_are_looked_at(data):
    mix = write_sums(data)
    loader = prompt_loader(mix)
    take(loader, 2)
    save_states(data / "run", 2, {"prompts": loader.save_state_rank(), "calls": 2})
    result = diff(data / "run", mix)
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in lines(result)[2:4]] == [
        ["easy.jsonl", "kept"],
        ["hard.jsonl", "kept"],
    ]
    assert sum(int(line.split()[2]) for line in lines(result)[2:4]) == 4


# What is no state of ours -------------------------------------------------------------------------


def test_a_stock_checkpoint_is_refused_with_the_way_over(data):
    dataset = stock_train_dataset(
        data / "web",
        worker_config=config(),
        batch_size=2,
        shuffle_buffer_size=5,
        max_samples_per_sequence=None,
    )
    loader = loader_for(dataset)
    take(loader, 3)
    (data / "stock").mkdir()
    save_as_megatron_lm(loader.save_state_rank(), data / "stock")
    mix = write_mix(data / "mix.yaml", [("web", 1)])
    result = diff(data / "stock", mix)
    assert result.exit_code == 1
    assert "refused" in result.output and "subset: {range: [ROW, end]}" in result.output
    with pytest.raises(StateMismatchError, match="Finish that run with stock"):
        new_loader(mix, batch_size=2).restore_states([loader.save_state_rank()])


def test_a_source_with_samples_behind_the_draw_cannot_leave(data):
    def plain(entries):
        mix = write_mix(data / "plain.yaml", entries)
        return new_loader(mix, encoder=PlainEncoder(), shuffle_buffer_size=20)

    loader = plain([("web", 1), ("code", 1)])
    take(loader, 3)
    state = loader.save_state_rank()
    save_states(data / "plain_run", 3, state)
    without = plain([("web", 1)])
    result = diff(data / "plain_run", data / "plain.yaml")
    assert "samples of code:train in buffers" in result.output
    assert "`weight: 0`" in result.output
    assert not check_agrees(result, lambda: without.restore_state_rank(state))
    kept = plain([("web", 1), ("code", 0)])
    assert check_agrees(
        diff(data / "plain_run", data / "plain.yaml"), lambda: kept.restore_state_rank(state)
    )
    take(kept, 3)


@pytest.mark.parametrize("content", [{"row": 3}, [1, 2], "text", 7])
def test_a_file_that_holds_no_cursor_is_refused(data, content):
    mix = write_mix(data / "mix.yaml", [("book", 1)])
    save_cursor(data / "run", 3, content)
    result = diff(data / "run", mix)
    assert result.exit_code == 2
    assert "data.json: " in result.output and "data state" in result.output


def test_a_damaged_file_is_named(data):
    saved = planned_run(data)
    file = saved / "iter_0000006" / "data.json"
    file.write_bytes(file.read_bytes()[:-10])
    result = diff(saved, data / "mix.yaml")
    assert result.exit_code == 2 and "data.json is damaged" in result.output


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "no such folder"), ("web", "no data.json, data_rank00000.json or train_data")],
)
def test_a_folder_without_data_states_is_named(data, name, message):
    mix = write_mix(data / "mix.yaml", [("web", 1)])
    result = diff(data / name, mix)
    assert result.exit_code == 2 and message in result.output
