# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Supervised fine-tuning: conversations to packed batches, with a loss on the answers only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.energon import Cooker, Sample, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext.arguments import check_choice
from energon_ext.chats.encoding import RULES, ConversationEncoder, EncodedConversation
from energon_ext.chats.records import Conversation, read_conversation
from energon_ext.chats.template_names import default_template, named_template
from energon_ext.chats.templates import ChatTemplate
from energon_ext.config.mix import Entry
from energon_ext.encoders.document_task import DocumentTask, check_weighted
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.text import Document, TextEncoder
from energon_ext.errors import ConfigError, SampleError
from energon_ext.plan.spec import Cut
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.tokenizers.protocol import Tokenizer, UnknownTokenizer
from energon_ext.tokenizers.tokenizers import load_tokenizer
from energon_ext.tokens.cut import OVER_LONG
from energon_ext.tokens.documents import Documents


@edataclass
class Dialogue(Sample):
    """A conversation to train on."""

    conversation: Conversation


@stateless
def cook_dialogue(sample: dict[str, Any]) -> Dialogue:
    """Cook a crude JSONL or webdataset sample in any format of :mod:`energon_ext.chats.records`."""
    try:
        found = read_conversation(sample.get("json", sample))
    except SampleError as error:
        raise SampleError(f"Sample {sample['__key__']}: {error}.") from None
    return Dialogue(**basic_sample_keys(sample), conversation=found)


