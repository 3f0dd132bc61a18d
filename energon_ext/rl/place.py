# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The place of a run in its optimizer steps, and in the passes over the same answers."""

from dataclasses import dataclass


@dataclass
class Place:
    """Counts that are the same on all ranks.

    ::

        version   |           0           |           1           |     weights that answer
        pass      |     0     |     1     |     0     |     1     |     over the same answers
        step      |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |     of the optimizer

    Attributes:
        step: optimizer steps whose batches have all been yielded.
        batches: batches of the next step that have been yielded.
        steps_of_pass: steps of the current pass.
        passes: complete passes over the current answers.
        version: version of the weights, counted from 0.
    """

    step: int = 0
    batches: int = 0
    steps_of_pass: int = 0
    passes: int = 0
    version: int = 0

    def end_batch(self, batches_per_step: int, steps_per_pass: int, passes: int) -> None:
        """Count a batch.

        Example:
            >>> place = Place()
            >>> for _ in range(5):
            ...     place.end_batch(batches_per_step=1, steps_per_pass=1, passes=2)
            >>> place.step, place.passes, place.version
            (5, 1, 2)
        """
        self.batches += 1
        if self.batches < batches_per_step:
            return
        self.batches = 0
        self.step += 1
        self.steps_of_pass += 1
        if self.steps_of_pass < steps_per_pass:
            return
        self.steps_of_pass = 0
        self.passes += 1
        if self.passes == passes:
            self.passes = 0
            self.version += 1
