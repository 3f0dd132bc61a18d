# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of all packers."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from energon_ext.errors import ConfigError
from energon_ext.packing.pieces import PackPlan, Pieces


@dataclass(frozen=True)
class Packer(ABC):
    """Makes rows of documents, from their lengths alone.

    A subclass is a frozen dataclass. Its fields are its options, with their defaults; it checks
    them in ``__post_init__``. A plan is a pure function of the options and of the arguments of
    :meth:`plan`, so a packer has no state.

    Args:
        seq_len: T, positions of a row.

    Attributes:
        name: under which users choose the packer.
        cuts_documents: documents form one stream that is cut at any token; else a document stays
            whole unless it is longer than a row.

    Raises:
        ConfigError: an option out of range.
    """

    seq_len: int

    name: ClassVar[str]
    cuts_documents: ClassVar[bool]

    def __post_init__(self) -> None:
        seq_len: Any = self.seq_len
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
            raise ConfigError(
                f"seq_len: {seq_len!r} found, an integer >= 2 is needed; a shorter row has no "
                f"transition to train."
            )

    @abstractmethod
    def plan(
        self, carried: Pieces, new: Pieces, *, rows_before: int = 0, last: bool = False
    ) -> PackPlan:
        """Pack a buffer.

        Args:
            carried: pieces that the plan before carried over; the oldest first.
            new: whole documents.
            rows_before: rows that earlier plans made of the same stream. A stream ends with a plan
                that is the last one; documents that come after it begin another stream.
            last: no more will come; nothing is carried over.
        """

    @abstractmethod
    def resumed(self, carried: Pieces) -> Pieces:
        """Restore the stops of carried-over pieces, of which a state has only the starts."""

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "seq_len"]

    def to_json(self) -> dict[str, Any]:
        """Name and options, for the fingerprint of a state; ``seq_len`` has its own entry there."""
        options = asdict(self)
        del options["seq_len"]
        return {"name": self.name, **options}
