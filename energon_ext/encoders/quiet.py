# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Send Energon's prints on standard output to the log."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

from megatron.energon.errors import ErrorContext, log_exception
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.map_dataset import MapDataset

from energon_ext.errors import LEFT_OUT, log_of

logger = log_of(__name__)


#: There is one standard output: of two threads the second would put back that of the first.
_REDIRECTED = threading.RLock()


class _OfThisThread(io.StringIO):
    """Keeps what this thread prints; what others print goes where it would have gone."""

    def __init__(self, others: Any):
        super().__init__()
        self._others, self._own = others, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._own:
            return super().write(text)
        return self._others.write(text) if self._others is not None else len(text)


@contextlib.contextmanager
def quiet_energon() -> Iterator[None]:
    """Log what Energon prints, such as the samples of every shard that each worker reads."""
    with _REDIRECTED:
        printed = _OfThisThread(sys.stdout)
        try:
            with contextlib.redirect_stdout(printed):
                yield
        finally:
            for line in printed.getvalue().splitlines():
                logger.debug("%s", line)


def quiet_errors(dataset: Any, source: str) -> SavableDataset:
    """Log samples that cannot be used now and then, where Energon prints each of them."""
    stage = dataset
    while isinstance(stage, MapDataset):
        stage._map_failure_handler = _LeftOut(stage._map_failure_handler, source)
        stage = stage.dataset
    return dataset


class _LeftOut(ErrorContext):
    """Handles errors as Energon does, and logs the 1st, the 10th, the 100th sample left out."""

    def __init__(self, stock: ErrorContext, source: str):
        handler = self._log if stock.handler is log_exception else stock.handler
        super().__init__(stock.name, handler, stock.tolerance)
        self._source, self._count = source, 0

    @contextlib.contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever an encoder raises of a sample; stock decides what it means
            with quiet_energon(), super().handle_errors(sample):
                raise
        else:
            self.reset()

    def _log(self, error: Exception, sample: Any, sources: Any = None) -> None:
        if not isinstance(error, LEFT_OUT):
            log_exception(error, sample, sources)
            return
        self._count += 1
        if str(self._count).strip("0") == "1":
            # Of a sample as it is stored the error does not say which one it is.
            keys = [part["__key__"] for part in getattr(sample, "data", ()) if part]
            reason = f"Sample {', '.join(keys)}: {error}" if keys else error
            logger.warning("%s: sample left out (%d so far): %s", self._source, self._count, reason)
