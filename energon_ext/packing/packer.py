# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Base class of all packers."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from energon_ext.errors import ConfigError
from energon_ext.packing.pieces import PackPlan, Pieces


@dataclass(frozen=True)
class Packer(ABC):
    """Packs documents into rows, from their lengths alone.

    A subclass is a frozen dataclass. Its fields are its options with their defaults, checked in
    ``__post_init__``. A pack plan is a pure function of the options and of the arguments of
    :meth:`plan`, so a packer has no state.

    Args:
        seq_len: T, positions per row.

    Attributes:
        name: selects the packer in ``make_packer``.
        cuts_documents: whether documents form one stream that is cut at any token; if not, a
            document stays whole unless it is longer than a row.

    Raises:
        ConfigError: an option is out of range.
    """

    seq_len: int

    name: ClassVar[str]
    cuts_documents: ClassVar[bool]

    def __post_init__(self) -> None:
        seq_len: Any = self.seq_len
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
            raise ConfigError(
                f"seq_len: {seq_len!r} found, an integer >= 2 is needed; shorter rows have no "
                f"transition to train."
            )

    @abstractmethod
    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        """Pack a buffer of documents into rows.

        Args:
            carried: pieces carried over from the previous plan, the oldest first.
            new: whole documents.
            rows_before: rows in earlier plans of the same stream. A plan with ``last`` ends the
                stream; later documents begin another one.
            last: no more documents will come, so nothing is carried over.
        """

    def with_stops(self, carried: Pieces) -> Pieces:
        """Compute the stops of carried-over pieces, here the ends of their documents.

        A state contains only their starts, unless they stop elsewhere.
        """
        return carried

    def to_json(self) -> dict[str, Any]:
        """Return name and options, for a fingerprint; ``seq_len`` is a separate field there."""
        options = asdict(self)
        del options["seq_len"]
        return {"name": self.name, **options}
