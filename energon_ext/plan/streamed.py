# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The samples of any Energon dataset as a source, one at a time."""

from __future__ import annotations

import tarfile
from typing import Any, Callable, Iterator, Mapping

from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.base_dataset import SavableDataset, add_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.errors import LEFT_OUT, EnergonExtError, SampleError
from energon_ext.plan.row_source import RowSource, Taken
from energon_ext.state.schema import BLEND


def num_tokens_of(sample: Any) -> int:
    """What a sample says of itself, else 1."""
    return int(getattr(sample, "num_tokens", 1))


class StreamedSamples(RowSource):
    """What an Energon dataset yields: rows that were packed on the fly, or samples of any kind.

    A sample says itself what it holds: ``num_tokens`` and ``documents``, 1 each where it does not.

    Attributes:
        size_of: what counts as the tokens of a sample instead.

    Args:
        dataset: of one source.
        max_epochs: after which ``dataset`` ends for good; None where it does not end, or begins
            again when it is iterated again.
        source: its key.
        documents: JSON values by which a change of what is read is noticed.

    State: that of the dataset, whether it has ended, and ``documents``.
    """

    kind = "streamed"
    is_finite = True

    def __init__(
        self,
        dataset: SavableDataset,
        max_epochs: int | None = None,
        source: str = "",
        documents: Mapping[str, Any] | None = None,
    ):
        super().__init__(source, documents or {})
        self.dataset = dataset
        self._max_epochs = max_epochs
        self._iterator: Iterator[Any] | None = None
        self._is_empty = False
        self.size_of: Callable[[Any], float] = num_tokens_of
        self.restart()

    def restart(self) -> None:
        self._has_ended = False

    def open(self) -> None:
        """Iterate anew from where the dataset stands; what a worker does when it begins."""
        self._iterator = None
        self._is_empty = not self.dataset.worker_has_samples()

    def read_part(self, worker: int, workers: int) -> None:
        """Energon's datasets know themselves which worker reads what."""

    @property
    def ended(self) -> bool:
        """Whether no sample is left, or none is for this worker."""
        return self._has_ended or self._is_empty

    def take(self, count: int) -> "TakenSamples":
        samples: list[Any] = []
        while len(samples) < count and not self.ended:
            if self._iterator is None:
                self._iterator = iter(self.dataset)
            sample = self._next(self._iterator)
            if sample is None:
                self._has_ended, self._iterator = True, None
            else:
                samples.append(add_sample_restore_key(sample, self.key, src=BLEND))
        return TakenSamples(samples, sum(map(self.size_of, samples)))

    def _next(self, samples: Iterator[Any]) -> Any:
        """The next sample, None at the end; where a file cannot be read, the source is named."""
        try:
            return next(samples, None)
        except EnergonExtError:
            raise
        except FatalSampleError as error:
            if isinstance(error.__context__, LEFT_OUT):
                raise SampleError(
                    f"{self.key}: too many samples in a row cannot be used, the last: "
                    f"{error.__context__} Is this the data of another task?"
                ) from error
            raise
        # Energon asserts what an index says.
        except (OSError, tarfile.TarError, ValueError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise SampleError(
                f"{self.key}: cannot be read on ({type(error).__name__}: {reason}); copy its "
                f"files again and resume."
            ) from error

    def save_state(self) -> FlexState:
        return FlexState(
            kind=self.kind,
            documents=self.fingerprint,
            dataset=self.dataset.save_state(),
            ended=self._has_ended,
            max_epochs=self._max_epochs,
        )

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """As of any source; a raised ``max_epochs`` goes on behind the end."""
        self.check_state(state)
        self.dataset.restore_state(state["dataset"])
        limit, before = self._max_epochs, state["max_epochs"]
        is_raised = before is not None and (limit is None or limit > before)
        self._has_ended = state["ended"] and not is_raised


class RepeatUpTo(RepeatDataset[Any]):
    """A dataset that is read so often, and stays at its end, also over a save.

    The limit may be lower than what was read, and be raised again: the epochs that were read stay
    counted, where stock forgets those above the limit.
    """

    _repetition: int

    def __iter__(self) -> Iterator[Any]:
        read = self._repetition
        yield from super().__iter__()
        self._repetition = max(read, self._repetition)


class TakenSamples(Taken):
    """Samples that were read when they were drawn."""

    def __init__(self, samples: list[Any], size: float):
        self._samples = samples
        self.num_tokens = round(size)
        self.num_documents = sum(getattr(sample, "documents", 1) for sample in samples)

    def __len__(self) -> int:
        return len(self._samples)

    def row(self, number: int) -> Any:
        return self._samples[number]
