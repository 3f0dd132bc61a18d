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
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.state.checkpoint import CheckpointStore
from tests.support import config, loader_for, take, write_dataset, write_mix, write_tokens


class PlainEncoder(DynamicBlendMixin, DefaultTaskEncoder):
    """Energon's order: buffers lie behind the choice."""


@pytest.fixture
def data(tmp_path):
    for name in ("web", "code"):
        write_dataset(tmp_path / name, [f"{name} {number}" for number in range(40)])
    write_tokens(tmp_path / "book", [[5, 6, 7, 8] * 6] * 40)
    return tmp_path


def packed(mix, seq_len=32, **options):
    encoder = PackedTaskEncoder(ByteTokenizer(), seq_len, packing_buffer_docs=8)
    return loader_for(
        get_train_dataset(mix, worker_config=config(**options), batch_size=1, task_encoder=encoder)
    )


@pytest.fixture
def saved(data):
    """A checkpoint after ten batches of web, code and book, and its loader."""
    mix = write_mix(data / "mix.yaml", [("web", 1), ("code", 1), ("book", 1)])
    loader = packed(mix)
    take(loader, 10)
    with CheckpointStore(data / "run") as store:
        store.save(10, {"data_rank00000.pt": loader.save_state_rank()}, metadata={})
    return data / "run"


def diff(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "diff", *map(str, arguments)])


def lines(result):
    return [" ".join(line.split()) for line in result.output.splitlines()]


def test_every_source_is_kept_new_moved_or_parked(saved, data):
    (data / "later").mkdir()
    write_dataset(data / "math", ["1 + 1 = 2"] * 5)
    mix = write_mix(data / "later" / "mix.yaml", [("../math", 1), ("../web", 5), ("../book", 1)])
    result = diff(saved, mix)
    assert result.exit_code == 0, result.output
    found = lines(result)
    assert found[0].endswith("step_00000010: 1 rank(s) with 0 worker(s)")
    first_words = {line.split()[0]: line for line in found[2:6]}
    assert first_words["../math:train"] == "../math:train new 0 0 possible"
    assert first_words["../web:train"].startswith("../web:train moved (was web:train) ")
    assert first_words["../web:train"].endswith(" not possible")
    assert first_words["../book"].endswith(" possible")
    assert first_words["code:train"].startswith("code:train parked ")
    assert "seq_len=32" in found[6]


def test_a_resume_reports_the_same_and_a_moved_source_goes_on_where_it_was(saved, data, caplog):
    (data / "later").mkdir()
    mix = write_mix(data / "later" / "mix.yaml", [("../web", 1)])
    alone = packed(mix)
    state = CheckpointStore(saved).latest().load("data_rank00000.pt")
    with caplog.at_level(logging.INFO, "energon_ext"):
        alone.restore_state_rank(state)
    changes = {change.key: change.to_json() for change in alone.changes}
    assert changes["../web:train"]["change"] == "moved"
    assert changes["../web:train"]["saved_key"] == "web:train"
    assert changes["code:train"]["change"] == changes["book"]["change"] == "parked"
    assert caplog.text.count("../web:train: moved, was web:train, ") == 1
    # The same documents in the same order as without the move.
    beside = packed(write_mix(data / "beside.yaml", [("web", 1)]))
    beside.restore_state_rank(state)
    for one, other in zip(take(alone, 6), take(beside, 6)):
        assert one.tokens.equal(other.tokens)


def test_other_workers_are_refused_for_text_and_fine_for_token_files(saved, data):
    mix = write_mix(data / "book.yaml", [("book", 1)])
    assert diff(saved, mix, "--num-workers", 2).exit_code == 1  # text sources wait, parked
    loader = packed(mix)
    take(loader, 3)
    with CheckpointStore(data / "book_run") as store:
        store.save(3, {"data_rank00000.pt": loader.save_state_rank()}, metadata={})
    assert diff(data / "book_run", mix, "--num-workers", 2, "--world-size", 3).exit_code == 0
    result = diff(saved, data / "mix.yaml", "--world-size", 2)
    assert result.exit_code == 1
    assert "refused: 1 x 0 became 2 x 0 ranks x workers, and text sources" in result.output


def test_what_was_read_is_summed_over_ranks_and_workers(data):
    mix = write_mix(data / "book.yaml", [("book", 1)])
    read, states = 0, {}
    for rank in (0, 1):
        loader = packed(mix, num_workers=2, rank=rank, world_size=2)
        read += sum(batch.tokens_per_source()["book"] for batch in take(loader, 5))
        states[f"data_rank{rank:05d}.pt"] = loader.save_state_rank()
    with CheckpointStore(data / "run") as store:
        store.save(5, states, metadata={})
    result = diff(data / "run", mix)
    assert lines(result)[0].endswith("2 rank(s) with 2 worker(s)")
    assert lines(result)[2].split()[:2] == ["book", "kept"] and f" {read:,} " in lines(result)[2]


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
    torch.save(loader.save_state_rank(), data / "stock" / "data_rank00000.pt")
    mix = write_mix(data / "mix.yaml", [("web", 1)])
    result = diff(data / "stock", mix)
    assert result.exit_code == 1
    assert "refused" in result.output and "subset: {range: [ROW, end]}" in result.output
    with pytest.raises(StateMismatchError, match="Finish that run with stock"):
        packed(mix).restore_state_rank(loader.save_state_rank())


def test_a_source_with_samples_behind_the_choice_cannot_be_parked(data):
    def plain(entries):
        mix = write_mix(data / "plain.yaml", entries)
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(),
                batch_size=1,
                task_encoder=PlainEncoder(),
                shuffle_buffer_size=20,
            )
        )

    loader = plain([("web", 1), ("code", 1)])
    take(loader, 3)
    state = loader.save_state_rank()
    (data / "plain_run").mkdir()
    torch.save(state, data / "plain_run" / "data_rank00000.pt")
    without = plain([("web", 1)])
    with pytest.raises(StateMismatchError, match="samples of code:train in buffers.*weight: 0"):
        without.restore_state_rank(state)
    assert (
        "samples of code:train in buffers" in diff(data / "plain_run", data / "plain.yaml").output
    )
    kept = plain([("web", 1), ("code", 0)])
    kept.restore_state_rank(state)
    take(kept, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "no such folder"), ("web", "data states of the ranks [] found")],
)
def test_a_folder_without_data_states_is_named(data, name, message):
    mix = write_mix(data / "mix.yaml", [("web", 1)])
    result = diff(data / name, mix)
    assert result.exit_code == 2 and message in result.output
