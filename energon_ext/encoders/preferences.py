# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Preferences: two answers to one prompt, of which one is preferred, in the same row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.energon import Cooker, Sample, TaskEncoder, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext.arguments import check_integer, check_kind
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.preferences import SIDES, read_preference
from energon_ext.chats.records import Conversation
from energon_ext.chats.templates import ChatTemplate
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pair_task import PairTask, PreferencePair
from energon_ext.encoders.sample_task import refuse_contexts
from energon_ext.encoders.sft import template_of
from energon_ext.encoders.text import TextDecoder
from energon_ext.errors import SampleError
from energon_ext.losses.pairs import REF_LOG_PROBS
from energon_ext.plan.layout import ContextOptions
from energon_ext.tokenizers.protocol import Tokenizer, check_tokenizer


@edataclass
class Preference(Sample):
    """The chosen and the rejected conversation of a record."""

    conversations: Sequence[Conversation]


@stateless
def cook_preference(sample: dict[str, Any]) -> Preference:
    """Cook a crude JSONL or webdataset sample with ``chosen`` and ``rejected``."""
    try:
        conversations = read_preference(sample.get("json", sample))
    except SampleError as error:
        raise SampleError(f"Sample {sample['__key__']}: {error}.") from None
    return Preference(**basic_sample_keys(sample), conversations=conversations)


