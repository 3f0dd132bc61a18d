# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of the choosers of some workers as the states of any other number of workers.

What was consumed together stays what was consumed together: counts and clocks are sums, of which
every new worker gets an equal part. The draws of the new workers are other draws.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence


def part_of(total: int, worker: int, workers: int) -> int:
    """An equal part of an integer; the parts of all workers add up to it.

    Example:
        >>> [part_of(10, worker, 4) for worker in range(4)]
        [3, 3, 2, 2]
    """
    return total // workers + (worker < total % workers)


def redealt_chooser_state(
    states: Sequence[Mapping[str, Any]], worker: int, workers: int
) -> dict[str, Any]:
    """The state of one of ``workers`` choosers that continue what others did.

    Args:
        states: of :meth:`~energon_ext.mixture.choosers.Chooser.save_state`, of every old worker.

    Example:
        >>> from energon_ext.mixture.choosers import RandomChooser
        >>> old = RandomChooser(["a", "b"], counts={"a": 7, "b": 2}).save_state()
        >>> redealt_chooser_state([old], 0, 2)["counts"]
        {'a': 4, 'b': 1}
    """
    first = states[0]
    state = {
        "version": first["version"],
        "counts": {
            key: part_of(sum(each["counts"].get(key, 0) for each in states), worker, workers)
            for key in first["counts"]
        },
        "dropped": sorted(set.intersection(*(set(each["dropped"]) for each in states))),
    }
    if "draws" in first:
        state["draws"] = max(each["draws"] for each in states)
    if "clocks" in first:
        state.update(_redealt_clocks(states, workers))
    if "root" in first:
        state["root"] = redealt_chooser_state([each["root"] for each in states], worker, workers)
        state["children"] = {
            name: redealt_chooser_state(
                [each["children"][name] for each in states], worker, workers
            )
            for name in first["children"]
        }
    return state


def _redealt_clocks(states: Sequence[Mapping[str, Any]], workers: int) -> dict[str, Any]:
    first = states[0]
    return {
        "ties_drawn": max(each["ties_drawn"] for each in states),
        "turns": {},  # everyone lines up again, by the clocks
        "clocks": {
            key: sum(each["clocks"].get(key, 0.0) for each in states) / workers
            for key in first["clocks"]
        },
        "at_rest": first["at_rest"],
        "batch_index": first["batch_index"],
    }
