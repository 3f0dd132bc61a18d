# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The frames of spliced documents, as a plan draws them."""

import copy
from collections import Counter
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import log_of
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.order import ENDLESS
from energon_ext.plan.rows import Rows, TakenRows, Window
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.index import SpliceIndex
from energon_ext.splice.pairs import Contents, longest_content
from energon_ext.splice.validation import GridIndex

logger = log_of(__name__)

#: Maximum number of documents that get their own line in the debug log.
LOGGED = 1024


class Frames(Rows):
    """Frames of chosen documents, by number.

    State: the number of contents that were shown, one integer. The order depends on the seed, the
    key of the source, the configuration and the chosen documents.

    Args:
        numbers, names: number of each chosen document in the source, and its name in batches.
        metadata: further information about each chosen document.
        config, seq_len: how frames are filled, and S, their number of positions.
        epochs: passes over the examples, None for no end.
        fingerprint: JSON values that the order depends on; states with other values are rejected.
        subset: see :attr:`~energon_ext.plan.rows.Rows.subset`.
    """

    kind = "spliced"

    def __init__(
        self,
        examples: SpliceIndex | GridIndex,
        numbers: Sequence[int],
        names: Sequence[str],
        *,
        config: SpliceFields,
        seq_len: int,
        epochs: float | None,
        fingerprint: Mapping[str, Any],
        metadata: Sequence[Mapping[str, Any]] = (),
        key: str = "",
        subset: tuple[int, int] | None = None,
    ):
        super().__init__(key, fingerprint)
        self.examples = examples
        self.names = list(names)
        self.metadata = list(metadata)
        self.config = config
        self.numbers = list(numbers)
        self._seq_len = seq_len
        self.subset = subset
        self._in_pass = ENDLESS if epochs is None else int(epochs * examples.size)
        self.window = Window()
        self.next_row = 0  # contents that were shown

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Examples per epoch, averages if documents take turns, and expected shares, by name."""
        shares = self._by_name(self.examples.token_shares())
        return {n: (k, shares[n]) for n, k in self._by_name(self.examples.quotas).items()}

    def metadata_of(self, name: str) -> list[dict[str, Any]]:
        """Return the metadata of the documents with a name; several may share one."""
        return [dict(data) for other, data in zip(self.names, self.metadata) if other == name]

    def _by_name(self, values: np.ndarray) -> dict[str, Any]:
        sums: Counter[str] = Counter()
        for name, value in zip(self.names, values.tolist()):
            sums[name] += value
        return dict(sums)

    def at(self, window: Window, next_row: int) -> "Frames":
        other = copy.copy(self)
        other.window, other.next_row = window, next_row
        return other

    def begin_pass(self) -> None:
        self.window = Window(pass_start=self.next_row)

    def options(self) -> dict[str, Any]:
        return {"max_epochs": self._in_pass}

    @property
    def is_finite(self) -> bool:
        return self._in_pass < ENDLESS

    @property
    def _end(self) -> int:
        """The number of the content after the last one."""
        return self.window.pass_start + self._in_pass

    @property
    def ended(self) -> bool:
        return self.next_row >= self._end

    def take(self, count: int) -> "TakenFrames":
        size = count
        while True:
            stop = min(self.next_row + size, self._end)
            contents = self.examples.locate(np.arange(self.next_row, stop))
            ends = self._frame_ends(contents.copy_lens, stop == self._end)[:count]
            if len(ends) == count or stop == self._end:
                break
            size *= 2  # a packed frame contains several contents
        begins = [0, *ends]
        places = [slice(begin, end) for begin, end in zip(begins, ends)]
        self.next_row += begins[-1]
        return TakenFrames(self, [Contents(*(c[place] for c in contents)) for place in places])

    def _frame_ends(self, copy_lens: np.ndarray, is_last: bool) -> list[int]:
        """Return the ends of frames; with ``pack_contents``, frames are filled while they fit."""
        if not self.config.pack_contents:
            return list(range(1, len(copy_lens) + 1))
        ends, filled = [], 0
        for index, copy_len in enumerate(copy_lens.tolist()):
            if filled and filled + copy_len > self._seq_len:
                ends.append(index)
                filled = 0
            filled += copy_len
        # Later contents may still fit into the frame after the last end.
        return [*ends, len(copy_lens)] if is_last and filled else ends

    def tokens_of(self, frame: Contents) -> int:
        """Return the number of tokens in the row of a frame."""
        prefix = int(frame.offsets[0]) if self.config.attend_prefix else 0
        return prefix + int(frame.copy_lens.sum())

    def restore_state(self, state: Mapping[str, Any], packing: Any = None) -> None:
        self.check_state(state)
        self.window = Window(pass_start=state["pass_start"])
        self.next_row = state["next_row"]


def splices_of(dataset_or_loader: Any) -> list[Frames]:
    """Return the spliced sources of a dataset or loader."""
    sources = find_blend(dataset_or_loader).sources.values()
    rows = [getattr(source, "first_rows", None) for source in sources]
    return [each for each in rows if isinstance(each, Frames)]


class TakenFrames(TakenRows):
    """Frames that were taken from a source but not read yet."""

    def __init__(self, source: Frames, frames: list[Contents]):
        self._source = source
        self._frames = frames
        self.num_documents = sum(len(frame.starts) for frame in frames)
        self.num_tokens = sum(map(source.tokens_of, frames))

    def __len__(self) -> int:
        return len(self._frames)

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        if self._source.config.attend_prefix:
            lengths = [np.array([self._source.tokens_of(frame)]) for frame in self._frames]
        else:
            lengths = [frame.copy_lens for frame in self._frames]
        return np.concatenate(lengths), np.cumsum(list(map(len, lengths)))

    def contents(self, number: int) -> list[tuple[int, int, int]]:
        frame = self._frames[number]
        ends = (frame.starts + frame.copy_lens).tolist()
        numbers = [self._source.numbers[chosen] for chosen in frame.documents.tolist()]
        return list(zip(numbers, frame.starts.tolist(), ends))

    def description(self, number: int) -> Contents:
        return self._frames[number]


def log_plan(index: SpliceIndex, numbers: np.ndarray, source: str) -> None:
    """Log what will be shown, with one line per document at DEBUG, for the first documents."""
    config = index.config
    fields = ["content_length", "cut_at_frame_end", "content_stride", "offset_stride", "alpha"]
    fields += ["offset_jitter", "balance_mode", "balance_tau"]
    logger.info(
        "%s: %d documents of %d to %d tokens, contents of up to %d in frames of %d, %d pairs, %d "
        "examples per epoch; %s, %s.",
        *(source, len(numbers), index.doc_lengths.min(), index.doc_lengths.max()),
        *(longest_content(index.seq_len, config), index.seq_len, index.pairs.sum(), index.size),
        config.placement,
        ", ".join(f"{name} {getattr(config, name)}" for name in fields if hasattr(config, name)),
    )
    columns = (numbers, index.doc_lengths, index.pairs, index.quotas, index.coverage())
    for number, length, pairs, quota, coverage in zip(*(column[:LOGGED] for column in columns)):
        logger.debug(
            "%s/doc%d: %d tokens, %d pairs, %g examples, each token shown %.2f times.",
            *(source, number, length, pairs, quota, coverage),
        )
