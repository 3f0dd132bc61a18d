# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Patches of Megatron-LM's training loop for batches of packed rows."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from energon_ext.errors import ConfigError
from energon_ext.megatron.lm.log import DataLog
from energon_ext.megatron.loss import keep_reports, means_on_device
from energon_ext.megatron.rank_data import rank_data

#: The first parameter of each function that is replaced or wrapped, in Megatron-LM of megatron-core
#: 0.15 to 0.20. Others are passed on unread.
FIRST_PARAMETERS = {
    "dummy_train_step": "data_iterator",
    "train_step": "forward_step_func",
    "evaluate": "forward_step_func",
    "training_log": "loss_dict",
    "maybe_save_dataloader_state": "train_iterator",
}


def adapt_loop(log: DataLog | None) -> None:
    """Make the loop skip steps of packed rows, reduce losses once, and log the data it reads.

    ``--iterations-to-skip`` and reruns of rejected results skip steps. Megatron-LM's own function
    expects a batch to be a dictionary of rows of one shape, and broadcasts it to the
    tensor-parallel ranks only to drop it.

    Raises:
        ConfigError: the loop is not one that is known.
    """
    from megatron.training import training

    find_function(training, "dummy_train_step")
    rank_data().log = log

    def skip(data_iterator: Any) -> None:
        machine = get_rerun_state_machine()
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while machine.should_run_forward_backward(data_iterator):
            for _ in range(get_num_microbatches()):
                for iterator in iterators:
                    if iterator is not None:  # this rank loads data
                        next(iterator)
        if (log := rank_data().log) is not None:
            log.step({}, machine.current_iteration)

    training.dummy_train_step = skip
    for name in ("train_step", "evaluate"):
        function = _with_losses_of_sources(
            find_function(training, name), is_training=name == "train_step"
        )
        setattr(training, name, function)
    if log is not None:
        training.training_log = _with_data(find_function(training, "training_log"))
        if log.documents is not None:
            _flush_before_saves()


def find_function(module: Any, name: str) -> Any:
    """Return a function of Megatron-LM, perhaps in the wrapper of an earlier start.

    Raises:
        ConfigError: there is none, or its parameters are not those of the known versions.
    """
    function = getattr(module, name, None)
    if function is None:
        raise _unknown_loop(f"{module.__name__} has no {name}")
    parameters = [*inspect.signature(function).parameters.values()]
    # One that is replaced altogether may have no further parameters.
    read = parameters if name == "dummy_train_step" else parameters[:1]
    is_known = [parameter.name for parameter in read] == [FIRST_PARAMETERS[name]]
    passes_on = bool(read) and read[0].kind is inspect.Parameter.VAR_POSITIONAL
    if not is_known and not passes_on:
        found = f"{module.__name__}.{name} has the parameters {inspect.signature(function)}"
        raise _unknown_loop(found)
    return function


def _unknown_loop(found: str) -> ConfigError:
    return ConfigError(
        f"{found}: energon_ext does not know this version of Megatron-LM's training loop; use that "
        f"of megatron-core 0.15 to 0.20."
    )


def _flush_before_saves() -> None:
    """Make a save write the losses of documents up to its step, on every rank that has some."""
    from megatron.training import checkpointing

    save = find_function(checkpointing, "maybe_save_dataloader_state")
    save = getattr(save, "without_flush", save)

    def flush_and_save(train_iterator: Any, *arguments: Any, **options: Any) -> Any:
        if (log := rank_data().log) is not None and log.documents is not None:
            log.documents.flush()
        return save(train_iterator, *arguments, **options)

    flush_and_save.without_flush = save  # type: ignore[attr-defined]
    checkpointing.maybe_save_dataloader_state = functools.wraps(save)(flush_and_save)


def save_for_all_stages() -> None:
    """Make Megatron-LM save the state of the loader that a process's virtual stages share.

    Its own function fails, as it mistakes their list of iterators for an iterator. Between two
    steps all stages have drawn the same batches, so the loader's state is valid for all of them.
    """
    from megatron.training import checkpointing

    save = find_function(checkpointing, "maybe_save_dataloader_state")
    save = getattr(save, "of_one_stage", save)

    def save_shared(train_iterator: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(train_iterator, list):
            loader = rank_data().shared_loader
            train_iterator = loader and SimpleNamespace(iterable=loader)
        return save(train_iterator, *arguments, **options)

    save_shared.of_one_stage = save  # type: ignore[attr-defined]
    checkpointing.maybe_save_dataloader_state = functools.wraps(save)(save_shared)


def _with_data(training_log: Any) -> Any:
    # The provider may run several times: unwrap an earlier patch.
    write = getattr(training_log, "without_data", training_log)

    def write_with_data(losses: Any, *arguments: Any, **options: Any) -> Any:
        if (log := rank_data().log) is not None:  # an earlier run may have had one
            log.step(losses, get_rerun_state_machine().current_iteration)
        return write(losses, *arguments, **options)

    write_with_data.without_data = write  # type: ignore[attr-defined]
    return functools.wraps(write)(write_with_data)


def _with_losses_of_sources(function: Any, is_training: bool) -> Any:
    """Wrap a function so that the first value it returns, its losses, includes each source's.

    Megatron-LM would reduce the loss of each source over the ranks separately. In training, the
    losses of documents are written.
    """
    inner = getattr(function, "without_sources", function)

    def with_losses(*arguments: Any, **options: Any) -> Any:
        with keep_reports() as reports:
            result = inner(*arguments, **options)
        log = rank_data().log
        if is_training and log is not None and log.documents is not None:
            # A step that was run again has the reports of each time.
            step = get_rerun_state_machine().current_iteration
            log.documents.add(step, reports[-get_num_microbatches() :])
        means = means_on_device(reports)
        # Losses are None if an evaluation has run out of time.
        if not (isinstance(result, tuple) and isinstance(result[0], (dict, type(None)))):
            name = f"{inner.__module__}.{inner.__name__}"
            raise _unknown_loop(f"{name} returned {result!r:.80}, and not losses first")
        if result[0]:
            result[0].update(means)
        return result

    with_losses.without_sources = inner  # type: ignore[attr-defined]
    return functools.wraps(inner)(with_losses)
