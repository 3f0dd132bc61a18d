# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The losses of documents, against documents that are read alone."""

import dataclasses
import json
import resource
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from energon_ext import ConfigError, PackedTaskEncoder, SFTTaskEncoder
from energon_ext import get_train_dataset as open_dataset
from energon_ext.errors import SampleError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.losses import document_losses
from energon_ext.megatron import make_loss_func, mean_losses, slice_for_context_parallel
from energon_ext.metrics.document_losses import (
    RECORD,
    DocumentLosses,
    DocumentLossFile,
    begin_folder,
)
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.megatron.conftest import one_rank as one_rank
from tests.support import config, write_mix, write_tokens
from tests.test_document_losses import SEQ_LEN, documents, log_probs, weights_of
from tests.test_document_losses import data as data


def encoder_of(numbers=True, **options):
    options = {"mask_boundary_loss": True, "document_numbers": numbers, **options}
    return PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, **options)


def loader_of(path, encoder, rank=0, ranks=1, rows=1, workers=0, **options):
    return ExactDataLoader(
        open_dataset(
            path,
            worker_config=config(workers, rank, ranks),
            batch_size=rows,
            task_encoder=encoder,
            **options,
        )
    )


def losses_in(batch):
    """Return what the loss of a step finds of the documents of a micro-batch."""
    found = log_probs(batch.tokens.numpy(), batch.labels.numpy())
    return document_losses(batch, torch.from_numpy(found))


def alone(has_weights=False):
    """Return sum and number of the trained labels of each document that has some, read alone."""
    sums = {}
    for number, tokens in enumerate(documents()):
        weights = weights_of(number, len(tokens)) if has_weights else np.ones(len(tokens))
        trained = weights[1:] != 0
        losses = -log_probs(tokens[:-1], tokens[1:])
        if trained.any():
            sums[number] = pytest.approx(losses[trained].sum()), int(trained.sum())
    return sums


def sums_of(run_dir, **options):
    """Return the sum of the loss, and the labels, of each document that a run wrote."""
    found = DocumentLosses(run_dir, **options).highest(10**6)
    return {each.document: (each.mean * each.tokens, each.tokens) for each in found}


def write_epoch(path, run_dir, encoder, ranks=1, rows=1, size=1, accumulated=2):
    """Read an epoch on some data- and context-parallel ranks, and write its losses."""
    folder = begin_folder(run_dir, 0)
    for rank in range(ranks):
        batches = [*loader_of(path, encoder, rank, ranks, rows, repeat=False)]
        for part in range(size):
            with DocumentLossFile(folder, rank * size + part) as file:
                for step, first in enumerate(range(0, len(batches), accumulated), 1):
                    found = batches[first : first + accumulated]
                    if size > 1:
                        found = [slice_for_context_parallel(each, size, part) for each in found]
                    file.add(step, found[0].sources, list(map(losses_in, found)))


@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 2), (1, 3)])
def test_cut_documents_have_the_loss_that_they_have_alone(data, packing, ranks, rows, tmp_path):
    path, has_weights = data
    write_epoch(path, tmp_path, encoder_of(packing=packing), ranks, rows)
    assert sums_of(tmp_path) == alone(has_weights)


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_write_parts_that_add_up(data, size, tmp_path):
    path, has_weights = data
    write_epoch(path, tmp_path, encoder_of(alignment=2 * size), ranks=2, size=size)
    assert sums_of(tmp_path) == alone(has_weights)
    files = [*tmp_path.glob("document_losses/*/rank-*.bin")]
    assert len(files) == 2 * size


def test_visits_and_steps_of_a_document_are_counted(tmp_path):
    path = write_mix(tmp_path / "mix.yaml", [(write_tokens(tmp_path / "web", [[5] * 16] * 3), 1)])
    batches = iter(loader_of(path, encoder_of()))
    with DocumentLossFile(begin_folder(tmp_path, 0), 0) as file:
        numbers = []
        for step in range(1, 8):  # a document per step: two epochs and one more document
            batch = next(batches)
            numbers.append(batch.segments["document"].tolist()[0])
            file.add(step, batch.sources, [losses_in(batch)])
    assert sorted(numbers[:3]) == sorted(numbers[3:6]) == [0, 1, 2]
    plan = ("--seq-length", SEQ_LEN, "--global-batch-size", 1, "--tokenizer", "bytes")
    by_number = {each.document: each for each in DocumentLosses(tmp_path).highest(9)}
    for number in range(3):
        steps = [step for step, other in enumerate(numbers, 1) if other == number]
        each = by_number[number]
        assert (each.visits, each.first, each.last) == (len(steps), steps[0], steps[-1])
        assert each.tokens == 15 * len(steps)
        named = ("--document", f"web:{number}", "--step", 6)
        traced = energon_ext("trace", tmp_path, path, *named, *plan).stdout.splitlines()
        assert [int(line.split(",")[0].removeprefix("step ")) + 1 for line in traced] == steps


