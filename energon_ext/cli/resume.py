# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A resume tried out: built, checked and restored by the code that a run resumes with.

The encoder is the one that the state describes. What it does not tell is how a tokenizer reads text
and which documents were spliced: without a tokenizer, text sources are compared and not restored,
and spliced sources never are.
"""

from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.config.source_key import shuffle_key
from energon_ext.encoders.load import get_train_dataset
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.tokenizers import ByteTokenizer, load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.loader.compare import check_blend, check_loader, names_of
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.loader.regroup import EPOCHS, blends_in, trees_in, workers_of, wrappers_in
from energon_ext.loader.seals import check_workers
from energon_ext.plan.cost import Cost
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.row_source import RowSource, Taken
from energon_ext.plan.rows import PlannedRows
from energon_ext.splice.source import SpliceSource
from energon_ext.state.checkpoint_folder import cursors_in
from energon_ext.state.match import ENCODER, SourceChange, compare_sources
from energon_ext.state.schema import check_format, check_seal

#: What the blend adds to the fingerprint of an encoder.
_OF_BLEND = ("seed", "plan", "global_workers")
_OF_PACKING = ("packing", "packing_max_docs_per_bin", "packing_carry", "mask_boundary_loss")


def data_states(folder: Path) -> dict[int | None, Any]:
    """The data state of every rank in the folder of a save; under None the cursor of all ranks."""
    return {
        # That of an RLDataset has the state of its prompts.
        rank: state.get("prompts", state) if isinstance(state, dict) else state
        for rank, state in cursors_in(folder)
    }


class SavedData:
    """The data of a checkpoint: the cursor of a planned run, or None and the states by rank."""

    def __init__(self, cursor: Any, states: Mapping[int, SavableDataLoaderState]):
        self.cursor, self.states = cursor, [states[rank] for rank in sorted(states)]
        self.blends = [] if states else [check_seal(cursor)]
        for state in self.states:
            check_workers(state)
            self.blends += blends_in(state).values()
        first = self.blends[0]
        check_format(first)
        self.fingerprint: Mapping[str, Any] = first["fingerprint"]
        self.is_shared = self.fingerprint.get("plan") == "shared"
        if not self.is_shared and sorted(states) != list(range(len(states))):
            raise ConfigError(f"The states of all ranks are needed, {sorted(states)} found.")
        self.rows_per_step, self.batch_size, self.ranks = None, 1, max(1, len(states))
        self.workers, self.has_virtual_epochs = 0, False
        if self.states:
            self.batch_size = self.states[0].micro_batch_size
            self.workers = workers_of(self.states[0])
            self.has_virtual_epochs = EPOCHS in wrappers_in(trees_in(self.states[0])[0])
        if first["inside"]:
            inside = first["inside"]
            self.rows_per_step, self.batch_size = inside["rows_per_step"], inside["batch_size"]
            self.ranks = inside["ranks"]

    def dataset(
        self,
        encoder: "EncoderOfState",
        data: Mapping[str, Any],
        rank: int,
        ranks: int,
        workers: int,
        batch_size: int | None,
        rows_per_step: int | None,
    ) -> SavableDataset:
        """That of a rank which reads ``data``, as ``get_train_dataset`` names it, as before."""
        return get_train_dataset(
            **data,
            worker_config=WorkerConfig(
                rank=rank,
                world_size=ranks,
                num_workers=workers,
                seed_offset=self.fingerprint.get("seed", 0),
            ),
            batch_size=batch_size,
            rows_per_step=rows_per_step,
            task_encoder=encoder,
            shuffle_buffer_size=self.fingerprint.get("shuffle_buffer_docs"),
            # Its length is not in the state; that it has one is.
            virtual_epoch_length=2**20 * max(1, workers) if self.has_virtual_epochs else 0,
        )

    def __str__(self) -> str:
        if not self.is_shared:
            return f"{self.ranks} rank(s) with {self.workers} worker(s)"
        rows = max(blend["plan"]["row"] + blend["done"] for blend in self.blends)
        return f"planned, after {rows:,} rows"


class NextRun:
    """A run that is to continue what was saved; what is None is as it was.

    Args:
        data: of ``get_train_dataset``: path, split and trusted modules.
        encoder: tokenizer, seq_length and packing.
    """

    def __init__(
        self,
        saved: SavedData,
        data: Mapping[str, Any],
        ranks: int | None,
        workers: int | None,
        **encoder: Any,
    ):
        self._saved, self._data = saved, data
        self._ranks = ranks or saved.ranks
        self._workers = saved.workers if workers is None else workers
        self._encoder = EncoderOfState(saved, **encoder)
        self._reads_text = encoder["tokenizer"] is not None
        self._blend = find_blend(self._dataset(0))

    def changes(self) -> list[SourceChange]:
        """What becomes of every source, if the resume is possible."""
        return compare_sources(self._saved.blends, names_of(self._blend))

    def left_out(self) -> Iterator[str]:
        """What was skipped, and what the metadataset leaves out from here on."""
        blend, first = self._blend, self._saved.blends[0]
        step, done = first["plan"]["step"], [tuple(each) for each in first["skipped"]]
        ahead = [(max(begin, step), stop) for begin, stop in blend.clock.skip if stop > step]
        for what, ranges in (("skipped", done), ("to be skipped", ahead)):
            if named := ", ".join(f"{begin:,} to {stop - 1:,}" for begin, stop in ranges):
                yield f"steps {what}: {named}"
        for key, source in blend.sources.items():
            if not isinstance(source.rows, PlannedRows):
                continue
            if count := len(source.rows.excluded):
                yield f"{key}: {count:,} documents are excluded"
            saved = first["plan"]["sources"].get(key, {"rows": {}})["rows"].get("left_out", [])
            if count := len(set(saved) - set(source.rows.excluded.tolist())):
                yield f"{key}: {count:,} documents that were excluded come back"

    def restore(self) -> str:
        """Restore, and say what other ranks and workers might do as well."""
        saved = self._saved
        if self._blend.is_shared or saved.cursor is not None:
            for workers in {self._workers, 0}:  # without workers the blend is restored here
                loader = ExactDataLoader(self._dataset(0, workers=workers))
                if saved.states:
                    loader.restore_states(saved.states)
                else:
                    loader.load_state_dict(saved.cursor)
            if saved.rows_per_step:
                return f"possible on {saved.ranks} rank(s), as it was saved inside a step"
            return "possible on any number of ranks and workers"
        for rank in range(self._ranks):
            loader = ExactDataLoader(self._dataset(rank))
            state = loader.state_of(saved.states)
            check_loader(state, loader.dataset.dataset, self._workers, saved.batch_size)
            check_blend(state, find_blend(loader))
        possible = f"possible on {len(saved.blends)} workers in all (ranks x workers)"
        if not self._reads_text:
            return f"{possible}; text was not restored, for want of --tokenizer"
        for number, blend in enumerate(saved.blends):  # each as a rank of its own
            find_blend(self._dataset(number, len(saved.blends), 0)).restore_state(blend)
        return possible

    def _dataset(
        self, rank: int, ranks: int | None = None, workers: int | None = None
    ) -> SavableDataset:
        ranks = ranks or self._ranks
        workers = self._workers if workers is None else workers
        batch, rows = self._saved.batch_size, self._saved.rows_per_step
        if rows and rows % ((batch or 1) * ranks):
            rows = None  # these ranks do not divide a step of the saved run
        return self._saved.dataset(self._encoder, self._data, rank, ranks, workers, batch, rows)


class EncoderOfState(PackedTaskEncoder):
    """Builds what the saved run had built, as far as its state tells."""

    def __init__(
        self,
        saved: SavedData,
        tokenizer: str | None = None,
        seq_length: int | None = None,
        packing: str | None = None,
        **special_tokens: str | None,
    ):
        self._saved = {name: v for name, v in saved.fingerprint.items() if name not in _OF_BLEND}
        self._spliced_keys = {
            name
            for key, source in saved.blends[0]["plan"]["sources"].items()
            for name in (key, source["names"][1])
            if source["rows"]["kind"] == SpliceSource.kind
        }
        fields = ["alignment", "train_on_eos"]
        if packing in (None, self._saved.get("packing")):  # else they follow the new packing
            fields += _OF_PACKING
        options: dict[str, Any] = {n: v for n in fields if (v := self._saved.get(n)) is not None}
        if packing is not None:
            options["packing"] = packing
        super().__init__(
            load_tokenizer(tokenizer, **special_tokens)
            if tokenizer
            else TokenizerOfState(self._saved),
            seq_length or self._saved.get("seq_len", 2),
            **options,
        )
        cost = (saved.blends[0]["inside"] or {}).get("cost")
        self.cost = None if cost is None else _cost_named(cost)

    def state_fingerprint(self) -> dict[str, Any]:
        own = {name: v for name, v in super().state_fingerprint().items() if name in self._saved}
        return {**self._saved, **own, ENCODER: self._saved.get(ENCODER)}

    def build_source(
        self, loaded: LoadedDataset, key: str, **options: Any
    ) -> SavableDataset[Any] | RowSource:
        if {key, shuffle_key(key, loaded.dataset)} & self._spliced_keys:
            return UnknownRows()
        return super().build_source(loaded, key, **options)


def _cost_named(name: str) -> Cost:
    """Has the name of a cost; that no row is dear changes nothing that is compared."""

    def cost(lengths: np.ndarray) -> np.ndarray:
        return np.zeros(len(lengths))

    cost.__qualname__ = name
    return cost


class TokenizerOfState(ByteTokenizer):
    """Has the fingerprint of a tokenizer, and reads nothing."""

    def __init__(self, saved: Mapping[str, Any]):
        super().__init__()
        self.vocab_size = 2**62
        self._fingerprint = saved.get("tokenizer", {})

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint


class UnknownRows(RowSource):
    """A planned source of which only the place in the blend is known."""

    is_finite = ended = False

    def __init__(self) -> None:
        super().__init__("", {})

    def take(self, count: int) -> Taken:
        raise NotImplementedError

    def restart(self) -> None: ...

    def read_part(self, worker: int, workers: int) -> None: ...

    def save_state(self) -> dict[str, Any]:
        return {}

    def check_state(self, state: Any) -> None: ...

    def restore_state(self, state: Any) -> None: ...
