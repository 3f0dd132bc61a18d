# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The names under which torch, Megatron's loops and Energon call the state of a loader."""

from abc import ABC, abstractmethod
from typing import Any, Mapping


class SavesState(ABC):
    """A loader whose state everybody saves and restores under the name he knows.

    A loader defines :meth:`state_dict` and :meth:`load_state_dict`; the other methods call these.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch drawn, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; call this before the first batch is drawn."""

    def save_state(self) -> dict[str, Any]:
        """Call :meth:`state_dict`; this is the name in Megatron's loops."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any] | None) -> None:
        """Call :meth:`load_state_dict`; this is the name in Megatron's loops."""
        if state is not None:
            self.load_state_dict(state)

    def save_state_rank(self) -> dict[str, Any]:
        """Call :meth:`state_dict`; this is the name in Energon's loader."""
        return self.state_dict()

    def restore_state_rank(self, state: Mapping[str, Any] | None) -> None:
        """Call :meth:`load_state_dict`; this is the name in Energon's loader."""
        self.restore_state(state)
