# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The samples of one streamed source."""

from __future__ import annotations

import re
import tarfile
from typing import Any, Callable, Iterator, Mapping

from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.compat import repetitions_read, set_repetitions_read
from energon_ext.errors import EnergonExtError, SampleError
from energon_ext.state.schema import COUNT
from energon_ext.streamed.source import StreamedSource
from energon_ext.streamed.spread import SPREAD

#: The shape of :meth:`StreamedSamples.save_state`.
SAMPLES = {
    "files": {str: object},
    "dataset": {str: object},
    "ended": bool,
    "max_epochs": (None, COUNT),
    "documents": COUNT,
    "tokens": COUNT,
    "names": [str],
    "spread": SPREAD,
}


def num_tokens_of(sample: Any) -> int:
    """Return the ``num_tokens`` of a sample, or 1 if it has none."""
    return int(getattr(sample, "num_tokens", 1))


class StreamedSamples:
    """One worker's samples of a source, whose ``rows`` are an Energon dataset."""

    def __init__(self, source: StreamedSource, size_of: Callable[[Any], float] = num_tokens_of):
        self.source, self.size_of = source, size_of
        self.dataset: SavableDataset = source.rows
        self.reset()

    def reset(self) -> None:
        """Start over with the first sample and counts of 0."""
        self._has_ended = self._is_empty = False
        self.documents = self.tokens = 0  # read so far
        self._iterator: Iterator[Any] | None = None

    def open(self) -> None:
        """Prepare to iterate from the state of the dataset; called when a worker begins."""
        self._iterator = None
        self._is_empty = not self.dataset.worker_has_samples()

    def begin_again(self) -> None:
        """Start over with the first sample, but keep the counts."""
        self._has_ended = False
        self.open()

    @property
    def ended(self) -> bool:
        """True if no sample is left, or this worker has none."""
        return self._has_ended or self._is_empty

    def next(self) -> Any:
        """Return the next sample; None at the end."""
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        sample = self._read(self._iterator)
        if sample is None:
            self._has_ended, self._iterator = True, None
        else:
            self.documents += getattr(sample, "documents", 1)
            self.tokens += round(self.size_of(sample))
        return sample

    def _read(self, samples: Iterator[Any]) -> Any:
        """Return the next sample, None at the end; read errors name the source."""
        key = self.source.key
        try:
            return next(samples, None)
        except EnergonExtError:
            raise
        except FatalSampleError as error:
            last = error.__context__ or error
            kind = "" if isinstance(last, SampleError) else f"{type(last).__name__}: "
            in_a_row = re.search(r"failed (\d+) times in a row", str(error))
            what = (
                f"{in_a_row[1]} samples in a row cannot be used, the last" if in_a_row else "failed"
            )
            # The text of a SampleError says all; the traceback of another error helps.
            cause = None if isinstance(last, SampleError) else last
            raise SampleError(f"{key}: {what}: {kind}{last}") from cause
        # Energon checks the content of an index by assertions.
        except (OSError, tarfile.TarError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise SampleError(
                f"{key}: cannot be read further ({type(error).__name__}: {reason}); copy its files "
                f"again and resume."
            ) from error

    def save_state(self) -> dict[str, Any]:
        return {
            "files": self.source.fingerprint,
            "dataset": self.dataset.save_state(),
            "ended": self._has_ended,
            "max_epochs": self.source.max_epochs,
            "documents": self.documents,
            "tokens": self.tokens,
            "names": list(self.source.state_names),
            "spread": self.source.spread and self.source.spread.to_json(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`, beyond its end if ``max_epochs`` was raised."""
        self.reset()
        self.dataset.restore_state(state["dataset"])
        self.documents, self.tokens = state["documents"], state["tokens"]
        limit, before = self.source.max_epochs, state["max_epochs"]
        is_raised = before is not None and (limit is None or limit > before)
        self._has_ended = state["ended"] and not is_raised


class RepeatUpTo(RepeatDataset[Any]):
    """A dataset that is read a number of times and then stays at its end, even across saves.

    The limit may be set below the epochs already read and raised again later: all of these epochs
    still count, while stock Energon forgets those above the limit.
    """

    def __iter__(self) -> Iterator[Any]:
        read = repetitions_read(self)
        yield from super().__iter__()
        set_repetitions_read(self, max(read, repetitions_read(self)))
