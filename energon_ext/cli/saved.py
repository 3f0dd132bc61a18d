# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a saved run: its cursors on disk, and datasets that continue from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import click
from megatron.energon import WorkerConfig

from energon_ext.cli.mix import SET_BY_ENCODER, named_encoder, open_dataset
from energon_ext.encoders.load import load_mix
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.saved_task import plan_saved
from energon_ext.errors import ConfigError
from energon_ext.packing import make_packer
from energon_ext.plan.cost import is_known
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.run import Run
from energon_ext.plan.spec import SAMPLES, Spec
from energon_ext.plan.topology import Topology
from energon_ext.state.checkpoint_folder import checkpoints_in, cursors_in
from energon_ext.state.schema import check_seal, read_format
from energon_ext.tokenizers.protocol import Tokenizer

#: Command line options that change the spec of a state, by the argument of :func:`change_spec`.
OPTIONS = {"seq_len": "--seq-length", "packing": "--packing", "tokenizer": "--tokenizer"}


class SavedCursor:
    """A cursor of a planned run, read from the folder of its checkpoint."""

    def __init__(self, folder: Path, sealed: Any):
        self.folder, self.state = folder, read_format(check_seal(sealed))
        self.spec = Spec.from_json(self.state["spec"])
        self.step: int = self.state["plan"]["step"]  # the next step, which may be partly read
        self.inside: Mapping[str, Any] = self.state["inside"] or {}  # not empty if partly read

    def dataset(
        self,
        metadataset: Path,
        *,
        ranks: int | None = None,
        workers: int = 0,
        batch_size: int | None = None,
        rows_per_step: int | None = None,
        encoder: str | None = None,
        changed: Mapping[str, Any] | None = None,
        split_part: str,
        trusted_modules: tuple[str, ...],
    ) -> Run:
        """Plan the next run; arguments that are None keep their saved values.

        Args:
            encoder: ``MODULE:FUNCTION`` that returns the task encoder; by default the run is
                planned from the spec in its state.
            changed: options of the run that change its spec, see :func:`change_spec`.
        """
        ranks = ranks or self.inside.get("ranks", 1)
        seed = self.spec.seed
        batch_size = batch_size or self.inside.get("batch_size", 1)
        rows_per_step = rows_per_step or self.state["rows_per_step"]
        options = {name: value for name, value in (changed or {}).items() if value is not None}
        where: dict[str, Any] = {"split_part": split_part, "trusted_modules": trusted_modules}
        if encoder is None:
            if self.inside and (doubt := self.doubt_order()):
                raise ConfigError(f"The state was saved inside a step. {doubt}")
            spec = change_spec(self.spec, **options)
            mix, as_whole = load_mix(metadataset, **where)
            config = WorkerConfig(rank=0, world_size=ranks, num_workers=workers, seed_offset=seed)
            in_layouts = spec.contexts is not None
            topology = Topology.of(config, batch_size, rows_per_step, in_layouts)
            return plan_saved(mix, spec, topology, as_whole)
        if options:
            given = ", ".join(OPTIONS[option] for option in options)
            raise click.UsageError(f"{given}: {SET_BY_ENCODER}.")
        dataset = open_dataset(
            metadataset,
            named_encoder(encoder, DynamicBlendMixin),
            ranks=ranks,
            workers=workers,
            seed=seed,
            batch_size=batch_size,
            rows_per_step=rows_per_step,
            **where,
        )
        blend: Run = find_blend(dataset)
        return blend

    def doubt_order(self) -> str | None:
        """Return why the ranks that read the rows of a step are unknown, or None."""
        if is_known(self.spec.cost):
            return None
        name = (self.spec.cost or {})["name"]
        return (
            f"The rows of a step are balanced over ranks by a cost {name!r} that is not registered "
            f"here: ranks and micro-batches are not those of the run. Give --module with the "
            f"module that registers it, or --encoder."
        )


def change_spec(
    spec: Spec,
    *,
    seq_len: int | None = None,
    packing: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Spec:
    """Return a spec with other options of its run.

    Raises:
        ConfigError: rows of samples, or of chats, are not packed in this way.
    """
    name = spec.kind_of(SAMPLES not in spec.kinds)
    kind = spec.kinds[name]
    if name == SAMPLES and (packing is not None or (seq_len is not None and kind.packer is None)):
        raise ConfigError(
            "--seq-length and --packing: only for packed rows; samples keep the packer of their "
            "encoder, and without one each sample is a row."
        )
    if tokenizer is not None:
        spec = replace(spec, own={**spec.own, "tokenizer": tokenizer.fingerprint()})
    if seq_len is not None:
        spec = replace(spec, row_tokens=seq_len)
        if seq_len % (alignment := spec.loss.get("alignment", 1)):
            raise ConfigError(f"--seq-length {seq_len}: a multiple of {alignment} is needed.")
    if packing is None or packing == (kind.packer or {}).get("name"):
        return spec
    if kind.cut is not None:
        raise ConfigError(f"--packing {packing}: chats are packed whole; leave it out.")
    alignment = spec.loss["alignment"]
    packer = make_packer(packing, spec.row_tokens, alignment=None if alignment == 1 else alignment)
    loss = {**spec.loss, "mask_boundary_loss": not packer.cuts_documents}
    kinds = {**spec.kinds, name: replace(kind, packer=packer.to_json())}
    return replace(spec, kinds=kinds, loss=loss)


def saved_cursors(run: Path, may_be_none: bool = False) -> list[SavedCursor]:
    """Return the cursors of a run, oldest first.

    Args:
        run: folder of a run, of its checkpoints, of one checkpoint or of Megatron-LM's data states.
        may_be_none: return an empty list if it has none; otherwise raise ConfigError.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: does not exist; give the folder of a run or of one checkpoint.")
    cursors = []
    for folder in checkpoints_in(run):
        state = next((state for _, state in cursors_in(folder)), None)
        if isinstance(state, dict) and "plan" in state:
            cursors.append(SavedCursor(folder, state))
    if not cursors and not may_be_none:
        raise ConfigError(
            f"{run}: no data.json of a planned run, and no train_dataloader_dprank000.pt of "
            f"Megatron-LM; give the folder of a run or of one checkpoint."
        )
    return cursors