def test_loss_weights_of_sources_and_labels_only_decide_what_counts(tmp_path):
    write_tokens(tmp_path / "web", [[5, 6, 7, 8]])
    entry = {"path": "web", "loss_weight": 0}
    fields = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = tmp_path / "mix.yaml"
    path.write_text(
        json.dumps({**fields, "splits": {"train": {"blend": [{**entry, "weight": 1}]}}})
    )
    batch = next(iter(loader_of(path, encoder_of())))
    assert not batch.token_weights.any()
    report = make_loss_func(batch, "tokens")(torch.arange(1.0, 17.0)[None])[2]
    for found in (report["document losses"], document_losses(batch, -torch.arange(1.0, 17.0))):
        assert found[0].tolist() == [0, 0, 0, 1 + 2 + 3, 3]


def test_a_batch_has_the_numbers_only_on_request(data):
    path, _ = data
    plain, numbered = (
        [*loader_of(path, encoder_of(numbers), repeat=False)] for numbers in (False, True)
    )
    for batch, other in zip(plain, numbered, strict=True):
        assert set(other.segments) == {"document", "visit"} and batch.segments == {}
        assert [each.dtype for each in other.segments.values()] == [torch.int64, torch.int32]
        for field in dataclasses.fields(batch):
            if field.name != "segments":
                found = getattr(batch, field.name), getattr(other, field.name)
                torch.testing.assert_close(*found) if torch.is_tensor(found[0]) else None
        report = make_loss_func(batch, "tokens")(torch.ones(1, batch.num_tokens))[2]
        assert "document losses" not in report
        with pytest.raises(ConfigError, match="document_numbers=True"):
            losses_in(batch)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_resumed_run_may_begin_and_stop_to_number_documents(data, numbers):
    path, _ = data
    whole = loader_of(path, encoder_of(numbers))
    batches = iter(whole)
    for _ in range(3):
        next(batches)
    other = loader_of(path, encoder_of(not numbers))
    other.load_state_dict(whole.state_dict())
    for batch, resumed, _ in zip(batches, other, range(4)):
        assert torch.equal(batch.tokens, resumed.tokens)
        assert bool(batch.segments) is numbers and bool(resumed.segments) is not numbers


def test_means_of_a_step_do_not_contain_them(data, one_rank):
    path, _ = data
    means = []
    for numbers in (False, True):
        batch = next(iter(loader_of(path, encoder_of(numbers), rows=2)))
        report = make_loss_func(batch, "tokens")(torch.ones(1, batch.num_tokens))[2]
        means.append(mean_losses([report, report]))
    assert means[0] == means[1] and set(means[0]) == {"loss", "loss_by_source"}


def test_worker_processes_carry_the_numbers(data):
    path, _ = data
    here = [*loader_of(path, encoder_of(), repeat=False)]
    there = loader_of(path, encoder_of(), workers=2, repeat=False)
    for batch, other in zip(here, there, strict=True):
        for name, values in batch.segments.items():
            assert torch.equal(other.segments[name], values)
    there.close()


# Starts of a run --------------------------------------------------------------------------------


def write_steps(folder, rank, steps, value):
    """Write a document of two labels in each step, whose number is that of the step."""
    with DocumentLossFile(folder, rank) as file:
        for step in steps:
            losses = [[0, 10 * step + rank, 0, value, 2], [-1, -1, -1, 0, 0]]
            file.add(step, ["web"], [torch.tensor(losses, dtype=torch.float64)])


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    """Two ranks to step 8, one from 5 to 7, two from 3, and one from 4: of each step the last."""
    for after, stop, ranks, value in (
        (0, 8, 2, 1.0),
        (5, 7, 1, 2.0),
        (3, 6, 2, 3.0),
        (4, 6, 1, 4.0),
    ):
        folder = begin_folder(tmp_path, after)
        for rank in range(ranks):
            write_steps(folder, rank, range(after + 1, stop + 1), value)
    expected = {10 * step + rank: 1.0 for step in (1, 2, 3) for rank in range(2)}
    expected |= {40: 3.0, 41: 3.0, 50: 4.0, 60: 4.0}
    assert sums_of(tmp_path) == {number: (loss, 2) for number, loss in expected.items()}
    assert sums_of(tmp_path, after=4) == {50: (4.0, 2), 60: (4.0, 2)}


