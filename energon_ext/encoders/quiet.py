# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Redirect what Energon prints on standard output to the log."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

from megatron.energon.errors import ErrorContext, log_exception
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from energon_ext.errors import SKIPPABLE_ERRORS, log_of

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


def quiet_errors(dataset: Any, source: str) -> SavableDataset:
    """Log only some of the samples that cannot be used; Energon would print each of them."""
    stage = dataset
    while isinstance(stage, MapDataset):
        stage._map_failure_handler = _SkippedSamples(stage._map_failure_handler, source)
        stage = stage.dataset
    return dataset


class _SkippedSamples(ErrorContext):
    """Handles errors as Energon does, and logs the 1st, 10th, 100th ... skipped sample."""

    def __init__(self, original: ErrorContext, source: str):
        handler = self._log if original.handler is log_exception else original.handler
        super().__init__(original.name, handler, original.tolerance)
        self._source, self._count = source, 0

    @contextlib.contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        try:
            yield
        except Exception:  # an encoder may raise anything; Energon decides what it means
            with quiet_energon(), super().handle_errors(sample):
                raise
        else:
            self.reset()

    def _log(self, error: Exception, sample: Any, sources: Any = None) -> None:
        if not isinstance(error, SKIPPABLE_ERRORS):
            log_exception(error, sample, sources)
            return
        self._count += 1
        if str(self._count).strip("0") == "1":
            # Errors of stored samples do not name the sample.
            keys = [part["__key__"] for part in getattr(sample, "data", ()) if part]
            reason = f"Sample {', '.join(keys)}: {error}" if keys else error
            logger.warning("%s: sample skipped (%d so far): %s", self._source, self._count, reason)
