# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One batch contract for pretraining, fine-tuning and reinforcement learning."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

import torch

from energon_ext.errors import SampleError

#: Of the tensors of a batch. Those of 8 bytes come first, so every field of a buffer is aligned.
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
    # Of a part of a batch, for context parallelism.
    "aligned_ends": torch.int32,
    "document_ends": torch.int32,
}

#: The other fields; the last two are those of a part of a batch.
HOST_FIELDS = ("sources", "max_seqlen", "longest_aligned", "whole_length")


@dataclass
class PackedBatch:
    """A batch of packed rows as flat, contiguous tensors; ``N`` positions, ``n`` segments.

    ``token_weights`` carries what the task wants from the loss, so a training step never asks
    which task it is.

    Attributes:
        tokens: int64 [N], model input.
        labels: int64 [N], the target at position i; Megatron-core's GPTModel does not shift.
        token_weights: float32 [N], weight of the loss at position i. 0 on padding, where the label
            belongs to another document and wherever the task masks; negative where a policy
            gradient pushes away.
        position_ids: int64 [N], 0.. in each segment.
        cu_seqlens: int32 [n + 1], segment ends; first 0, last N. Padding is its own segment.
        max_seqlen: length of the longest segment.
        source_ids: int32 [n], index into ``sources`` of each segment, -1 for padding.
        sources: keys of the sources a batch of this run may hold.
        source_documents: int32 [len(sources)], documents of each source that end in this batch.
        cu_seqlens_padded: int32 [m + 1] or None. Set when segments are aligned for context
            parallelism: ends of the segments, each with the padding that aligns the next one.
        log_probs: float32 [N] or None, log-probabilities of a sampler, for metrics only.
        rewards: float32 [n] or None, reward of each segment, for metrics only.

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

    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields that are there, in the order of a buffer."""
        fields = {name: getattr(self, name, None) for name in DTYPES}
        return {name: value for name, value in fields.items() if value is not None}

    def header(self) -> dict[str, Any]:
        """Layout and host fields, which a buffer does not hold, as JSON values."""
        of_host = {name: getattr(self, name) for name in HOST_FIELDS if hasattr(self, name)}
        return {"layout": self._layout(), **of_host}

    def as_buffer(self) -> torch.Tensor:
        """The bytes of all fields, as one uint8 tensor: whatever carries it carries the batch.

        It is page-locked where there is a GPU, so that copying it does not wait.
        """
        parts = [each.contiguous().view(torch.uint8) for each in self.tensors().values()]
        buffer = host_buffer(sum(map(len, parts)))
        return torch.cat(parts, out=buffer)

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, header: Mapping[str, Any]) -> "PackedBatch":
        """The batch whose fields are views of a uint8 tensor; the inverse of both of these."""
        fields = {**header, "sources": tuple(header["sources"])}
        return cls(**fields_of(buffer, fields.pop("layout")), **fields)

    @property
    def num_tokens(self) -> int:
        """Positions in the batch, padding included (``N``)."""
        return self.tokens.numel()

    def segment_lengths(self) -> torch.Tensor:
        """int32 [n], length of each segment, padding segments included."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def segment_sources(self) -> torch.Tensor:
        """int64 [N], index into ``sources`` at each position, -1 on padding."""
        # Told how long the result is, a GPU is not asked for it.
        return torch.repeat_interleave(
            self.source_ids.long(), self.segment_lengths().long(), output_size=self.num_tokens
        )

    def padding_mask(self) -> torch.Tensor:
        """bool [N], True on padding."""
        return self.segment_sources() < 0

    def tokens_per_source(self) -> dict[str, int]:
        """Positions of each source that is present, padding left out."""
        counts = torch.bincount(
            self.source_ids + 1, self.segment_lengths(), minlength=len(self.sources) + 1
        )
        return self._by_source(counts[1:])

    def documents_per_source(self) -> dict[str, int]:
        """Documents of each source that end in this batch, sources with none left out."""
        return self._by_source(self.source_documents)

    def _by_source(self, counts: torch.Tensor) -> dict[str, int]:
        return {key: int(count) for key, count in zip(self.sources, counts.tolist()) if count}

    def grid(
        self, accumulation: int, rows: int, seq_len: int, dtype: torch.dtype = torch.int64
    ) -> dict[str, torch.Tensor]:
        """The batch as ``[A, B, T]`` arrays: A micro-batches of B rows of T positions.

        Args:
            dtype: ``torch.int64`` gives views of this batch, ``torch.int32`` copies.

        Returns:
            ``input_ids``, ``labels``, ``segment_ids`` (1.. in each row, 0 = padding) and
            ``attention_mask`` (bool, False on padding).

        Raises:
            SampleError: A·B·T is not the number of positions.
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
        # From 1 in every row; a row may begin with padding.
        segment_ids = segment_ids - segment_ids[:, :1] + not_padding[:, :1].long()
        segment_ids = segment_ids * not_padding
        return {
            "input_ids": self.tokens.view(shape).to(dtype),
            "labels": self.labels.view(shape).to(dtype),
            "segment_ids": segment_ids.view(shape).to(dtype),
            "attention_mask": not_padding.view(shape),
        }

    def to_megatron(self) -> dict[str, torch.Tensor]:
        """The dictionary Megatron-core steps take, one packed sequence: [1, N], [1, n + 1], [1]."""
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
        """Return the batch; SampleError names the first rule of the contract that is broken."""
        segments = len(self.source_ids)
        lengths = {
            "cu_seqlens": segments + 1,
            "source_ids": segments,
            "source_documents": len(self.sources),
            "rewards": segments,
        }
        for name, tensor in self.tensors().items():
            of_own_length = name in ("cu_seqlens_padded", "aligned_ends", "document_ends")
            shape = [len(tensor) if of_own_length else lengths.get(name, self.num_tokens)]
            if tensor.dtype != DTYPES[name] or list(tensor.shape) != shape:
                raise SampleError(
                    f"PackedBatch.{name} must be {DTYPES[name]} {shape}, "
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
        if (padded := self.cu_seqlens_padded) is not None:
            fits = padded[0] == 0 and padded[-1] == self.num_tokens and (padded.diff() > 0).all()
            fits = fits and torch.isin(ends[:-1][sources >= 0], padded).all()
            yield fits, "cu_seqlens_padded rises from 0 to N and holds the start of every document"

    def pin_memory(self, device: torch.device | str | None = None) -> "PackedBatch":
        """A copy in page-locked memory; what the data loader calls when there is a GPU."""
        return self._in(self.as_buffer())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "PackedBatch":
        """The batch on a device: from the host in one copy, which by default nobody waits for."""
        if self.tokens.device.type != "cpu" or torch.device(device).type == "cpu":
            fields: dict[str, Any] = {
                name: each.to(device, non_blocking=non_blocking)
                for name, each in self.tensors().items()
            }
            return dataclasses.replace(self, **fields)
        return self._in(self.as_buffer().to(device, non_blocking=non_blocking))

    def _in(self, buffer: torch.Tensor) -> "PackedBatch":
        return dataclasses.replace(self, **fields_of(buffer, self._layout()))

    def _layout(self) -> list[tuple[str, int]]:
        """Name and number of elements of each field of a buffer."""
        return [(name, tensor.numel()) for name, tensor in self.tensors().items()]


def host_buffer(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of the host; page-locked where there is a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def fields_of(buffer: torch.Tensor, layout: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Views of a uint8 tensor: name and number of elements of each, in their order."""
    sizes = [count * DTYPES[name].itemsize for name, count in layout]
    parts = zip(layout, buffer.split(sizes))
    return {name: part.view(DTYPES[name]) for (name, _), part in parts}
