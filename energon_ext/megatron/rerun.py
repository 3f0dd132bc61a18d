# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A loader in a training loop that runs doubtful steps again: Megatron-LM's, Megatron-Bridge's.

Where the result of a step is rejected twice, such a loop saves the model before the step and ends,
to run the step again in another process. The data has gone on by then.
"""

from typing import Any

from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from energon_ext.megatron.loader import MegatronEnergonLoader


class RerunLoader(MegatronEnergonLoader):
    """A loader whose state, saved within a step, stands before that step."""

    _step = -1
    _before_step: Any = None

    def __next__(self) -> Any:
        machine = get_rerun_state_machine()
        validates = machine.get_mode() == RerunMode.VALIDATE_RESULTS
        if validates and machine.current_iteration != self._step:
            self._step, self._before_step = machine.current_iteration, self.loader.mark()
        return super().__next__()

    def save_state(self) -> dict[str, Any]:
        """The state after the last step that was taken."""
        if is_inside_step() and self._before_step is not None:
            return self.loader.state_dict(self._before_step)
        return super().save_state()


def is_inside_step() -> bool:
    """Whether the loop has begun a step and not taken it."""
    return bool(get_rerun_state_machine().state != RerunState.NOT_RUNNING_YET)
