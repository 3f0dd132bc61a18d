# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws samples from any Energon datasets by weights that change over the run.

Each worker of Energon's loader draws on its own, one sample at a time, from its part of every
source, by the weights of the batch that it is assembling. A state belongs to its worker. In it,
every source has its own entry by key, so sources may be added, removed, reordered and reweighted
between two runs.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import add_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_ext.arguments import check_choice
from energon_ext.errors import ConfigError, StateMismatchError, log_of
from energon_ext.keyed import stable_hash
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BASELINE, BLEND, INTERLEAVE, NEW_SOURCES, Tree, blend_of
from energon_ext.plan.blend import Blend
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.state.match import check_fingerprint, match_sources
from energon_ext.state.schema import COUNT, MIXTURE, check_class
from energon_ext.streamed.samples import SAMPLES, StreamedSamples, num_tokens_of
from energon_ext.streamed.source import StreamedSource
from energon_ext.streamed.spread import line_up
from energon_ext.weights import ScheduleAxis

logger = log_of(__name__)

#: The class of states and restore keys, independent of the class of the blend.
STATE_CLASS, STATE_VERSION = "EnergonExtBlend", 4
_BLEND = type(STATE_CLASS, (), {})()

_SHAPE = {
    "fingerprint": {str: object},
    "axis": str,
    "drawn": COUNT,
    "batch": COUNT,
    "moved": {str: str},
    "mixture": MIXTURE,
    "sources": {str: SAMPLES},
}

#: The interleave of a worker begins as if it had made up to this many draws; if all workers began
#: with the first draw, they would all draw the same member at the same time.
_MAX_DRAWS_BEFORE = 4096


