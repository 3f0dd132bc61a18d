# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run left in its ``metrics.jsonl``, as arrays.

A file is one JSON object a line. ``start`` opens a process, ``step`` is one optimizer step,
``save`` and ``end`` are marks. A process that resumed writes ``start`` with the step it resumed
from: steps after it that an earlier process had written are done again, and the later line counts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError

FILE_NAME = "metrics.jsonl"
SOURCE_KEY = re.compile(r"(?P<path>.*?)(?P<split>:\w+)?(?P<rest>[\[{#].*)?", re.DOTALL)
REWARD = re.compile("rollout/reward/mean$|eval/")  # fields that tell how good a policy is


#: What the report reads of an event, and its form, see :func:`_fits`.
FIELDS: dict[str, dict[str, Any]] = {
    "start": {
        "step": int,
        "sources": [str],
        "documents": {str: int},
        "rows_per_step": int,
        "config": dict,
        "names": {str: str},
        "interleaves": {str: int},
    },
    "step": {
        "step": int,
        "loss": float,
        "tokens_per_second": float,
        "planned_share": {str: float},
        "tokens": {str: int},
        "documents": {str: int},
        "loss_by_source": {str: float},
        "batch_hash": str,
    },
    "evaluation": {"step": int},
}


#: What an older run does not have.
ADDED: dict[str, dict[str, Any]] = {"start": {"names": {}, "interleaves": {}}}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of ``S`` steps over ``n`` sources, all its processes joined."""

    sources: tuple[str, ...]  # keys, as the batches name them
    labels: tuple[str, ...]  # short names of the sources, for people
    titles: tuple[str, ...]  # their names in the metadataset, and the keys of the others
    epoch_documents: np.ndarray  # int64 [n], documents in one epoch of each source
    interleaves: np.ndarray  # int64 [n], above a source; 0 where a blend draws it
    rows_per_step: int
    resumed_after: tuple[int, ...]  # steps after which another process went on
    config: dict[str, Any]  # what the run says of itself
    step: np.ndarray  # int64 [S], 1..S
    loss: np.ndarray  # float64 [S], nats per token, NaN where a step was skipped
    tokens_per_second: np.ndarray  # float64 [S]
    planned_share: np.ndarray  # float64 [S, n], rows add up to 1
    tokens: np.ndarray  # int64 [S, n], positions drawn from each source
    documents: np.ndarray  # int64 [S, n], documents that ended
    source_loss: np.ndarray  # float64 [S, n], NaN where a step has no token of the source
    batch_hash: tuple[str, ...]  # one per step, over everything the step consumed
    measured: dict[str, np.ndarray]  # float64 [S] each, reward and evaluations of a policy

    @classmethod
    def load(cls, run_dir: Path) -> "Run":
        """Read ``run_dir/metrics.jsonl``.

        Raises:
            ConfigError: no such file, a damaged line (with its number), or no step in it.
        """
        path = run_dir / FILE_NAME
        starts: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for where, event in _events(path):
            if event["event"] == "start":
                starts.append(event)
                del steps[event["step"] :]
            if event["event"] == "evaluation":
                steps[-1:] = [event | step for step in steps[-1:]]
                continue
            expected = len(steps) + (event["event"] == "step")
            if event["step"] != expected:
                raise ConfigError(
                    f"{where}: {event['event']} of step {event['step']} found where step "
                    f"{expected} was expected; lines are missing or out of order."
                )
            if event["event"] == "step":
                steps.append(event)
        if not starts or not steps:
            raise ConfigError(f"{path}: no training step in it yet; nothing to report.")
        return cls._from_events(starts, steps)

    @classmethod
    def _from_events(cls, starts: list[dict[str, Any]], steps: list[dict[str, Any]]) -> "Run":
        last = starts[-1]
        # Sources may come and go between processes: all that ever were, in order of appearance.
        sources = tuple(dict.fromkeys(key for start in starts for key in start["sources"]))
        documents = {key: count for start in starts for key, count in start["documents"].items()}

        def table(field: str, missing: float, dtype: type) -> np.ndarray:
            return np.array([[s[field].get(key, missing) for key in sources] for s in steps], dtype)

        return cls(
            sources=sources,
            labels=short_labels(sources, last["names"]),
            titles=tuple(last["names"].get(key, key) for key in sources),
            epoch_documents=np.array([documents.get(key, 0) for key in sources], np.int64),
            interleaves=np.array([last["interleaves"].get(key, 0) for key in sources], np.int64),
            rows_per_step=last["rows_per_step"],
            resumed_after=tuple(s["step"] for s in starts if 0 < s["step"] < len(steps)),
            config=last["config"],
            step=np.arange(1, len(steps) + 1),
            loss=np.array([s["loss"] for s in steps], np.float64),
            tokens_per_second=np.array([s["tokens_per_second"] for s in steps], np.float64),
            planned_share=table("planned_share", 0.0, np.float64),
            tokens=table("tokens", 0, np.int64),
            documents=table("documents", 0, np.int64),
            source_loss=table("loss_by_source", np.nan, np.float64),
            batch_hash=tuple(s["batch_hash"] for s in steps),
            measured={
                name: np.array([s.get(name, np.nan) for s in steps], np.float64)
                for name in sorted({name for s in steps for name in s if REWARD.match(name)})
            },
        )


def mean_of_finite(values: np.ndarray) -> float:
    """The mean of what is a number; NaN where nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


def short_labels(keys: Sequence[str], names: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Their names, and the last parts of the other keys' paths, as many as tell them apart.

    Example:
        >>> short_labels(["../data/prose:train", "../data/code:train"])
        ('prose', 'code')
        >>> short_labels(["a/web:train", "b/web:train", "b/web:train#2"])
        ('a/web', 'b/web', 'b/web#2')
    """
    if names:
        return tuple(names.get(key, label) for key, label in zip(keys, short_labels(keys)))
    parts = [_parts(key) for key in keys]
    if len({part["split"] for part in parts}) == 1:
        parts = [{**part, "split": ""} for part in parts]
    for depth in range(1, 2 + max((key.count("/") for key in keys), default=0)):
        labels = tuple(
            "/".join(part["path"].split("/")[-depth:]) + part["split"] + part["rest"]
            for part in parts
        )
        if len(set(labels)) == len(keys):
            return labels
    return tuple(keys)


def _parts(key: str) -> dict[str, str]:
    match = SOURCE_KEY.fullmatch(key)
    assert match is not None  # the path alone matches any text
    return match.groupdict(default="")


def _events(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give the --run-dir of a training run.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: damaged, not JSON ({error}).") from error
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ConfigError(f"{where}: damaged, an object with 'event' was expected.")
            if event["event"] not in FIELDS:
                continue
            event = {**ADDED.get(event["event"], {}), **event}
            for name, form in FIELDS[event["event"]].items():
                if name not in event:
                    raise ConfigError(f"{where}: damaged, {event['event']} has no {name!r}.")
                if not _fits(event[name], form):
                    raise ConfigError(f"{where}: damaged, {name!r} is {event[name]!r}.")
            yield where, event


def _fits(value: Any, form: Any) -> bool:
    """Whether a JSON value has a form: a type, ``[type]`` or ``{str: type}``; int is a count."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_fits(each, form[str]) for each in value.values())
    if form in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and 0 <= value < 2**63
    return isinstance(value, form)
