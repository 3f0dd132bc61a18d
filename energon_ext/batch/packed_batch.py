# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One batch contract for pretraining, fine-tuning and reinforcement learning."""

from dataclasses import dataclass, field
from typing import ClassVar, Iterator, TypeVar

import torch
import torch.nn.functional as F

from energon_ext.batch.transport import (
    Detachable,
    build,
    move,
    replace_tensors,
    tensors_of,
    values_of,
)
from energon_ext.errors import SampleError

B = TypeVar("B", bound="PackedBatch")

#: Types of the tensors of a batch; a subclass may have others.
DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "token_weights": torch.float32,
    "log_probs": torch.float32,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "source_ids": torch.int32,
    "source_documents": torch.int32,
    "rewards": torch.float32,
    "pair_ids": torch.int32,
    # Only in a ContextParallelSlice.
    "aligned_ends": torch.int32,
    "document_ends": torch.int32,
}


@dataclass
class PackedBatch(Detachable):
    """A batch of packed rows as flat, contiguous tensors; ``N`` positions, ``n`` segments.

    ``token_weights`` encode the task, so training steps are the same for all tasks.

    A subclass may add fields, for example images: tensors of any type and shape, plain values, and
    lists, tuples and dictionaries of them. They move with the batch. Context parallelism cuts the
    added tensors like tokens, at their N positions; name those that every rank needs whole in
    ``whole_fields``.

    Attributes:
        whole_fields: of a subclass, names of fields that context parallelism must not cut.
        tokens: int64 [N], model input.
        labels: int64 [N], the target at position i; Megatron-core's GPTModel does not shift.
        token_weights: float32 [N], weight of the loss at position i. 0 on padding, where the label
            belongs to another document and where the task masks; negative where a policy gradient
            lowers the probability.
        position_ids: int64 [N], 0.. in each segment.
        cu_seqlens: int32 [n + 1], segment ends; first 0, last N. Padding is a separate segment.
        max_seqlen: length of the longest segment.
        source_ids: int32 [n], index into ``sources`` of each segment, -1 for padding.
        sources: keys of all sources of the run.
        source_documents: int32 [len(sources)], documents of each source that end in this batch.
        cu_seqlens_padded: int32 [m + 1], or None unless segments are aligned for context
            parallelism: ends of the segments, each with the padding that aligns the next one.
        log_probs: float32 [N] or None, log-probabilities from a sampler, for metrics only.
        rewards: float32 [n] or None, reward of each segment, for metrics only.
        pair_ids: int32 [n] or None, 0.. for the pairs of answers in the batch, the same for both
            segments of a pair; -1 for others. Weights are positive on the chosen answer and
            negative on the rejected one.
        columns: further values of tokens by name, ``[N, *item]`` each, for losses and models of
            your own: those that a source has as a :class:`~energon_ext.batch.columns.Column`, of
            its type and at its inputs or labels, and float32 [N] of the labels.
        row_tokens: positions of each row, T; 0 if unknown.
        segments: further values of documents by name, ``[n, *item]`` each, of the document of each
            segment; fill values for padding.
        context_size: in a layout, the context-parallel ranks that share this batch; else None, for
            those of the run.

    Example:
        >>> import numpy as np
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> row = Row([np.array([5, 6, 7])], source="web", documents=1)
        >>> batch = BatchAssembler(seq_len=4)([row, row], sources=("code", "web"))
        >>> batch.cu_seqlens.tolist(), batch.source_ids.tolist()
        ([0, 3, 4, 7, 8], [1, -1, 1, -1])
        >>> batch.tokens_per_source()
        {'web': 6}
        >>> batch.grid(1, 2, 4)["segment_ids"].tolist()
        [[[1, 1, 1, 0], [1, 1, 1, 0]]]
    """

    whole_fields: ClassVar[tuple[str, ...]] = ()

    tokens: torch.Tensor
    labels: torch.Tensor
    token_weights: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    source_ids: torch.Tensor
    sources: tuple[str, ...]
    source_documents: torch.Tensor
    cu_seqlens_padded: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    pair_ids: torch.Tensor | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    segments: dict[str, torch.Tensor] = field(default_factory=dict)
    context_size: int | None = None
    row_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, including padding (``N``)."""
        return self.tokens.numel()

    def segment_lengths(self) -> torch.Tensor:
        """Return the length of each segment, including padding: int32 [n]."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def segment_sources(self) -> torch.Tensor:
        """Return the index into ``sources`` at each position, -1 on padding: int64 [N]."""
        # With output_size, torch does not wait for a GPU.
        return torch.repeat_interleave(
            self.source_ids.long(), self.segment_lengths().long(), output_size=self.num_tokens
        )

    @property
    def most_pairs(self) -> int:
        """A number above all ``pair_ids``, known without waiting for a GPU."""
        return len(self.source_ids)

    def pair_starts(self) -> torch.Tensor:
        """Return 1 at the first position of each pair, 0 elsewhere: float32 [N].

        Raises:
            SampleError: the batch has no ``pair_ids``.
        """
        if self.pair_ids is None:
            raise SampleError("The batch has no pair_ids; a PreferenceTaskEncoder makes them.")
        # Ids rise from pair to pair. With context parallelism, the first position is on one rank.
        highest = F.pad(self.pair_ids.cummax(0).values, (1, 0), value=-1)
        is_first = (self.pair_ids > highest[:-1]).repeat_interleave(
            self.segment_lengths().long(), output_size=self.num_tokens
        )
        return (is_first & (self.position_ids == 0)).float()

    def padding_mask(self) -> torch.Tensor:
        """Return a mask of the padding: bool [N]."""
        return self.segment_sources() < 0

    def tokens_per_source(self) -> dict[str, int]:
        """Return the positions of each source, without padding and absent sources."""
        counts = torch.bincount(
            self.source_ids + 1, self.segment_lengths(), minlength=len(self.sources) + 1
        )
        return self._by_source(counts[1:])

    def documents_per_source(self) -> dict[str, int]:
        """Return the documents that end in this batch by source, without sources that have none."""
        return self._by_source(self.source_documents)

    def _by_source(self, counts: torch.Tensor) -> dict[str, int]:
        return {key: int(count) for key, count in zip(self.sources, counts.tolist()) if count}

    def grid(
        self, accumulation: int, rows: int, seq_len: int, dtype: torch.dtype = torch.int64
    ) -> dict[str, torch.Tensor]:
        """Return the batch as ``[A, B, T]`` arrays: A micro-batches of B rows of T positions.

        Args:
            dtype: ``torch.int64`` gives views of this batch, ``torch.int32`` copies.

        Returns:
            ``input_ids``, ``labels``, ``segment_ids`` (1.. in each row, 0 = padding) and
            ``attention_mask`` (bool, False on padding).

        Raises:
            SampleError: the number of positions is not A·B·T.
        """
        shape = (accumulation, rows, seq_len)
        if accumulation * rows * seq_len != self.num_tokens:
            raise SampleError(
                f"grid{shape} needs {accumulation * rows * seq_len} positions, "
                f"the batch has {self.num_tokens}."
            )
        present = self.source_ids >= 0
        lengths = self.segment_lengths().long()
        by_row = (accumulation * rows, seq_len)
        not_padding = torch.repeat_interleave(present, lengths).view(by_row)
        segment_ids = torch.repeat_interleave(present.cumsum(0), lengths).view(by_row)
        # Number the segments of every row from 1; a row may begin with padding.
        segment_ids = segment_ids - segment_ids[:, :1] + not_padding[:, :1].long()
        segment_ids = segment_ids * not_padding
        return {
            "input_ids": self.tokens.view(shape).to(dtype),
            "labels": self.labels.view(shape).to(dtype),
            "segment_ids": segment_ids.view(shape).to(dtype),
            "attention_mask": not_padding.view(shape),
        }

    def to_megatron(self) -> dict[str, torch.Tensor]:
        """Return the batch as Megatron-core's dictionary of one packed sequence."""
        return {
            "tokens": self.tokens[None],
            "labels": self.labels[None],
            "loss_mask": self.token_weights[None],
            "position_ids": self.position_ids[None],
            "padding_mask": self.padding_mask()[None],
            "cu_seqlens": self.cu_seqlens[None],
            "max_seqlen": torch.tensor([self.max_seqlen], dtype=torch.int32),
        }

    def validate(self) -> "PackedBatch":
        """Return the batch, or raise SampleError with the first rule of the contract it breaks."""
        segments = len(self.source_ids)
        lengths = {
            "cu_seqlens": segments + 1,
            "source_ids": segments,
            "source_documents": len(self.sources),
            "rewards": segments,
            "pair_ids": segments,
        }
        for field_name, count in (("columns", self.num_tokens), ("segments", segments)):
            for name, tensor in getattr(self, field_name).items():
                if tensor.shape[:1] != (count,):
                    raise SampleError(
                        f"PackedBatch.{field_name}[{name!r}] must have the shape [{count}, ...], "
                        f"got {list(tensor.shape)}."
                    )
        for name, dtype in DTYPES.items():
            if (tensor := getattr(self, name, None)) is None:
                continue
            any_length = name in ("cu_seqlens_padded", "aligned_ends", "document_ends")
            shape = [len(tensor) if any_length else lengths.get(name, self.num_tokens)]
            if tensor.dtype != dtype or list(tensor.shape) != shape:
                raise SampleError(
                    f"PackedBatch.{name} must be {dtype} {shape}, "
                    f"got {tensor.dtype} {list(tensor.shape)}."
                )
        for holds, rule in self._rules():
            if not holds:
                raise SampleError(f"PackedBatch breaks its contract: {rule}.")
        return self

    def _rules(self) -> Iterator[tuple[bool | torch.Tensor, str]]:
        ends, lengths, sources = self.cu_seqlens, self.segment_lengths(), self.source_ids
        weights = self.token_weights
        yield ends[0] == 0, "cu_seqlens starts at 0"
        yield ends[-1] == self.num_tokens, "cu_seqlens ends at N"
        yield (lengths > 0).all(), "every segment has at least one position"
        yield self.max_seqlen == lengths.max(), "max_seqlen is the longest segment"
        yield sources.max() < len(self.sources), "source_ids point into sources"
        yield sources.min() >= -1, "source_ids are -1 or an index"
        yield weights.isfinite().all(), "token_weights are finite"
        yield not weights[self.padding_mask()].any(), "token_weights are 0 on padding"
        if (pairs := self.pair_ids) is not None:
            found = pairs[pairs >= 0]
            fits = pairs.min() >= -1 and (found.diff() >= 0).all()
            fits = fits and (torch.bincount(found) <= 2).all()
            yield fits, "pair_ids are -1 or rise, and no pair has more than two segments"
        if (padded := self.cu_seqlens_padded) is not None:
            fits = padded[0] == 0 and padded[-1] == self.num_tokens and (padded.diff() > 0).all()
            fits = fits and torch.isin(ends[:-1][sources >= 0], padded).all()
            yield fits, "cu_seqlens_padded rises from 0 to N, with the start of every document"

    def pin_memory(self: B, device: torch.device | str | None = None) -> B:
        """Return the batch in page-locked memory, where batches of the loader already are.

        Elsewhere it is copied there if there is a GPU; torch's loader calls this.
        """
        if torch.cuda.is_available():
            torch.cuda.init()  # before that no memory is page-locked
        return move(self, lambda block: block)

    def to(self: B, device: torch.device | str, non_blocking: bool = True) -> B:
        """Return the batch on a device; from the host it is one copy, by default asynchronous.

        Do not write to a batch on the host while it is copied.
        """

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        values = values_of(self)
        is_on_host = all(tensor.device.type == "cpu" for tensor in tensors_of(values))
        if is_on_host and torch.device(device).type != "cpu":
            return move(self, to_device)
        return build(type(self), replace_tensors(values, to_device))
