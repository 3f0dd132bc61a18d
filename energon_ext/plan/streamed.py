# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The samples of any Energon dataset as a source, one at a time."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from megatron.energon.flavors.base_dataset import SavableDataset, add_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from energon_ext.state.match import check_fingerprint
from energon_ext.state.schema import BLEND

#: What a state calls these samples.
KIND = "streamed"


class StreamedSamples:
    """What an Energon dataset yields: rows that were packed on the fly, or samples of any kind.

    A sample says itself what it holds: ``num_tokens`` and ``documents``, 1 each where it does not.

    Args:
        dataset: of one source.
        max_epochs: after which ``dataset`` ends for good; None where it does not end, or begins
            again when it is iterated again.

    State: that of the dataset, and whether it has ended.
    """

    is_finite = True

    def __init__(self, dataset: SavableDataset, max_epochs: int | None = None, source: str = ""):
        self.dataset = dataset
        self.source = source
        self._max_epochs = max_epochs
        self._iterator: Iterator[Any] | None = None
        self._is_empty = False
        self.restart()

    def restart(self) -> None:
        """Begin with the first sample again."""
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
        """Up to ``count`` further samples; fewer at the end."""
        samples: list[Any] = []
        while len(samples) < count and not self.ended:
            if self._iterator is None:
                self._iterator = iter(self.dataset)
            sample = next(self._iterator, None)
            if sample is None:
                self._has_ended, self._iterator = True, None
            else:
                samples.append(add_sample_restore_key(sample, self.source, src=BLEND))
        return TakenSamples(samples)

    def save_state(self) -> FlexState:
        return FlexState(
            kind=KIND,
            dataset=self.dataset.save_state(),
            ended=self._has_ended,
            max_epochs=self._max_epochs,
        )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of planned rows."""
        check_fingerprint({"kind": state["kind"]}, {"kind": KIND}, self.source)

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`; a raised ``max_epochs`` goes on behind the end."""
        self.dataset.restore_state(state["dataset"])
        cap, before = self._max_epochs, state["max_epochs"]
        is_raised = before is not None and (cap is None or cap > before)
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


class TakenSamples:
    """Samples that were read when they were drawn."""

    def __init__(self, samples: list[Any]):
        self._samples = samples
        self.num_tokens = sum(getattr(sample, "num_tokens", 1) for sample in samples)
        self.num_documents = sum(getattr(sample, "documents", 1) for sample in samples)

    def __len__(self) -> int:
        return len(self._samples)

    def row(self, number: int) -> Any:
        return self._samples[number]
