# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A mix and a task become a run, and a dataset that reads it: the only place that plans sources.

The task of an encoder opens its data. Commands take the spec from a state, and their task needs
neither the encoder nor its tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.energon import WorkerConfig

from energon_ext.config.mix import Mix
from energon_ext.encoders.plan_source import plan_sources
from energon_ext.encoders.sources import check_omissions, read_live_weights
from energon_ext.encoders.splicing import Splices, choose_splices
from energon_ext.encoders.task import Passes, Task
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.reader import BatchReader
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import IN_ORDER, blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.source import Source
from energon_ext.plan.spec import Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.context import EncoderContext, encoder_context
from energon_ext.weights import ConstantWeight, ScheduleAxis


def plan_mix(
    mix: Mix,
    task: Task,
    topology: Topology,
    passes: Passes,
    worker_config: WorkerConfig,
    end: ScheduleAxis | None = None,
) -> PlannedDataset:
    """Plan the rows of a mix, and return a dataset that reads them.

    Args, Raises: see :func:`plan_run`.
    """
    spec = replace(task.spec(mix.entries, worker_config.seed_offset), repeat=passes.repeat)
    splices = choose_splices(mix.entries, spec, are_all=not passes.validating)
    run = plan_run(mix, task, spec, splices, topology, passes, end)
    keys = tuple(sorted({key for source in run.sources.values() for key in source.parts}))
    context = EncoderContext(source_keys=keys, pad_id=splices.pad_id)
    batches = BatchReader(
        readers=[source.reader for source in run.sources.values()],
        assemble=functools.partial(task.assemble, context=context),
        padding=functools.partial(_pad, task, run.keys) if spec.pads else None,
    )
    return PlannedDataset(run, batches, worker_config=worker_config)


def plan_run(
    mix: Mix,
    task: Task,
    spec: Spec,
    splices: Splices,
    topology: Topology,
    passes: Passes,
    end: ScheduleAxis | None = None,
) -> Run:
    """Plan the rows of a mix.

    Args:
        end: of the schedules.

    Raises:
        ConfigError: the mix has what the spec does not support.
    """
    sources = plan_sources(mix.entries, task, spec, splices, passes)
    options = RunOptions(
        spec=spec,
        cost=task.cost,
        pass_batches=passes.batches,
        repeats=passes.repeats_blend,
        restarts=not passes.repeat,
    )
    if passes.validating:
        tree = blend_of({source.key: ConstantWeight(1.0) for source in sources}, IN_ORDER)
        clock = Clock(mix.axis, topology, spec.row_tokens)
        return Run(sources, tree=tree, clock=clock, options=options)
    clock = Clock(mix.axis_with(end), topology, spec.row_tokens, mix.run.skip.ranges)
    read_live_weights(mix)
    check_blend(mix, sources, clock, splices=splices.by_key)
    return Run(sources, tree=mix.tree, clock=clock, options=options)


def check_blend(
    mix: Mix,
    sources: Sequence[Source],
    clock: Clock,
    *,
    splices: Mapping[str, Any] | None = None,
    absent: Mapping[str, Any] | None = None,
) -> None:
    """Check what the metadataset says of its sources together.

    Args:
        splices: of spliced sources, by key.
        absent: streamed sources without samples for a worker, by worker.
    """
    check_omissions(mix, sources)
    limits = {source.key: source.max_epochs for source in sources}
    check_mixture(mix.tree, clock.axis, limits, absent or {}, splices or {}, clock.end)


def _pad(task: Task, keys: Sequence[str], source: int, read: Callable[[], Any]) -> Any:
    """Make padding of a row of a source, given by its number."""
    with encoder_context(source_key=keys[source]):
        return task.padding(read)