class StreamedBlend(Blend, BaseWrapperDataset):
    """Yields samples of several sources in the order in which a mixture draws them.

    Args:
        sources: sources whose ``rows`` are Energon datasets.
        worker_config: Energon's.
        tree: the mixture; None for one node over all sources, by their weights.
        clock: positions on the schedule axis; by default, breakpoints count batches of one rank.
        fingerprint: JSON values saved with a state; states with other values are rejected.
        size_of: returns the tokens of a sample; by default its ``num_tokens``, or 1.
        repeats: start over within one iteration when all sources have ended.
        restarts: start over with the first sample in the next iteration.
        new_source: ``baseline`` or ``zero``, the initial credit in an interleave of a source that
            a resumed state lacks; ignored with a tree, whose nodes have their own.

    State: the mixture and each source; grows with the buffers of the sources.
    """

    is_planned = False
    sources: Mapping[str, StreamedSource]
    rule = BLEND  # of the only node if no tree is given

    def __init__(
        self,
        sources: Sequence[StreamedSource],
        *,
        worker_config: WorkerConfig,
        tree: Tree | None = None,
        clock: Clock | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        size_of: Callable[[Any], float] = num_tokens_of,
        repeats: bool = False,
        restarts: bool = False,
        new_source: str = BASELINE,
    ):
        check_choice("new_source", new_source, NEW_SOURCES)
        weights = {source.key: source.weight_spec for source in sources}
        tree = tree or blend_of(dict(sorted(weights.items())), self.rule, new_source=new_source)
        clock = clock or Clock(ScheduleAxis(), Topology.of(worker_config, None, None))
        Blend.__init__(self, sources, tree, clock)
        for key in self.loss_weights:
            raise ConfigError(
                f"loss_weight: {key} is streamed, so the source of a sample is unknown when a "
                f"batch is made; only planned sources have one."
            )
        datasets = [source.rows for source in self.sources.values()]
        BaseWrapperDataset.__init__(self, datasets, worker_config=worker_config)
        self._samples = [StreamedSamples(source, size_of) for source in self.sources.values()]
        self._repeats, self._restarts = repeats, restarts
        self.fingerprint = {
            **(fingerprint or {}),
            "seed": worker_config.seed_offset,
            "rank": worker_config.rank,
            "workers of all ranks": self.topology.workers * self.topology.ranks,
        }
        self.reset_state_own()

    @property
    def interleaves(self) -> dict[str, int]:
        return {}  # shares are kept within each worker, not over the run

    def reset_state_own(self) -> None:
        for samples in self._samples:
            samples.reset()
        self._mixture: Mixture | None = None  # created in the worker, whose number it depends on
        self._moved: dict[str, str] = {}
        self._retained: dict[str, Any] = {}
        self._drawn = self._batch = 0  # samples drawn, and the batch index of the last one

    def len_worker(self, worker_idx: int | None = None) -> int:
        return sum(dataset.len_worker(worker_idx) for dataset in self.datasets)

    # Drawing ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        for samples in self._samples:
            samples.open()
        yield from self._pass()
        while self._repeats and self._drawn:
            for samples in self._samples:
                samples.begin_again()
            yield from self._pass()
        if self._restarts:
            self.reset_state_own()

    def _pass(self) -> Iterator[Any]:
        while (number := self._draw()) is not None:
            samples = self._samples[number]
            if (sample := samples.next()) is None:
                limit = samples.source.max_epochs
                logger.info("%s: read to its end (max_epochs: %s).", samples.source.key, limit)
                continue
            self._settle(number, samples.size_of(sample))
            self._drawn += 1
            yield add_sample_restore_key(sample, self.keys[number], src=_BLEND)

    def _draw(self) -> int | None:
        """Return the number of the next source; None if all have ended."""
        config = WorkerConfig.active_worker_config
        if config is not None:
            self._batch = int(config.active_worker_batch_index)
        elif not self._is_constant:
            raise ConfigError(
                "A scheduled blend was iterated without a loader, so it has no batch index; use "
                "megatron.energon.get_savable_loader(dataset)."
            )
        mixture, position = self._active_mixture(), self._position()
        mixture.ended[:] = [samples.ended for samples in self._samples]
        if mixture.ended.all():
            return None
        if not mixture.open(position):
            remedy = "raise a max_epochs, or use fewer workers"
            raise mixture.error_of_weights(position, "samples", remedy)
        return int(mixture.draw(np.array([self._drawn]))[0])

    @functools.cached_property
    def _is_constant(self) -> bool:
        """True if no weight depends on the batch, so that no loader is needed to draw."""
        weights = [weight for node in self.tree.nodes() for weight in node.weights]
        return not self.live_weights and not any(weight.is_scheduled for weight in weights)

    def _settle(self, number: int, size: float) -> None:
        mixture, tokens = self._active_mixture(), np.zeros(len(self.keys), np.int64)
        tokens[number] = round(size)
        if not self._drawn:
            mixture.restart_counts(size)
        mixture.settle(tokens)

    def _position(self) -> int:
        """Return the position of the last batch for which samples were drawn."""
        topology = self.topology
        return self.clock.at(self._batch // topology.rounds, self._batch * topology.rows_per_round)

    def _active_mixture(self) -> Mixture:
        """Return the mixture of this worker, whose interleaves begin at a worker-specific draw."""
        if self._mixture is None:
            config = self.worker_config
            worker = config.rank * self.topology.workers + config.rank_worker_id()
            key = f"{config.seed_offset}/worker {worker}"
            unit = self.clock.axis.one
            mixture = self._mixture = Mixture(self.tree, self.keys, seed=key, unit=unit)
            if worker and mixture.credits() and mixture.open(self.clock.at(0, 0)):
                drawn = mixture.draw(np.arange(1 + stable_hash(key) % _MAX_DRAWS_BEFORE))
                mixture.settle(np.bincount(drawn, minlength=len(self.keys)))
                mixture.restart_counts()
        return self._mixture

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        mixture = self._active_mixture()
        sources = {s.source.key: FlexState(s.save_state()) for s in self._samples}
        return FlexState(
            __class__=STATE_CLASS,
            version=STATE_VERSION,
            fingerprint=dict(self.fingerprint),
            axis=self.clock.axis.counted,
            drawn=self._drawn,
            batch=self._batch,
            moved=dict(self._moved),
            mixture=FlexState(mixture.credits_to_json(mixture.credits())),
            sources=FlexState({**self._retained, **sources}),
        )

    def restore_state(self, state: FlexState) -> None:
        """Continue from :meth:`save_state`; a state that is rejected changes nothing."""
        self.check_state(state)
        state = copy.deepcopy(state)  # stock datasets keep references to parts of it
        self.reset_state_deep()
        states = dict(state["sources"])
        matched = match_sources(states, self.source_names)
        places = {saved: each["spread"] for saved, each in states.items()}
        places |= {now: places.pop(before) for now, before in matched.items()}
        line_up(self.sources.values(), places)
        for samples in self._samples:
            if (key := matched.get(samples.source.key)) is not None:
                samples.restore_state(states.pop(key))
        self._retained = states
        self._drawn, self._batch = state["drawn"], state["batch"]
        renamed = {old: key for key, old in matched.items() if old != key}
        before = {old: renamed.get(key, key) for old, key in state["moved"].items()}
        self._moved = {**before, **renamed}  # samples in buffers keep their old keys
        mixture = self._active_mixture()
        mixture.ended[:] = [samples.ended for samples in self._samples]
        mixture.restore_state(state["mixture"], renamed, self._position())

    def check_state(self, state: Any) -> None:
        """Raise if this blend cannot continue from a state."""
        advice = "It was saved without this package's mixin, or with planned sources. Finish that "
        advice += "run with its original setup, or start a new one."
        check_class(state, STATE_CLASS, STATE_VERSION, _SHAPE, advice)
        check_fingerprint(
            state["fingerprint"],
            self.fingerprint,
            advice="A streamed blend only continues with the ranks x workers that saved it; "
            "planned sources continue with any number.",
        )
        for key, saved in match_sources(state["sources"], self.source_names).items():
            files = state["sources"][saved]["files"]
            check_fingerprint(files, self.sources[key].fingerprint, key)

    # Restoring single samples, for buffers above ------------------------------------------------

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        _, key = restore_key[:2]
        key = self._moved.get(key, key)
        if key not in self.sources:
            raise StateMismatchError(
                {"buffered sample of source": (key, list(self.keys))},
                "A source with samples in a shuffle or packing buffer cannot be removed yet; set "
                "`weight: 0` until they have been drawn.",
            )
        sample = self.sources[key].rows.restore_sample(restore_key[2:])
        return add_sample_restore_key(sample, key, src=_BLEND)

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "sources": list(self.sources),
            "datasets": [dataset.config() for dataset in self.datasets],
            "worker_config": self.worker_config.config(),
        }


class DynamicBlendDataset(StreamedBlend):
    """Draws each sample from a random source, by the current weights.

    Args: as for :class:`StreamedBlend`; the weight of each source may be a schedule.
    """


#: The name of Energon's class for constant weights.
BlendDataset = DynamicBlendDataset


class LeastConsumedDataset(StreamedBlend):
    """Draws each sample from the source that is furthest behind its share of tokens.

    Within a worker, the tokens of each source follow the weights to within about one sample; see
    :class:`~energon_ext.mixture.interleave.InterleaveSampler`.

    Args: as for :class:`StreamedBlend`; weights are target shares.
    """

    rule = INTERLEAVE


class BlendFactory:
    """A blend as the factory of one dataset, with the members that Energon's stages use."""

    # Energon only checks whether samples are crude, and the sources have already cooked them.
    __sample_type__ = None

    def __init__(self, blend: StreamedBlend):
        self._blend = blend

    def __len__(self) -> int:
        return 1

    def build(self, worker_rotation_offset: int = 0) -> StreamedBlend:
        return self._blend
