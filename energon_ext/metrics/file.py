# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``metrics.jsonl`` of a run: its schema, its writer and its reader.

The file contains one JSON object per line, each with ``event`` and ``step``: ``start`` opens a
process, ``step`` is one optimizer step, ``evaluation`` and ``answers`` follow a step,
``consumption`` and ``save`` belong to a checkpoint, and ``end`` is a mark. A process that resumes
writes ``start`` with the step it resumed from. Steps after that one are done again, so the later
line counts.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from energon_ext.data_files import open_data, parse_json
from energon_ext.errors import ConfigError, log_of
from energon_ext.metrics.labels import short_labels
from energon_ext.plan.blend import Blend
from energon_ext.plan.epochs import EpochCount
from energon_ext.state.schema import COUNT, check_shape

logger = log_of(__name__)

FILE_NAME = "metrics.jsonl"
MAX_LINE_BYTES = 2**26
MAX_SOURCES, MAX_COUNTS = 10_000, 100_000_000
MEASURED = re.compile("rollout/reward/mean$|eval/")  # fields that measure a policy
VALIDATION = re.compile("val/(loss|memorized)")


#: Largest numbers of an event: counts that can be added up over all steps, and what float32 holds.
_MAX_COUNT, _MAX_NUMBER = 2**36, 3.5e38


