# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Energon prints on standard output goes to the log."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

from megatron.energon.errors import ErrorContext
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.map_dataset import MapDataset

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def quiet_energon() -> Iterator[None]:
    """Energon prints which samples of every shard each worker reads, for one."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("%s", line)


def quiet_errors(dataset: SavableDataset) -> None:
    """Leave it to the error handler of a dataset to speak of samples that cannot be used."""
    if isinstance(dataset, MapDataset):
        stock = dataset._map_failure_handler
        dataset._map_failure_handler = _Quiet(stock.name, stock.handler, stock.tolerance)


class _Quiet(ErrorContext):
    @contextlib.contextmanager
    def handle_errors(self, sample: Any) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever an encoder raises of a sample; stock decides what it means
            with quiet_energon(), super().handle_errors(sample):
                raise
        else:
            self.reset()
