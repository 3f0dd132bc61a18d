# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One weight: a constant, or values at breakpoints with a rule for interpolating between them.

Before the first breakpoint a schedule has its first value, after the last one its last value.

=========== =================================================== ======
kind        between (x0, y0) and (x1, y1), t = (x-x0) / (x1-x0) values
=========== =================================================== ======
step        y0                                                  >= 0
linear      y0 + t (y1 - y0)                                    >= 0
cosine      y0 + (y1 - y0) (1 - cos(pi t)) / 2                  >= 0
exponential y0 (y1 / y0)^t                                      > 0
=========== =================================================== ======
"""

import bisect
import math
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from energon_ext.elementwise import apply
from energon_ext.errors import ConfigError
from energon_ext.weights.axis import as_pairs, parse_breakpoint

MAX_WEIGHT = 1e15  # sums and products of weights stay finite

#: Largest warp before a breakpoint; rounding could give 1, which belongs to the breakpoint itself.
_BELOW_ONE = np.nextafter(1.0, 0.0)


class Kind(NamedTuple):
    """How a weight changes from one breakpoint to the next."""

    #: Fraction of the change completed at t, float64 [n] in [0, 1) to float64 [n].
    warp: Callable[[np.ndarray], np.ndarray]
    is_ratio: bool = False  # y1 / y0 is applied instead of y1 - y0; values must be > 0


#: To add a kind, add a line here. Its warp must be non-decreasing, be 0 at t = 0, and for t > 0 be
#: 0 everywhere or nowhere. A weight is then monotone between two breakpoints, and 0 everywhere or
#: nowhere, so ``mixture/checks.py`` checks only the breakpoints and the positions after them.
KINDS = {
    "step": Kind(np.zeros_like),
    "linear": Kind(lambda t: t),
    # 1 - cos would round to 0 for small t.
    "cosine": Kind(lambda t: np.square(apply(math.sin, 0.5 * math.pi * t))),
    "exponential": Kind(lambda t: t, is_ratio=True),
}


class Segment(NamedTuple):
    """A weight between two breakpoints: ``kind`` from ``(x0, y0)`` to ``(x1, y1)``.

    ``end`` is the first position at which another rule applies; a step needs only it and ``y0``.
    """

    kind: str
    end: float
    y0: float
    x0: int = 0
    y1: float = 0.0
    x1: int = 1


class WeightSpec(ABC):
    """A weight that may depend on the position in the run. Immutable, picklable, never negative."""

    #: Whether the user wrote a schedule for this weight.
    is_scheduled: bool = False

    def __new__(cls, *values: Any, **options: Any) -> "WeightSpec":
        if cls is WeightSpec:
            raise ConfigError(
                "WeightSpec(...): use WeightSpec.from_config({'linear': {0: 3, 100: 1}}), "
                "ConstantWeight(3) or ScheduledWeight('linear', {0: 3, 100: 1})."
            )
        return super().__new__(cls)

    @staticmethod
    def from_config(value: Any, where: str = "weight") -> "WeightSpec":
        """Build the weight that a YAML value describes; see :func:`weight_from_config`.

        Example:
            >>> WeightSpec.from_config({"step": {0: 1, 10: 3}}).evaluate(12)
            3.0
        """
        return weight_from_config(value, where)

    @abstractmethod
    def segment(self, position: int) -> Segment:
        """Return the rule that applies at a position, and where it ends."""

    @abstractmethod
    def to_json(self) -> Any:
        """Return the weight as JSON values; two weights are equal if these are."""

    def evaluate(self, position: int) -> float:
        """Return the weight at one position."""
        return float(Weights([self]).at(position)[0])

    def breakpoints(self) -> tuple[int, ...]:
        """Return every position at which the rule changes."""
        return ()

    def unreached(self, end: int) -> list[int]:
        """Return the breakpoints that a run up to a position does not reach.

        What changes gradually may end where the run does; a step there is never seen.
        """

        def is_unreached(point: int) -> bool:
            return point > end or (point == end and self.segment(point - 1).kind == "step")

        return [point for point in self.breakpoints() if is_unreached(point)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightSpec) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(repr(self.to_json()))


class ConstantWeight(WeightSpec):
    """A weight that never changes.

    Example:
        >>> ConstantWeight(5).evaluate(1_000_000)
        5.0
    """

    def __init__(self, value: float):
        self.value = parse_value(value, "weight")

    def segment(self, position: int) -> Segment:
        return Segment("step", math.inf, self.value)

    def to_json(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"{self.value:g}"


class ScheduledWeight(WeightSpec):
    """A weight given by its values at breakpoints, interpolated as described in the module.

    Args:
        kind: ``step``, ``linear``, ``cosine`` or ``exponential``.
        points: ``{breakpoint: value}`` or ``[[breakpoint, value], ...]``, in any order.
        where: the place to name in errors.

    Raises:
        ConfigError: ``kind`` or ``points`` is invalid; the message names the place and the value.

    Example:
        >>> weight = ScheduledWeight("step", {0: 100, 100: 10, 1000: 0})
        >>> [weight.evaluate(i) for i in (0, 99, 100, 999, 1000, 5000)]
        [100.0, 100.0, 10.0, 10.0, 0.0, 0.0]
        >>> ScheduledWeight("linear", {0: 100, 100: 0}).evaluate(50)
        50.0
    """

    is_scheduled = True

    def __init__(
        self,
        kind: str,
        points: Mapping[Any, float] | Iterable[Sequence[Any]],
        where: str = "weight",
    ):
        if kind not in KINDS:
            needed = f"one of {', '.join(KINDS)} is needed"
            raise ConfigError(f"{where}: {kind!r:.80} found, {needed}.")
        pairs: dict[int, float] = {}
        for breakpoint, value in as_pairs(points, f"{where}.{kind}"):
            index = parse_breakpoint(breakpoint, f"{where}.{kind}")
            if index in pairs:
                raise ConfigError(f"{where}.{kind}: breakpoint {index} is given twice; keep one.")
            pairs[index] = parse_value(value, f"{where}.{kind}[{index}]")
            if KINDS[kind].is_ratio and pairs[index] == 0:
                advice = "use a value > 0, `linear`, or a later `step` to 0"
                raise ConfigError(f"{where}.{kind}[{index}]: a ratio never reaches 0; {advice}.")
        if not pairs:
            raise ConfigError(f"{where}.{kind}: no breakpoints; give at least one, like {{0: 1}}.")
        self.kind = kind
        self._breakpoints = tuple(sorted(pairs))
        self._values = tuple(pairs[breakpoint] for breakpoint in self._breakpoints)

    def segment(self, position: int) -> Segment:
        points, values = self._breakpoints, self._values
        index = bisect.bisect_right(points, position) - 1
        if index < 0:
            return Segment("step", points[0], values[0])
        if index == len(points) - 1:
            return Segment("step", math.inf, values[-1])
        right = points[index + 1]
        return Segment(self.kind, right, values[index], points[index], values[index + 1], right)

    def breakpoints(self) -> tuple[int, ...]:
        return self._breakpoints

    def to_json(self) -> Any:
        return {self.kind: [list(point) for point in zip(self._breakpoints, self._values)]}

    def __repr__(self) -> str:
        points = ", ".join(f"{k}: {v:g}" for k, v in zip(self._breakpoints, self._values))
        return f"{self.kind}{{{points}}}"


class Weights:
    """Many weights, evaluated together; between breakpoints this takes no call per weight.

    Positions are exact integers. Only the distance from the latest start of a segment is rounded to
    a float, so schedules over 10^30 tokens are followed to the token.

    Example:
        >>> weights = Weights([ConstantWeight(2), weight_from_config({"linear": {0: 0, 10: 5}})])
        >>> weights.at(4).tolist()
        [2.0, 2.0]
    """

    def __init__(self, weights: Sequence[WeightSpec]):
        self._weights = list(weights)
        self._first, self._end = 0.0, -1.0  # range of positions of the current segments

    def at(self, position: int) -> np.ndarray:
        """Return the value of each weight, float64 [n]; it must not be written to."""
        if not self._first <= position < self._end:
            self._open(position)
        if not self._moving:
            return self._values
        values = self._values.copy()
        rest = float(position - self._origin)
        for kind, where, (before, widths, low, high, log_ratio) in self._moving:
            warp = np.minimum(kind.warp((rest + before) / widths), _BELOW_ONE)
            if kind.is_ratio:
                # Apply the ratio in two halves, since the whole may overflow a float.
                half = apply(math.exp, 0.5 * warp * log_ratio)
                values[where] = low * half * half
            else:
                values[where] = low + warp * (high - low)
        return values

    def _open(self, position: int) -> None:
        segments = [weight.segment(position) for weight in self._weights]
        self._first = float(position)
        self._end = min((segment.end for segment in segments), default=math.inf)
        self._values = np.array([segment.y0 for segment in segments])
        self._origin = max((segment.x0 for segment in segments), default=0)
        self._moving: list[tuple[Kind, np.ndarray, np.ndarray]] = []
        for name, kind in KINDS.items():
            where = [i for i, s in enumerate(segments) if s.kind == name != "step" and s.y0 != s.y1]
            if where:
                moving = [segments[i] for i in where]
                columns = [
                    (
                        *(self._origin - s.x0, s.x1 - s.x0, s.y0, s.y1),
                        math.log(s.y1) - math.log(s.y0) if kind.is_ratio else 0.0,
                    )
                    for s in moving
                ]
                self._moving.append((kind, np.array(where), np.array(columns, np.float64).T))


def weight_from_config(value: Any, where: str = "weight") -> WeightSpec:
    """Build the weight that a YAML value describes.

    Args:
        value: a number, or one of ``{step: ...}``, ``{linear: ...}``, ``{cosine: ...}``,
            ``{exponential: ...}``, with ``{breakpoint: value}`` or ``[[breakpoint, value], ...]``.
        where: the place in the YAML to name in errors.

    Example:
        >>> weight_from_config({"linear": {"0": 1, "3000": 100}}).evaluate(1500)
        50.5
        >>> weight_from_config(-1)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: weight: -1 is not a finite number >= 0.
    """
    if not isinstance(value, Mapping):
        return ConstantWeight(parse_value(value, where))
    if len(value) != 1:
        needed = f"exactly one of {', '.join(KINDS)} is needed"
        if set(value) == {"kind", "points"}:  # the fields of other libraries
            needed = f"write {{{value['kind']}: {value['points']}}}"
        raise ConfigError(f"{where}: {list(value)!s:.200} found, {needed:.200}.")
    ((kind, points),) = value.items()
    return ScheduledWeight(kind, points, where)


def parse_value(value: Any, where: str) -> float:
    """Return a weight as a float; raise ConfigError unless it is a finite number >= 0."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not is_number or not 0 <= value <= MAX_WEIGHT:
        most = f"<= {MAX_WEIGHT:g} and " if is_number and value > MAX_WEIGHT else ""
        raise ConfigError(f"{where}: {value!r:.80} is not a finite number {most}>= 0.")
    return float(value)
