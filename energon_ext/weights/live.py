# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights that a controller sets while a run trains: a file that grows line by line.

Each line is a JSON object with the weights for a range of steps::

    {"from_step": 0, "through": 199, "weights": {"web": 0.5, "code": 2}}
    {"from_step": 200, "through": 399, "weights": {"web": 0.75}}

Each line begins where the previous one ends. A planner waits for the line that covers its step, so
rows depend on the content of the file and not on when it is read. A line without ``through`` covers
all later steps and must be the last. A source that a line does not name keeps the weight of its
entry, as all sources do before the first line.
"""

import contextlib
import json
import math
import os
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from energon_ext.arguments import check_integer, choices
from energon_ext.data_files import open_data, parse_json, read_to_limit, reading
from energon_ext.errors import ConfigError, StateMismatchError, WorkerError, log_of
from energon_ext.keyed import sha256
from energon_ext.weights.schedule import Segment, WeightSpec, parse_value

logger = log_of(__name__)

MAX_BYTES = 2**28
_FIELDS = {"from_step", "through", "weights"}
_LONGEST_PAUSE = 1.0  # seconds between two reads of a file


class Line(NamedTuple):
    """The weights for a range of steps; ``through=None`` means all later steps."""

    from_step: int
    through: int | None
    weights: Mapping[str, float]

    @property
    def stop(self) -> float:
        """The first step after the range."""
        return math.inf if self.through is None else self.through + 1

    def to_json(self) -> dict[str, Any]:
        through = {} if self.through is None else {"through": self.through}
        return {"from_step": self.from_step, **through, "weights": dict(self.weights)}

    def to_bytes(self) -> bytes:
        """Return the line as it is written to the file."""
        return json.dumps(self.to_json()).encode() + b"\n"


class LiveWeights:
    """The file behind ``weights_file``: read by every planner, appended to by one controller.

    Args:
        path: the file, which need not exist yet.
        names: source names that lines may contain; None for any.
        key: identifies the file in a state.

    Attributes:
        deadline: seconds that a planner waits for a line.
        patience: seconds after which it logs that it waits, again after twice the time, and so on.
        lines: the lines read so far.

    State: the number of lines used, and a digest of their first steps and weights.

    Example:
        >>> import tempfile
        >>> live = LiveWeights(tempfile.mkdtemp() + "/live.jsonl")
        >>> live.set(0, {"web": 3, "code": 1}, through=199)
        >>> live.next_step
        200
        >>> live.set(100, {"web": 1})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: .../live.jsonl: from_step: 100 found, 200 is needed; ...
    """

    def __init__(self, path: str | Path, names: Iterable[str] | None = None, key: str = ""):
        self.path, self.key = Path(path), key
        self._names = None if names is None else frozenset(names)
        self.deadline, self.patience = 450.0, 10.0
        self.lines: list[Line] = []
        self._states: list[dict[str, Any]] = [{"lines": 0, "digest": ""}]  # after each line
        self._bytes = 0  # bytes of the complete lines read so far
        self._has_partial_line = False  # an incomplete line follows them

    @property
    def next_step(self) -> int | None:
        """The first step that no line covers yet; None after a line without ``through``."""
        self.read()
        return None if self._stop == math.inf else int(self._stop)

    def set(self, from_step: int, weights: Mapping[str, float], through: int | None = None) -> None:
        """Append a line; it is on disk when the call returns.

        Args:
            from_step: :attr:`next_step`, or any step for the first line. No planner is past it, so
                a line never comes too late.
            weights: by source key or by name in the metadataset; sources not listed keep the
                weights of their entries.
            through: the last step of these weights; None for all later ones.

        Raises:
            ConfigError: the steps overlap earlier lines or leave a gap, or a weight is not a finite
                number >= 0.
            OSError: the line cannot be written; the file stays as it was.
        """
        self.read()
        given = Line(from_step, through, weights).to_json()
        data = self._check_line(given, str(self.path)).to_bytes()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if self._has_partial_line:  # a controller was killed while writing
                os.ftruncate(descriptor, self._bytes)
            if os.write(descriptor, data) < len(data):
                os.ftruncate(descriptor, self._bytes)
                raise OSError(f"{self.path}: no space left for a line; nothing was written.")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def before(self, step: int) -> list[Line]:
        """Return the lines for all steps before ``step``, with the last one cut off there."""
        kept = self.lines[: self._count(step)]
        if step and not kept:
            return [Line(0, step - 1, {})]
        return [line if line.stop <= step else line._replace(through=step - 1) for line in kept]

    def read(self) -> None:
        """Read the lines appended since the last call.

        Raises:
            ConfigError: a line is malformed, or lines read earlier are gone.
        """
        size, content = 0, b""
        absent = contextlib.suppress(FileNotFoundError)
        with reading(self.path), absent, open_data(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self._bytes)
            content = read_to_limit(file, MAX_BYTES, self.path)
        if size < self._bytes:
            problem = "lines read earlier are gone; lines may only be appended"
            raise ConfigError(f"{self.path}: {problem}. Stop the run and resume it.")
        *lines, rest = content.split(b"\n")
        for data in lines:
            self._append(data, f"{self.path}: line {len(self.lines) + 1}")
        self._has_partial_line = bool(rest)

    def _append(self, data: bytes, where: str) -> None:
        try:
            value = parse_json(data)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {data[:80]!r} found, a JSON object is needed ({error})."
            ) from error
        line = self._check_line(value, where)
        names = line.weights if self._names is None else self._names
        for name in line.weights:
            if name not in names:
                raise ConfigError(
                    f"{where}: no source {name!r}; there are {choices(name, names)} If a run has "
                    f"used this line, which must then stay, and the source was removed or renamed, "
                    f"name a new weights_file; it begins with the first step to come."
                )
        state = self._states[-1]
        if self.lines or line.weights:  # a first line without weights changes nothing
            content = state["digest"] + json.dumps([line.from_step, line.weights], sort_keys=True)
            digest = sha256(content)
            state = {"lines": state["lines"] + 1, "digest": digest}
        self.lines.append(line)
        self._states.append(state)
        self._bytes += len(data) + 1

    def _check_line(self, value: Any, where: str) -> Line:
        """Return a line that may follow the existing ones, or raise ConfigError."""
        if not isinstance(value, dict) or not {"from_step", "weights"} <= value.keys() <= _FIELDS:
            needed = "from_step, weights and optionally through are needed"
            raise ConfigError(f"{where}: {value!r:.80} found; {needed}.")
        first, through, weights = value["from_step"], value.get("through"), value["weights"]
        check_integer(f"{where}: from_step", first, 0)
        if "through" in value:
            check_integer(f"{where}: through", through, first)
        if self.lines and first != self._stop:
            needed = "no further line" if self._stop == math.inf else f"{self._stop}"
            raise ConfigError(
                f"{where}: from_step: {first} found, {needed} is needed; {self._covered}."
            )
        if not isinstance(weights, dict):
            raise ConfigError(f"{where}: weights: {weights!r:.80} found, a mapping is needed.")
        checked = {k: parse_value(weight, f"{where}: {k}") for k, weight in weights.items()}
        return Line(int(first), None if through is None else int(through), checked)

    def wait(self, step: int) -> None:
        """Wait until a line covers a step; raise WorkerError if none does before the deadline."""
        began, patience = time.monotonic(), self.patience
        if not self.covers(step):
            self.read()
        while not self.covers(step):
            waited = time.monotonic() - began
            if waited >= self.deadline:
                problem = f"no line covers step {step} after {self.deadline:g} s; {self._covered}"
                advice = "Check that the controller is running and ahead of the plan."
                raise WorkerError(f"{self.path}: {problem}. {advice}")
            if waited >= patience:
                problem = f"no line covers step {step} yet; {self._covered}"
                times = f"waited {waited:.0f} s, until {self.deadline:g} s"
                logger.warning("%s: %s (%s).", self.path, problem, times)
                patience = 2 * waited
            time.sleep(min(_LONGEST_PAUSE, 0.01 + waited / 10))
            self.read()

    @property
    def _stop(self) -> float:
        """The first step after all lines."""
        return self.lines[-1].stop if self.lines else 0

    @property
    def _covered(self) -> str:
        """The steps that the file covers so far, for messages."""
        if not self.lines:
            return f"the file has no {'complete ' * self._has_partial_line}line"
        first, through, _ = self.lines[-1]
        steps = f"steps {first} to {'the end' if through is None else through}"
        rest = ", and an incomplete line follows" if self._has_partial_line else ""
        return f"the last line ({len(self.lines)}) covers {steps}{rest}"

    def covers(self, step: int) -> bool:
        """Return whether the lines read so far decide the weights of a step."""
        return step < self._stop

    def at(self, step: int) -> tuple[Mapping[str, float], float]:
        """Return the weights by name, and the first step at which they may change.

        If no line covers the step yet, these are the weights of the last line, and ``step`` itself.
        """
        count = self._count(step + 1)
        weights = self.lines[count - 1].weights if count else {}
        later = self.lines[count].from_step if count < len(self.lines) else self._stop
        return weights, max(later, step)

    def _count(self, steps: int) -> int:
        """Return how many lines begin within the first ``steps`` steps of a run."""
        return bisect_left(self.lines, steps, key=lambda line: line.from_step)

    def describe_used(self, steps: int) -> dict[str, Any]:
        """Return the number and digest of the lines that planned the first ``steps`` steps."""
        return dict(self._states[self._count(steps)])

    def check_used(self, saved: Mapping[str, Any], steps: int) -> None:
        """Raise StateMismatchError unless the file has the lines that planned the first steps."""
        self.read()
        count = self._count(steps)
        # A trace starts at the step in which the state was saved, which may have used its line.
        if saved not in self._states[count : count + 2] or not self.covers(steps - 1):
            now = self._states[count]
            before, after = (f"{each['lines']} {each['digest'][:12]}" for each in (saved, now))
            raise StateMismatchError(
                {f"{self.path}: lines for the steps before {steps}": (before, after)},
                f"Now {self._covered}. Lines already used must not change; later ones may. Restore "
                f"the file, or resume from an earlier state.",
            )


class LiveWeight(WeightSpec):
    """The weight of one member: from the current line if that names it, else from its entry."""

    is_scheduled = True

    def __init__(self, live: LiveWeights, names: Sequence[str], entry_weight: WeightSpec):
        self._live, self._names, self._entry_weight = live, names, entry_weight

    def segment(self, position: int) -> Segment:
        weights, end = self._live.at(position)
        for name in self._names:
            if name in weights:
                return Segment("step", end, weights[name])
        segment = self._entry_weight.segment(position)
        return segment._replace(end=min(segment.end, end))

    def breakpoints(self) -> tuple[int, ...]:
        begins = (line.from_step for line in self._live.lines)
        return tuple(sorted({*begins, *self._entry_weight.breakpoints()}))

    def to_json(self) -> Any:
        return {"live": self._entry_weight.to_json()}

    def __repr__(self) -> str:
        return f"{self._entry_weight!r} or {self._live.path.name}"