class PreferenceTaskEncoder(DynamicBlendMixin, TaskEncoder):
    """Training on preferences (DPO); yields a :class:`~energon_ext.PackedBatch`.

    A sample has ``chosen`` and ``rejected`` with a common prompt, as text or as messages in the
    formats of :class:`~energon_ext.SFTTaskEncoder`; see
    :func:`~energon_ext.chats.preferences.read_preference`. Each answer becomes a segment with its
    prompt, with the tokens that fine-tuning would make of it. Both are in the same row, and share
    a number in ``pair_ids``. Weights are 1 on the chosen answer and -1 on the rejected one. Pairs
    are planned by number, and packed by their lengths, which are measured once; those that do not
    fit a row, and refused samples, are counted in the log.

    Args:
        tokenizer: text to token ids.
        seq_len: T, positions of a row, at least 2, for both answers of a pair together.
        reference: name of the reference model, such as a digest of its weights. Batches then have
            the column ``ref_log_probs``, which :func:`~energon_ext.encoders.reference.\
write_reference` must have written. Without it they have none.
        alignment: every answer begins at a multiple of this many positions.
        chat_template, chat_template_kwargs, answer_end: see :class:`~energon_ext.SFTTaskEncoder`.
        contexts: refused, since rows of pairs are not taken apart.

    Raises:
        ConfigError: an option is out of range, pairs cannot be planned, or the reference has not
            been written.

    Example:
        >>> from energon_ext.tokenizers.tokenizers import ByteTokenizer
        >>> encoder = PreferenceTaskEncoder(ByteTokenizer(), seq_len=16)
        >>> sample = cook_preference({"__key__": "0", "__restore_key__": ("Webdataset", 0),
        ...     "__subflavors__": None, "prompt": "2+2=", "chosen": "4", "rejected": "5"})
        >>> pair = encoder.encode_sample(sample)
        >>> encoder.length_of(pair)
        14
        >>> [weights.tolist() for weights in pair.weights]
        [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0]]
    """

    cookers = [Cooker(cook_preference)]
    decoder = TextDecoder()
    seconds_per_sample = 0.002  # to encode one on one core, approximately

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        reference: str | None = None,
        alignment: int = 1,
        chat_template: ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        answer_end: str | None = None,
        contexts: ContextOptions | None = None,
    ):
        refuse_contexts(self, contexts)
        check_tokenizer(tokenizer)
        check_integer("seq_len", seq_len, 2)
        if reference is not None:
            check_kind("reference", reference, str)
        self.tokenizer, self.seq_len, self.reference = tokenizer, seq_len, reference
        self.chat_template = template_of(tokenizer, chat_template, chat_template_kwargs)
        self._conversations = ConversationEncoder(
            tokenizer, self.chat_template, answer_end=answer_end
        )
        self._assembler = BatchAssembler(seq_len, pad_id=tokenizer.pad_id, alignment=alignment)

    @property
    def encoding_fingerprint(self) -> dict[str, Any]:
        """JSON values that change whenever the tokens or the length of any pair change."""
        return {
            "tokenizer": self.tokenizer.fingerprint(),
            **self._conversations.options(),
            "alignment": self._assembler.alignment,
        }

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            **self.encoding_fingerprint,
            "reference": self.reference,
        }

    @stateless
    def encode_sample(self, sample: Preference) -> PreferencePair:
        """Encode both conversations.

        Raises:
            SampleError: one is refused, they do not have the same prompt, or the same tokens.
        """
        try:
            tokens, weights, notes = self._encode(sample.conversations)
        except SampleError as error:
            raise SampleError(f"Sample {sample.__key__}: {error}.") from None
        return PreferencePair.derive_from(sample, tokens=tokens, weights=weights, notes=notes)

    def _encode(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[np.ndarray], list[np.ndarray], Counter[str]]:
        found = self._conversations.encode(conversations)
        tokens, weights, notes = [], [], Counter[str]()
        for side, encoded, sign in zip(SIDES, found, (1, -1)):
            if isinstance(encoded, SampleError):
                raise SampleError(f"`{side}`: {encoded}")
            if len(encoded.samples) > 1:
                raise SampleError(
                    f"`{side}`: has {len(encoded.samples)} answers that the chat template does not "
                    f"write into one text; keep one, or use another template"
                )
            tokens.append(encoded.samples[0][0])
            weights.append(0.0 + sign * encoded.samples[0][1])  # no -0.0
            notes.update({f"{side}: {note}": count for note, count in encoded.notes.items()})
        if conversations[0].is_whole:
            first = min(np.flatnonzero(each)[0] for each in weights)
            for each in weights:
                each[first:] = each[-1]  # a prompt is what both have in common
        _check_pair(tokens, weights)
        return tokens, weights, notes

    def length_of(self, pair: PreferencePair) -> int:
        """Return the positions of both answers."""
        alignment = self._assembler.alignment
        return sum(len(tokens) + -len(tokens) % alignment for tokens in pair.tokens)

    @stateless
    def pack_selected_samples(self, samples: list[PreferencePair]) -> Row:
        """Build a row of pairs, without what the reference says of them."""
        return Row(
            [tokens for pair in samples for tokens in pair.tokens],
            source=self.source_key,
            documents=len(samples),
            label_weights=[weights for pair in samples for weights in pair.weights],
            pairs=np.arange(len(samples)).repeat(2).tolist(),
        )

    def make_padding(self, row: Row) -> Row:
        """Return a row without pairs."""
        return Row([], slice_sources=[])

    @stateless
    def batch(self, rows: list[Row]) -> PackedBatch:
        """Assemble a batch, which has all fields even if its rows are padding."""
        batch = self._assembler(rows, self.source_keys)
        if batch.pair_ids is None:
            batch.pair_ids = torch.full_like(batch.source_ids, -1)
            if self.reference is not None:
                batch.columns[REF_LOG_PROBS] = torch.zeros_like(batch.token_weights)
        return batch

    def task(self) -> PairTask:
        return self._sample_task(PairTask, planned="pairs", reference=self.reference)


def _check_pair(tokens: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> None:
    """Raise SampleError unless both answers follow the same prompt and differ."""
    if np.array_equal(tokens[0], tokens[1]):
        raise SampleError("`chosen` and `rejected` have the same tokens, so neither is preferred")
    first, second = (each[: np.flatnonzero(w)[0]] for each, w in zip(tokens, weights))
    if not np.array_equal(first, second):
        raise SampleError(
            "the prompts of `chosen` and `rejected` have different tokens; does the chat template "
            "depend on the answer, such as on its reasoning? Give both reasoning, or none"
        )
