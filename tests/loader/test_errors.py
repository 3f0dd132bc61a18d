# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors of readers and of the planner: at their batch, in one line, with a traceback."""

import json
import signal
from errno import ENOSPC

import pytest
from megatron.energon import WorkerConfig

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.errors import SampleError, WorkerError
from energon_ext.loader.processes import explain_deaths_in_signals
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import batch_hash, config, loader_for, write_mix, write_tokens

every_number_of_workers = pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.nightly), 3]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in "ab":
        write_tokens(folder / name, [[n % 200] * (5 + n % 40) for n in range(60)])
    write_mix(folder / "mix.yaml", [("a", 1), ("b", 1)])
    return folder


class Strange(Exception):
    """Cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Failing(PackedTaskEncoder):
    """Raises an error for batch 7, or returns a batch that cannot be pickled."""

    error: Exception | None = ValueError("no such batch")

    def batch(self, rows):
        batch = super().batch(rows)
        if WorkerConfig.active_worker_config.active_worker_batch_index == 7:
            if self.error is not None:
                raise self.error
            return batch, lambda: "cannot be pickled"
        return batch


def new_loader(path, workers, encoder=PackedTaskEncoder, error=None):
    task_encoder = encoder(ByteTokenizer(), 32, packing_buffer_docs=6)
    if encoder is Failing:
        task_encoder.error = error
    dataset = get_train_dataset(
        path,
        worker_config=config(workers),
        batch_size=2,
        rows_per_step=6,
        task_encoder=task_encoder,
    )
    return loader_for(dataset)


def drawn_before(loader, error):
    """Return the hashes of the batches before an error, and the error."""
    found = []
    with pytest.raises(error) as raised:
        for batch, _ in zip(loader, range(500)):
            found.append(batch_hash(batch))
    return found, raised.value


def check_the_run_goes_on(loader, path, drawn):
    """Check that the loader is closed and another one resumes after its last batch."""
    with pytest.raises(ConfigError, match="This loader was closed"):
        iter(loader)
    expected = iter(new_loader(path, 0))
    assert [batch_hash(next(expected)) for _ in drawn] == drawn
    resumed = new_loader(path, 0)
    resumed.load_state_dict(loader.state_dict())
    assert batch_hash(next(iter(resumed))) == batch_hash(next(expected))


@pytest.mark.parametrize(
    ("workers", "error"),
    [
        (0, ValueError("no such batch")),
        (1, SampleError("No text.")),
        (3, KeyError(3)),
        (3, OSError(ENOSPC, "Full")),
    ],
)
def test_an_encoder_error_is_raised_unchanged_at_its_batch(folder, workers, error):
    loader = new_loader(folder / "mix.yaml", workers, Failing, error)
    found, raised = drawn_before(loader, type(error))
    assert len(found) == 7 and raised.args == error.args
    if workers:
        lines = str(raised.__cause__).splitlines()
        assert lines[0] == "in a process of the loader"
        assert any("in batch" in line for line in lines) and "raise self.error" in lines[-2]
    check_the_run_goes_on(loader, folder / "mix.yaml", found)


class NoBatch(PackedTaskEncoder):
    """Returns None for batch 7."""

    def encode_batch(self, batch):
        index = WorkerConfig.active_worker_config.active_worker_batch_index
        return (
            None if index == 7 // max(1, WorkerConfig.active_worker_config.num_workers) else batch
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_none_is_an_error_of_the_encoder_and_the_state_stays_before_it(folder, workers):
    loader = new_loader(folder / "mix.yaml", workers, NoBatch)
    found, raised = drawn_before(loader, ConfigError)
    assert len(found) == 7 and str(raised).startswith("NoBatch.encode_batch: returned None; ")
    check_the_run_goes_on(loader, folder / "mix.yaml", found)


@every_number_of_workers
def test_stop_iteration_from_an_encoder_is_an_error(folder, workers):
    loader = new_loader(folder / "mix.yaml", workers, Failing, StopIteration())
    found, raised = drawn_before(loader, RuntimeError)
    assert len(found) == 7 and "raised StopIteration" in str(raised)
    check_the_run_goes_on(loader, folder / "mix.yaml", found)


@pytest.mark.parametrize(
    ("workers", "error", "words"),
    [
        (3, Strange(1, 2), "^Strange: 1 and 2$"),
        (
            1,
            None,
            r"^A worker cannot pickle its batch \(\w+: Can't pickle local object .*\). "
            "Remove objects that cannot be pickled from the batch, or use num_workers=0.$",
        ),
    ],
)
def test_unpicklable_results_are_an_error_at_their_batch(folder, workers, error, words):
    loader = new_loader(folder / "mix.yaml", workers, Failing, error)
    found, raised = drawn_before(loader, WorkerError)
    assert len(found) == 7
    with pytest.raises(WorkerError, match=words):
        raise raised
    check_the_run_goes_on(loader, folder / "mix.yaml", found)


@every_number_of_workers
def test_a_planner_error_comes_after_all_batches_of_earlier_steps(folder, workers):
    """From step 3 on only b has a weight, until it ends; a still has rows but no weight."""
    path = write_mix(folder / "ending.yaml", [("a", {"step": {0: 1, 3: 0}}), ("b", 1)])
    content = json.loads(path.read_text())
    content["splits"]["train"]["blend"][1]["max_epochs"] = 1
    path.write_text(json.dumps(content))
    with pytest.warns(match="weight"):
        loader = new_loader(path, workers)
    found, raised = drawn_before(loader, ConfigError)
    assert len(found) % 3 == 0 and len(found) > 9
    step = len(found) // 3
    assert str(raised).startswith(f"Every weight is 0 at step {step} for the sources ")
    assert "rows left: a. " in str(raised)
    if workers:
        assert "draw_own_steps" in str(raised.__cause__)
    assert loader.state_dict()["plan"]["step"] == step


def test_a_signal_handler_is_wrapped_once_and_only_if_present():
    before, calls = signal.getsignal(signal.SIGCHLD), []
    try:
        for absent in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGCHLD, absent)
            explain_deaths_in_signals()
            assert signal.getsignal(signal.SIGCHLD) is absent
        signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
        explain_deaths_in_signals()
        wrapped = signal.getsignal(signal.SIGCHLD)
        explain_deaths_in_signals()
        assert signal.getsignal(signal.SIGCHLD) is wrapped
        signal.raise_signal(signal.SIGCHLD)
        assert calls == [1]
    finally:
        signal.signal(signal.SIGCHLD, before)
