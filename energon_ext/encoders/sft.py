# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Supervised fine-tuning: conversations to packed batches, with a loss on the answers only."""

from typing import Any

import numpy as np
from megatron.energon import Cooker, Sample, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext.arguments import check_choice
from energon_ext.config.mix import Entry
from energon_ext.config.references import TokenFileFactory
from energon_ext.documents.base import Documents
from energon_ext.documents.cut import CutDocuments
from energon_ext.documents.file_set import TokenFiles
from energon_ext.encoders.chat import ChatTemplate, check_messages, default_template, split_answers
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.sources import reject_splices
from energon_ext.encoders.text import Document
from energon_ext.encoders.tokenizer_protocol import Tokenizer
from energon_ext.errors import ConfigError, SampleError

OVER_LONG = ("cut", "error")


@edataclass
class PromptResponse(Sample):
    """A question and its answer."""

    prompt: str
    response: str


@edataclass
class Dialogue(Sample):
    """A conversation: messages of ``{"role": ..., "content": ...}``."""

    messages: list[Any]


@stateless
def cook_dialogue(sample: dict[str, Any]) -> PromptResponse | Dialogue:
    """Cook a crude JSONL or webdataset sample: ``prompt`` and ``response``, or ``messages``."""
    record = sample.get("json", sample)
    if "messages" in record:
        return Dialogue(**basic_sample_keys(sample), messages=record["messages"])
    texts = {field: record.get(field) for field in ("prompt", "response")}
    if all(isinstance(text, str) for text in texts.values()):
        return PromptResponse(**basic_sample_keys(sample), **texts)
    raise SampleError(
        f"Sample {sample['__key__']}: needs `prompt` and `response` as text, or `messages`; it "
        f"has {sorted(record)}."
    )


class SFTTaskEncoder(PackedTaskEncoder):
    """Fine-tuning on answers; yields a :class:`~energon_ext.PackedBatch` of ``batch_size`` rows.

    A sample has ``prompt`` and ``response``, or ``messages`` with roles system, user, assistant and
    tool. The loss is on the response, or on every assistant message; a special token that ends the
    sample belongs to the last answer. Prompts and answers are tokenized separately, as they are at
    inference, and samples are packed whole.

    Samples without a trained label never reach a batch. They are counted when the text is
    tokenized, which fails after 100 in a row; samples that lose their last trained label by
    cutting are counted when the dataset is built.

    Args:
        tokenizer: text to token ids.
        seq_len: T, positions of a row, at least 2.
        chat_template: writes ``messages`` as text; by default the template in the folder or name
            of an :class:`~energon_ext.encoders.tokenizers.HFTokenizer`, if there is one, else
            :class:`~energon_ext.encoders.chat.PlainChatTemplate`.
        over_long: a sample of more than T + 1 tokens keeps its first T + 1 (``cut``) or raises an
            error that names it (``error``).
        **options: ``packing_buffer_docs``, ``packing_max_docs_per_bin`` and ``train_on_eos``; see
            :class:`~energon_ext.PackedTaskEncoder`.

    Example:
        >>> from energon_ext.encoders.tokenizers import ByteTokenizer
        >>> encoder = SFTTaskEncoder(ByteTokenizer(), seq_len=16)
        >>> sample = PromptResponse(
        ...     __key__="0", __restore_key__=(), __subflavors__=None, prompt="hi", response="yo")
        >>> document = encoder.encode_document(sample)
        >>> document.tokens.tolist()
        [1, 108, 109, 125, 115, 2]
        >>> document.label_weights.tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    cookers = [Cooker(cook_dialogue)]

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        chat_template: ChatTemplate | None = None,
        over_long: str = "cut",
        **options: Any,
    ):
        check_choice("over_long", over_long, OVER_LONG)
        # A conversation that continued in the next row would be separated from its questions.
        super().__init__(tokenizer, seq_len, packing="bin", mask_boundary_loss=True, **options)
        self.chat_template = chat_template or default_template(tokenizer)
        self.over_long = over_long

    @stateless
    def encode_document(self, sample: PromptResponse | Dialogue) -> Document:
        """Encode a whole conversation as a document, weight 1 on its answers and 0 elsewhere."""
        try:
            tokens, weights = self._encode(sample)
            if not weights[1:].any():  # nothing predicts the first token of a document
                raise SampleError("the answers have no tokens, so there is nothing to train on")
        except SampleError as error:
            raise SampleError(f"Sample {sample.__key__}: {error}.") from error
        return Document.derive_from(sample, tokens=tokens, label_weights=weights)

    def token_files(self, entry: Entry) -> TokenFiles:
        """Return the token files of a source, which must have label weights for the answers."""
        files = super().token_files(entry)
        if isinstance(entry.dataset, TokenFileFactory):
            written = self.saved_encoding or self.token_file_meta()
            name = self.chat_template.name or "this encoder's own"
            files.check_written("chat template", name, written["chat_template"])
            if prefix := files.unweighted:
                raise ConfigError(
                    f"{entry.key}: {prefix} has no label weights, so questions would be trained "
                    f"like answers; write it with `energon-ext prepare --chat`, or use a "
                    f"PackedTaskEncoder."
                )
        return files

    def documents_of(self, files: TokenFiles, key: str) -> Documents:
        return CutDocuments(
            files,
            source=key,
            max_tokens=self.seq_len + 1,
            over_long=self.over_long,
            untrained=None if self.train_on_eos else self.tokenizer.eos_id,
        )

    def splice_of(self, entry: Entry) -> None:
        """Return None, and reject a splice: frames have no label weights."""
        reject_splices(self, [entry])

    def token_file_meta(self) -> dict[str, Any]:
        return {**super().token_file_meta(), "chat_template": self.chat_template.fingerprint()}

    def saved_options(self) -> dict[str, Any]:
        fixed = ("packing", "mask_boundary_loss")
        options = {k: v for k, v in super().saved_options().items() if k not in fixed}
        return {**options, "chat_template": self.chat_template.name, "over_long": self.over_long}

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            "chat_template": self.chat_template.fingerprint(),
            "over_long": self.over_long,
        }

    def _encode(self, sample: PromptResponse | Dialogue) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and their weights: 1 for tokens of answers, else 0."""
        tokenizer, has_special_tokens = self.tokenizer, False
        if isinstance(sample, PromptResponse):
            pieces = [(sample.prompt, False), (sample.response, True)]
        else:
            check_messages(sample.messages)
            pieces = split_answers(self.chat_template, sample.messages)
            has_special_tokens = self.chat_template.writes_special_tokens
        tokens = [(encode_bare(tokenizer, text), answer) for text, answer in pieces]
        if not has_special_tokens:
            if tokenizer.add_bos:
                tokens.insert(0, (np.array([tokenizer.bos_id]), False))
            if tokenizer.add_eos:
                tokens.append((np.array([tokenizer.eos_id]), True))
        weights = [np.full(len(ids), answer, np.float32) for ids, answer in tokens]
        return np.concatenate([ids for ids, _ in tokens]), np.concatenate(weights)


def encode_bare(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encode ``text`` without the special tokens around it, as int64 [n]."""
    ids = tokenizer.encode_array(text)
    return ids[int(tokenizer.add_bos) : len(ids) - int(tokenizer.add_eos)]