def test_a_start_that_ended_early_did_not_lead_to_a_later_one(tmp_path):
    """Steps 1 to 9; a start after 5 that ends with 6, one without a step; then on after step 8."""
    for after, stop, value in ((0, 9, 1.0), (5, 6, 2.0), (6, 6, 3.0), (8, 10, 4.0)):
        write_steps(begin_folder(tmp_path, after), 0, range(after + 1, stop + 1), value)
    expected = {10 * step: (1.0 if step <= 8 else 4.0, 2) for step in range(1, 11)}
    assert sums_of(tmp_path) == expected


class Replica:
    """A process of a run whose ranks come and go; it writes a step once all have completed it."""

    def __init__(self, path, folder, number, start=None):
        self.loader = loader_of(path, encoder_of(), rows_per_step=3, repeat=False)
        self.start = self.loader.mark() if start is None else start
        self.file = DocumentLossFile(folder, number)

    def read(self, rank, ranks):
        self.loader.continue_from(self.start, rank=rank, ranks=ranks)
        self.batches = []
        for batch in self.loader:
            self.batches.append(batch)
            if self.loader.ends_step:
                break
        return bool(self.batches)

    def complete(self, step):
        self.start = self.loader.mark()
        self.file.add(step, self.batches[0].sources, list(map(losses_in, self.batches)))
        self.file.flush()  # else the last step of a process that is killed would be missing


def read_step(replicas):
    found = [each.read(rank, len(replicas)) for rank, each in enumerate(replicas)]
    return all(found)


def test_replicas_that_come_and_go_write_each_document_once_in_one_folder(data, tmp_path):
    """One is killed inside step 3 and comes back for step 5, with a number of its own."""
    path, has_weights = data
    folder, step = begin_folder(tmp_path, 0), 0
    replicas = [Replica(path, folder, number) for number in range(3)]
    while read_step(replicas):
        step += 1
        if step == 3:
            replicas.pop(0)  # what it has read of the step was never trained
            assert read_step(replicas)
        for each in replicas:
            each.complete(step)
        if step == 4:
            state = json.loads(json.dumps(replicas[0].loader.state_dict()))
            replicas.insert(1, Replica(path, folder, 3, state))
    assert step > 5
    assert sums_of(tmp_path) == alone(has_weights)
    assert len([*folder.iterdir()]) == 4
    with pytest.raises(FileExistsError, match="rank-00001.bin"):
        DocumentLossFile(folder, 1)


def test_of_folders_that_replicas_begin_on_their_own_only_the_last_counts(tmp_path):
    """Two replicas begin; the first one of them is started again after step 4."""
    for number, after in enumerate((0, 0, 4)):
        folder = begin_folder(tmp_path, after)
        write_steps(folder, number, range(after + 1, 7), 1.0)
    expected = {10 * step + 1: (1.0, 2) for step in range(1, 5)}
    assert sums_of(tmp_path) == expected | {52: (1.0, 2), 62: (1.0, 2)}


def test_a_run_that_ended_in_the_first_line_of_a_file_has_no_step(tmp_path):
    write_steps(begin_folder(tmp_path, 0), 0, (1, 2), 1.0)
    (begin_folder(tmp_path, 2) / "rank-00000.bin").write_bytes(b'{"version": 1, "sou')
    assert sums_of(tmp_path) == {10: (1.0, 2), 20: (1.0, 2)}


def test_a_checkpoint_has_the_losses_up_to_its_step_and_a_cut_record_is_named(tmp_path, caplog):
    folder = begin_folder(tmp_path, 0)
    file = DocumentLossFile(folder, 0)
    losses = torch.tensor([[0, 1, 0, 6.0, 2]], dtype=torch.float64)
    file.add(1, ["web"], [losses])
    assert len(DocumentLosses(tmp_path)) == 0  # on its way
    file.flush()
    assert sums_of(tmp_path) == {1: (6.0, 2)}
    file.add(2, ["web"], [losses])
    file.__exit__()
    file.path.write_bytes(file.path.read_bytes()[:-1])
    assert sums_of(tmp_path) == {1: (6.0, 2)}
    assert "its last record is cut" in caplog.text
    file.path.write_bytes(
        file.path.read_bytes() + bytes(RECORD.itemsize)
    )  # zeros, as after a crash
    assert "its last record is cut" in caplog.text


def test_records_of_zeros_are_left_out_with_a_warning(tmp_path, caplog):
    folder = begin_folder(tmp_path, 0)
    write_steps(folder, 0, [1], 6.0)
    with (folder / "rank-00000.bin").open("ab") as file:
        file.write(bytes(2 * RECORD.itemsize))
    assert sums_of(tmp_path) == {10: (6.0, 2)}
    assert "2 damaged records are left out" in caplog.text


