# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Redirect what Energon prints on standard output to the log."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

from megatron.energon import SkipSample, TaskEncoder
from megatron.energon.errors import ErrorContext, log_exception
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from energon_ext.errors import log_of
from energon_ext.plan.lookup import stages_in
from energon_ext.samples.bad_samples import BadSamples

logger = log_of(__name__)


#: Threads share standard output, and must not restore each other's redirection.
_REDIRECTION = threading.RLock()


class _ThreadOutput(io.StringIO):
    """Captures what this thread prints and passes on what other threads print."""

    def __init__(self, stdout: Any):
        super().__init__()
        self._stdout, self._thread = stdout, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return super().write(text)
        return self._stdout.write(text) if self._stdout is not None else len(text)


@contextlib.contextmanager
def quiet_energon() -> Iterator[None]:
    """Log what Energon prints, such as the samples of every shard that each worker reads."""
    with _REDIRECTION:
        printed = _ThreadOutput(sys.stdout)
        try:
            with contextlib.redirect_stdout(printed):
                yield
        finally:
            for line in printed.getvalue().splitlines():
                logger.debug("%s", line)


def quiet_errors(dataset: Any, source: str, decoder: Any) -> SavableDataset:
    """Log only some of the samples that cannot be used; Energon would print each of them."""
    for stage in stages_in(dataset):
        if isinstance(stage, MapDataset):
            _judge(stage, BadSamples(source, decoder))
    return dataset


def quiet_encoding(dataset: Any, encoder: TaskEncoder) -> SavableDataset:
    """Do the same for the samples that the methods of an encoder cannot encode."""
    methods = encoder.preencode_sample, encoder.encode_sample, encoder.postencode_sample
    for stage in stages_in(dataset):
        if isinstance(stage, MapDataset) and stage.map_fn in methods:
            _judge(stage, BadSamples(type(encoder).__qualname__, encoder.decoder))
    return dataset


def _judge(stage: MapDataset[Any, Any], bad: BadSamples) -> None:
    stage._map_failure_handler = _SkippedSamples(stage._map_failure_handler, bad)


class _SkippedSamples(ErrorContext):
    """Counts bad samples as Energon does, and logs the 1st, 10th, 100th ... skipped sample."""

    def __init__(self, original: ErrorContext, bad: BadSamples):
        handler = self._log if original.handler is log_exception else original.handler
        super().__init__(original.name, handler, original.tolerance)
        self._bad, self._count = bad, 0

    @contextlib.contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        try:
            yield
        except SkipSample:  # not counted by Energon
            with super().handle_errors(sample):
                raise
        except Exception as error:  # an encoder may raise anything
            reason = self._bad.judge(error, _key_of(sample))
            # A user's own handler gets the error itself.
            reported = reason if self.handler == self._log else error
            with quiet_energon(), super().handle_errors(sample):
                raise reported from error
        else:
            self.reset()
            self._bad.has_worked = True

    def _log(self, error: Exception, sample: Any, sources: Any = None) -> None:
        self._count += 1
        if str(self._count).strip("0") == "1":
            logger.warning(
                "%s: sample skipped (%d so far): %s", self._bad.source, self._count, error
            )


def _key_of(sample: Any) -> str:
    """Return the key of a stored sample, with those that are joined to it, or of a cooked one."""
    keys = [part["__key__"] for part in getattr(sample, "data", ()) if part]
    key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", "")
    return ", ".join(keys) or str(key)