def _number(value: Any, where: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (math.isfinite(value) and abs(value) > _MAX_NUMBER):
        raise ConfigError(
            f"{where}: {value!r:.80} found, a number is needed that float32 can hold; the line is "
            f"damaged."
        )


def _count(value: Any, where: str) -> None:
    check_shape(value, COUNT, where)
    if value > _MAX_COUNT:
        raise ConfigError(f"{where}: {value} found, at most {_MAX_COUNT:,} is possible.")


def _epoch_count(value: Any, where: str) -> None:
    check_shape(value, [COUNT], where)
    if len(value) != len(EpochCount._fields):
        raise ConfigError(f"{where}: {value!r:.80} found, three counts are needed.")


def _sources(value: Any, where: str) -> None:
    check_shape(value, [str], where)
    if not value:
        raise ConfigError(f"{where}: empty; a run reads at least one source.")


Event = dict[str, Any]

#: Source, reward and text of an answer; text between « and » is not trained on.
Answer = tuple[str, float, str]

#: Fields of an event that the report reads.
FIELDS: dict[str, Event] = {
    "start": {
        "step": COUNT,
        "sources": _sources,
        "documents": {str: COUNT},
        "epoch_tokens": {str: COUNT},
        "epoch_counts": {str: _epoch_count},
        "rows_per_step": COUNT,
        "config": {str: object},
        "names": {str: str},
        "interleaves": {str: COUNT},
        "data_digest": str,
    },
    "step": {
        "step": COUNT,
        "loss": _number,
        "tokens_per_second": _number,
        "planned_share": {str: _number},
        "tokens": {str: _count},
        "documents": {str: _count},
        "loss_by_source": {str: _number},
        "batch_hash": str,
    },
    "evaluation": {"step": COUNT},
    "answers": {"step": COUNT, "answers": [{"source": str, "reward": _number, "text": str}]},
}

#: Defaults of fields that older runs lack.
ADDED: Event = {
    "names": {},
    "interleaves": {},
    "epoch_tokens": {},
    "epoch_counts": {},
    "data_digest": "",
}


class MetricsFile:
    """Appends events to the ``metrics.jsonl`` of a run.

    Args:
        run_dir: folder of the run, which is created if necessary.

    Example:
        >>> import tempfile
        >>> with MetricsFile(Path(tempfile.mkdtemp())) as file:
        ...     file.write("end", 3, reason="finished")
        ...     file.path.read_text()
        '{"event": "end", "step": 3, "reason": "finished"}\\n'
    """

    def __init__(self, run_dir: Path):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE_NAME
        _remove_unfinished_line(self.path)
        # Line buffering, so that a killed process leaves whole lines.
        self._file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        self._file.write(json.dumps({"event": event, "step": step, **fields}) + "\n")

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def describe_blend(blend: Blend) -> dict[str, Any]:
    """Return the fields of a ``start`` event that describe the data of a run."""
    return {
        "sources": list(blend.documents),
        "documents": blend.documents,
        "epoch_tokens": blend.epoch_tokens,
        "epoch_counts": {key: list(count) for key, count in blend.epoch_counts.items()},
        "names": blend.names,
        "interleaves": blend.interleaves,
        "data_digest": blend.data_digest,
    }


@dataclass(frozen=True, slots=True)
class Run:
    """A run of ``S`` steps over ``n`` sources, with all its processes joined."""

    sources: tuple[str, ...]  # keys
    labels: tuple[str, ...]  # short display names of the sources
    titles: tuple[str, ...]  # names in the metadataset, or keys
    epoch_documents: np.ndarray  # int64 [n], documents per epoch of each source
    epochs: np.ndarray  # float64 [n], epochs read; an epoch may have other sizes in each process
    interleaves: np.ndarray  # int64 [n], interleaves above a source; 0 if a blend draws it
    rows_per_step: int
    resumed_after: tuple[int, ...]  # steps after which another process continued
    data_digests: tuple[str, ...]  # one per step: what decides its rows; empty if unknown
    config: dict[str, Any]  # configuration recorded by the run
    step: np.ndarray  # int64 [S], 1..S
    loss: np.ndarray  # float64 [S], nats per token; NaN for a skipped step
    tokens_per_second: np.ndarray  # float64 [S]
    planned_share: np.ndarray  # float64 [S, n], each row sums to 1
    tokens: np.ndarray  # int64 [S, n], positions drawn from each source
    documents: np.ndarray  # int64 [S, n], documents completed
    source_loss: np.ndarray  # float64 [S, n]; NaN if a step has no token of the source
    batch_hash: tuple[str, ...]  # one per step, over everything that the step consumed
    measured: dict[str, np.ndarray]  # float64 [S] each; reward and evaluations of a policy
    validation: dict[str, np.ndarray]  # float64 [2, evaluations]; steps, and loss or P(z)
    answers: tuple[tuple[int, Answer], ...]  # logged answers of a policy with their steps

    def validation_curves(self, what: str) -> dict[str, np.ndarray]:
        """Return one metric of ``validation`` by the key of its source or document."""
        curves = self.validation.items()
        return {name[len(what) + 1 :]: xy for name, xy in curves if name.startswith(f"{what}/")}

    @classmethod
    def load(cls, run_dir: Path) -> "Run":
        """Read ``run_dir/metrics.jsonl``; errors name the damaged line."""
        starts, steps, evaluated, answered = _history(run_dir / FILE_NAME)
        last = starts[-1]
        # Sources may change between processes: take all of them, in order of appearance.
        sources = tuple(dict.fromkeys(key for start in starts for key in start["sources"]))
        if len(sources) > MAX_SOURCES or len(sources) * len(steps) > MAX_COUNTS:
            limit = f"at most {MAX_SOURCES:,} sources, and {MAX_COUNTS:,} over all steps"
            size = f"{len(sources):,} sources in {len(steps):,} steps"
            raise ConfigError(f"{run_dir / FILE_NAME}: {size} found; a report takes {limit}.")
        documents = {key: count for start in starts for key, count in start["documents"].items()}
        measured = sorted({name for step in steps for name in step if MEASURED.match(name)})

        def of_sources(counts: dict[str, int]) -> np.ndarray:
            return np.array([counts.get(key, 0) for key in sources], np.int64)

        def column(field: str) -> np.ndarray:
            return np.array([step.get(field, np.nan) for step in steps], np.float64)

        def table(field: str, missing: float, dtype: type) -> np.ndarray:
            return np.array([[s[field].get(key, missing) for key in sources] for s in steps], dtype)

        tokens_read = table("tokens", 0, np.int64)
        documents_read = table("documents", 0, np.int64)
        return cls(
            sources=sources,
            labels=short_labels(sources, last["names"]),
            titles=tuple(last["names"].get(key, key) for key in sources),
            epoch_documents=of_sources(documents),
            epochs=_epochs(starts, sources, tokens_read, documents_read),
            interleaves=of_sources(last["interleaves"]),
            rows_per_step=last["rows_per_step"],
            resumed_after=tuple(s["step"] for s in starts if 0 < s["step"] < len(steps)),
            data_digests=_digests(starts, len(steps)),
            config=last["config"],
            step=np.arange(1, len(steps) + 1),
            loss=column("loss"),
            tokens_per_second=column("tokens_per_second"),
            planned_share=table("planned_share", 0.0, np.float64),
            tokens=tokens_read,
            documents=documents_read,
            source_loss=table("loss_by_source", np.nan, np.float64),
            batch_hash=tuple(step["batch_hash"] for step in steps),
            measured={name: column(name) for name in measured},
            validation=_validation(evaluated),
            answers=tuple(
                (step, (each["source"], float(each["reward"]), each["text"]))
                for step, event in sorted(answered.items())
                for each in event["answers"]
            ),
        )


def _history(path: Path) -> tuple[list[Event], list[Event], dict[int, Event], dict[int, Event]]:
    """Return the starts of processes, the steps that count, evaluations and answers by step."""
    starts: list[Event] = []
    steps: list[Event] = []
    evaluated: dict[int, Event] = {}
    answered: dict[int, Event] = {}
    for where, event in _events(path):
        kind = event["event"]
        if kind == "evaluation":
            if steps:
                steps[-1] = event | steps[-1]
            evaluated[event["step"]] = event
            continue
        if kind == "start":
            starts.append(event)
            del steps[event["step"] :]
            evaluated = {step: known for step, known in evaluated.items() if step <= len(steps)}
            answered = {step: known for step, known in answered.items() if step <= len(steps)}
        expected = len(steps) + (kind == "step")
        if event["step"] != expected:
            found = f"{kind} of step {event['step']} found where step {expected} was expected"
            raise ConfigError(f"{where}: {found}; lines are missing or out of order.")
        if kind == "step":
            steps.append(event)
        elif kind == "answers":
            answered[event["step"]] = event
    if not starts or not steps:
        raise ConfigError(f"{path}: no training step yet; nothing to report.")
    return starts, steps, evaluated, answered


def _digests(starts: Sequence[Event], steps: int) -> tuple[str, ...]:
    """Return the data digest of each step: that of the process which did it last."""
    digests: list[str] = []
    for start in starts:
        digests[start["step"] :] = [start["data_digest"]] * (steps - start["step"])
    return tuple(digests)


def _epochs(
    starts: Sequence[Event], sources: Sequence[str], tokens: np.ndarray, documents: np.ndarray
) -> np.ndarray:
    """Return the epochs of each source.

    What each process read is counted with its own size of an epoch, as a resume may change it.

    Args:
        tokens, documents: read in each step, [steps, sources].
    """
    owners, epochs = np.zeros(len(tokens), int), np.zeros(len(sources))
    for number, start in enumerate(starts):
        owners[start["step"] :] = number
    for number, start in enumerate(starts):
        of_process = owners == number
        read = tokens[of_process].sum(0).tolist(), documents[of_process].sum(0).tolist()
        epochs += [
            epochs_after(start, key, *counts) - epochs_after(start, key, 0, 0)
            for key, *counts in zip(sources, *read)
        ]
    return epochs


def epochs_after(
    about: Mapping[str, Any],
    key: str,
    tokens: float,
    documents: float,
    before: tuple[float, float] = (0, 0),
) -> float:
    """Return the epochs of a source that a run has read; by documents if tokens are unknown.

    Args:
        about: of the start of a process, see :func:`describe_blend`.
        tokens, documents: read by that process.
        before: tokens and documents read before it.
    """
    size = about["epoch_tokens"].get(key, 0)
    if count := about["epoch_counts"].get(key):
        return EpochCount(*count).after(tokens, size) if size else 0.0
    if size:
        return (before[0] + tokens) / size
    return (before[1] + documents) / max(1, about["documents"].get(key, 0))


def _validation(evaluated: Mapping[int, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    points: dict[str, list[tuple[float, float]]] = {}
    for step, event in sorted(evaluated.items()):
        for name in filter(VALIDATION.match, event):
            points.setdefault(name, []).append((step, event[name]))
    return {name: np.array(pairs, np.float64).T for name, pairs in points.items()}


def mean_of_finite(values: np.ndarray) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


def _remove_unfinished_line(path: Path) -> None:
    """Remove what a full disk left of a line, to which the next line would be appended."""
    if not path.is_file():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(max(0, end - MAX_LINE_BYTES))
        unfinished = file.read().rpartition(b"\n")[2]
        file.truncate(end - len(unfinished))
    logger.warning("%s: removed the last line, which was not written whole.", path)


def _events(path: Path) -> Iterator[tuple[str, Event]]:
    if not path.is_file():
        raise ConfigError(f"{path}: does not exist; give the folder of a training run.")
    with open_data(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            where = f"{path}:{number}"
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                logger.warning("%s: left out, since it was not written whole.", where)
                return
            try:
                event = parse_json(line)
            except ValueError as error:
                reason = error if len(line) < MAX_LINE_BYTES else f"over {MAX_LINE_BYTES:,} bytes"
                raise ConfigError(f"{where}: damaged, not JSON ({reason}).") from error
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ConfigError(f"{where}: damaged, a JSON object with 'event' is needed.")
            kind, event = event["event"], {**ADDED, **event}
            if kind not in FIELDS:
                continue
            if missing := FIELDS[kind].keys() - event.keys():
                raise ConfigError(f"{where}: {kind} has no {', '.join(sorted(missing))}.")
            measured = (n for n in event if MEASURED.match(n) or VALIDATION.match(n))
            fields = FIELDS[kind] | dict.fromkeys(measured, _number)
            check_shape({name: event[name] for name in fields}, fields, f"{where}: {kind}")
            yield where, event