def test_a_full_disk_and_a_removed_folder_are_one_error(tmp_path):
    losses = [torch.tensor([[0, 1, 0, 6.0, 2]] * 1000, dtype=torch.float64)]
    file = DocumentLossFile(begin_folder(tmp_path, 0), 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        file.add(1, ["web"], losses)
        with pytest.raises(ConfigError, match="rank-00000.bin: cannot be written"):
            file.add(2, ["web"], losses)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    other = DocumentLossFile(begin_folder(tmp_path, 1), 0)
    shutil.rmtree(tmp_path / "document_losses")
    for write in (lambda: other.add(2, ["web"], losses), other.flush):
        with pytest.raises(ConfigError, match="rank-00000.bin: cannot be written"):
            write()


def test_a_trained_segment_without_a_number_is_refused(tmp_path):
    with pytest.raises(SampleError, match="Step 3: .* document_numbers=True"), ExitStack() as stack:
        file = stack.enter_context(DocumentLossFile(begin_folder(tmp_path, 0), 0))
        file.add(3, ["web"], [torch.tensor([[0, -1, -1, 6.0, 2]], dtype=torch.float64)])


def test_what_cannot_be_numbered_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="document_numbers: .* mask_boundary_loss=True"):
        PackedTaskEncoder(ByteTokenizer(), 16, packing="sequential", document_numbers=True)
    write_tokens(tmp_path / "web", [[5] * 40] * 3)
    fields = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = tmp_path / "mix.yaml"
    entry = {"path": "web", "weight": 1, "splice": {"num_docs": 1}}
    path.write_text(json.dumps({**fields, "splits": {"train": {"blend": [entry]}}}))
    with pytest.raises(ConfigError, match="splice: document_numbers cannot number spliced"):
        loader_of(path, encoder_of())
    meta = {"tokenizer": ByteTokenizer().fingerprint(), "columns": {"visit": {"dtype": "int8"}}}
    (tmp_path / "web.meta.json").write_text(json.dumps(meta))
    np.save(tmp_path / "web.visit.npy", np.zeros(120, np.int8))
    path.write_text(json.dumps({**fields, "splits": {"train": {"path": "web"}}}))
    with pytest.raises(ConfigError, match="'visit' found as the name of a column"):
        loader_of(path, encoder_of())
    assert SFTTaskEncoder(ByteTokenizer(), 16, document_numbers=True).document_numbers


# The report -------------------------------------------------------------------------------------


def test_the_report_lists_the_documents_of_highest_loss_and_writes_them_for_exclude(tmp_path):
    prefix = write_tokens(tmp_path / "web", [[5 + n] * 16 for n in range(6)])
    path = write_mix(tmp_path / "mix.yaml", [(prefix, 1)])
    run_dir = write_run(tmp_path / "run", steps=6)
    with DocumentLossFile(begin_folder(run_dir, 0), 0) as file:
        # The loss of a document is its number, but that of 2 is infinite.
        for step, batch in enumerate(loader_of(path, encoder_of(), repeat=False), 1):
            number = batch.segments["document"][0].item()
            loss = torch.full((SEQ_LEN,), -torch.inf if number == 2 else -float(number))
            file.add(step, batch.sources, [document_losses(batch, loss)])
    (key,) = batch.sources
    excluded = tmp_path / "excluded.txt"
    excluded.write_text(f"# by hand\n{key}:5")
    options = ("--documents", 3, "--metadataset", path, "--write-exclude", excluded)
    result = energon_ext("report", run_dir, *options)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()[-3:]]
    assert [line[:4] for line in lines] == [
        [f"{key}:2", "inf", "15", "1"],
        [f"{key}:5", "5.000", "15", "1"],
        [f"{key}:4", "4.000", "15", "1"],
    ]
    assert " ".join(lines[0][6:]) == f"number 2 of {prefix}"
    page = (run_dir / "report.html").read_text()
    assert "Documents with the highest mean loss" in page and f"{key}:4" in page
    assert excluded.read_text().splitlines() == [
        "# by hand",
        f"{key}:5",
        f"# mean loss inf over 15 tokens, number 2 of {prefix}",
        f"{key}:2",
        f"# mean loss 4.000 over 15 tokens, number 4 of {prefix}",
        f"{key}:4",
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "exclude": "excluded.txt"}))
    left = [
        batch.segments["document"][0].item()
        for batch in loader_of(path, encoder_of(), repeat=False)
    ]
    assert sorted(left) == [0, 1, 3]


def test_a_report_of_documents_that_the_run_has_not_is_refused(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=3)
    assert "document_losses: does not exist" in error_line(
        energon_ext("report", run_dir, "--documents", 3)
    )
    assert "--after: is for --documents" in error_line(energon_ext("report", run_dir, "--after", 3))