class SFTTaskEncoder(PackedTaskEncoder):
    """Fine-tuning on answers; yields a :class:`~energon_ext.PackedBatch` of ``batch_size`` rows.

    A sample is a conversation: ``messages`` in OpenAI's format with tools, reasoning and weights,
    or ShareGPT, Alpaca, ``prompt`` and ``response``. The loss is on every assistant message, from
    the end of its generation prompt to the end that the template writes. The tokens before an
    answer are those that an inference server makes of the conversation so far.

    A conversation becomes several samples if its template does not write all answers into one text
    (most reasoning templates). Samples are packed whole. Conversations that are refused are
    counted when the text is tokenized, which fails after 100 in a row; samples that lose their last
    trained label by cutting are counted when the dataset is built.

    Args:
        tokenizer: text to token ids.
        seq_len: T, positions of a row, at least 2.
        chat_template: writes ``messages`` as text; by default the template in the folder or name
            of an :class:`~energon_ext.tokenizers.tokenizers.HFTokenizer`, if there is one, else
            :class:`~energon_ext.chats.templates.PlainChatTemplate`.
        chat_template_kwargs: variables of the default template, such as ``enable_thinking``.
        answers, answer_end: see :class:`~energon_ext.chats.encoding.ConversationEncoder`.
        over_long: what happens to a sample of more than T + 1 tokens: ``cut`` keeps its first
            T + 1; ``drop`` leaves it out and counts it; ``error`` does the same, but fails after
            100 in a row.
        **options: ``packing_buffer_docs``, ``packing_max_docs_per_bin``, ``train_on_eos``,
            ``document_means`` and ``document_numbers``; see
            :class:`~energon_ext.PackedTaskEncoder`.

    Example:
        >>> from energon_ext.tokenizers.tokenizers import ByteTokenizer
        >>> encoder = SFTTaskEncoder(ByteTokenizer(), seq_len=16)
        >>> sample = cook_dialogue({"__key__": "0", "__restore_key__": (), "__subflavors__": None,
        ...     "prompt": "hi", "response": "yo"})
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        answers: str | None = None,
        answer_end: str | None = None,
        over_long: str = "cut",
        **options: Any,
    ):
        check_choice("over_long", over_long, OVER_LONG)
        # A conversation that continued in the next row would be separated from its questions.
        super().__init__(tokenizer, seq_len, packing="bin", mask_boundary_loss=True, **options)
        self.chat_template = template_of(tokenizer, chat_template, chat_template_kwargs)
        self._conversations = ConversationEncoder(
            tokenizer, self.chat_template, answers, answer_end
        )
        self.over_long = over_long

    @stateless
    def encode_document(self, sample: Dialogue) -> Document:
        """Encode a conversation as a document, with the weights of its answers.

        Raises:
            SampleError: it is refused, or becomes several documents (:meth:`encode_samples`).
        """
        (encoded,) = self.encode_samples([sample])
        if isinstance(encoded, SampleError):
            raise encoded
        if len(encoded.samples) > 1:
            raise SampleError(
                f"Sample {sample.__key__}: becomes {len(encoded.samples)} documents, one per "
                f"answer; call encode_samples, or use answers='last'."
            )
        ((tokens, weights),) = encoded.samples
        return Document.derive_from(sample, tokens=tokens, label_weights=weights)

    def encode_samples(
        self, samples: Sequence[Dialogue]
    ) -> list[EncodedConversation | SampleError]:
        """Encode conversations together; return the error of each that is refused."""
        encoded = self._conversations.encode([sample.conversation for sample in samples])
        return [
            SampleError(f"Sample {sample.__key__}: {each}.")
            if isinstance(each, SampleError)
            else each
            for sample, each in zip(samples, encoded)
        ]

    def encode_many(
        self, documents: Sequence[InputDocument]
    ) -> Sequence[Encoded | SampleError | None]:
        if type(self).encode_document is not SFTTaskEncoder.encode_document:
            return super().encode_many(documents)
        found = self.encode_samples([document.sample for document in documents])
        return [
            each if isinstance(each, SampleError) else Encoded(each.samples, each.notes)
            for each in found
        ]

    def task(self) -> "ChatTask":
        untrained = None if self.train_on_eos else self.tokenizer.eos_id
        cut = Cut(over_long=self.over_long, untrained=untrained)
        return self._document_task(ChatTask, cut=cut, conversations=self._conversations)

    def command_options(self) -> list[str] | None:
        options = super().command_options()
        template = self.chat_template.name
        named = ["--chat-template", template] if template else []
        return None if options is None else [*options, "--task", "chat", *named]

    def _rebuilt_by_command(self, tokenizer: str) -> TextEncoder:
        loaded, name = load_tokenizer(tokenizer), self.chat_template.name
        template = None if name is None else named_template(name, loaded)
        return SFTTaskEncoder(loaded, self.seq_len, chat_template=template)

    def token_file_meta(self) -> dict[str, Any]:
        return {**super().token_file_meta(), **self._conversations.options(), "rules": RULES}

    def state_fingerprint(self) -> dict[str, Any]:
        return {**super().state_fingerprint(), **self._conversations.options()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatTask(DocumentTask):
    """Fine-tuning: documents are cut and never spliced, and have label weights.

    Attributes:
        conversations: encodes them.
    """

    conversations: ConversationEncoder

    def check(self, documents: Documents, entry: Entry) -> None:
        super().check(documents, entry)
        self._check_template_of(documents)
        check_weighted(documents, entry)
        if documents.names_tokenizer:  # or nothing says how it was written
            self._check_answers_of(documents)

    def _check_template_of(self, documents: Documents) -> None:
        """Raise ConfigError if the files were written with another template, if it is known."""
        if not isinstance(self.encoder.tokenizer, UnknownTokenizer):
            template = self.conversations.template
            name = template.name or "this encoder's own"
            documents.check_written("chat template", name, template.fingerprint())

    def _check_answers_of(self, documents: Documents) -> None:
        """Raise ConfigError if the files were written with other answers than asked for."""
        for name, value in self.conversations.options().items():
            prefix, written = documents.written_with(name)
            if name != "chat_template" and value is not None and value != written:
                file = prefix or documents.origin(0).file
                raise ConfigError(
                    f"{name}: {value!r} found, but {file} was written with "
                    f"{written!r}; prepare it again, or leave the option out."
                )


def template_of(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    template_kwargs: Mapping[str, Any] | None,
) -> ChatTemplate:
    """Return the chat template of an encoder: the given one, or the tokenizer's default."""
    if template is None:
        return default_template(tokenizer, template_kwargs)
    if template_kwargs:
        raise ConfigError(
            "chat_template_kwargs: are of the default template; give them to your chat_template "
            "instead."
        )
    return template
