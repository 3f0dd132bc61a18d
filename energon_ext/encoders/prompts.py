# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for reinforcement learning, from the same YAML and schedules as text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from megatron.energon import Cooker, Sample, TaskEncoder, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext.arguments import check_integer
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import Conversation, read_prompt
from energon_ext.chats.templates import ChatTemplate
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.sample_task import SampleTask
from energon_ext.encoders.sft import template_of
from energon_ext.encoders.text import TextDecoder
from energon_ext.errors import SampleError
from energon_ext.samples.context import current_context
from energon_ext.tokenizers.protocol import Tokenizer, check_tokenizer


@edataclass
class PromptText(Sample):
    """A prompt as text, or a conversation to be answered."""

    conversation: Conversation
    metadata: dict[str, Any]


@edataclass
class Prompt(Sample):
    """An encoded prompt.

    Attributes:
        tokens: int64 [n], n >= 1.
        source: key of its source.
        metadata: JSON values for the reward function.
    """

    tokens: np.ndarray
    source: str
    metadata: dict[str, Any]


@stateless
def cook_prompt(sample: dict[str, Any]) -> PromptText:
    """Cook a crude JSONL or webdataset sample with ``prompt`` or messages, and metadata."""
    try:
        found, metadata = read_prompt(sample.get("json", sample))
    except SampleError as error:
        raise SampleError(f"{error}.") from None
    return PromptText(**basic_sample_keys(sample), conversation=found, metadata=metadata)


class PromptTaskEncoder(DynamicBlendMixin, TaskEncoder):
    """Prompts for an :class:`~energon_ext.rl.dataset.RLDataset`, as lists of ``batch_size``.

    A sample has a ``prompt`` as text, or messages that end with a question, in the formats of
    :class:`~energon_ext.SFTTaskEncoder` and with their ``tools`` and ``chat_template_kwargs``. Its
    other fields go to the reward function.

    Prompts are planned by number, each as a row of one sample: an ``interleave`` counts a prompt as
    1, whatever its length. A prompt that is too long or cannot be read is counted in the log with
    the reason, and another one of its source takes its place.

    Args:
        tokenizer: text to token ids; prepends its ``bos`` if it does so for text.
        chat_template, chat_template_kwargs: as for :class:`~energon_ext.SFTTaskEncoder`, whose
            samples begin with the same tokens.
        max_prompt_tokens: longer prompts are replaced and counted in the log.

    Raises:
        ConfigError: when the dataset is built: something that needs streaming, such as an own
            ``build_streamed_source``.
    """

    cookers = [Cooker(cook_prompt)]
    decoder = TextDecoder()

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
    ):
        check_tokenizer(tokenizer)
        if max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        self.tokenizer = tokenizer
        self.chat_template = template_of(tokenizer, chat_template, chat_template_kwargs)
        self._conversations = ConversationEncoder(tokenizer, self.chat_template)
        self.max_prompt_tokens = max_prompt_tokens

    @stateless
    def encode_sample(self, sample: PromptText) -> Prompt:
        """Encode a prompt as tokens; override for other samples or another layout."""
        tokens = self._encode(sample.conversation)
        if not len(tokens):
            raise SampleError("the prompt is empty")
        limit = self.max_prompt_tokens or len(tokens)
        if len(tokens) > limit:
            raise SampleError(f"the prompt has {len(tokens)} tokens; at most {limit} are allowed")
        # A prompt may also be encoded outside a dataset, where it has no source.
        source, metadata = current_context().source_key, sample.metadata
        return Prompt.derive_from(sample, tokens=tokens, source=source, metadata=metadata)

    def _encode(self, conversation: Conversation) -> np.ndarray:
        if conversation.is_pair:  # text
            return self._conversations.encode_text(conversation.messages[0]["content"])
        try:
            return self._conversations.encode_prompt(conversation)
        except SampleError as error:
            raise SampleError(f"{error}.") from None

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            "tokenizer": self.tokenizer.fingerprint(),
            "vocab_size": self.tokenizer.vocab_size,
            "chat_template": self.chat_template.fingerprint(),
            "max_prompt_tokens": self.max_prompt_tokens,
        }

    def task(self) -> SampleTask:
        return self._sample_task(SampleTask, planned="prompts")

    def make_padding(self, prompt: Prompt) -> None:
        """Return None, which :meth:`batch` leaves out: the last batch may have fewer prompts."""

    @stateless
    def batch(self, prompts: list[Prompt | None]) -> list[Prompt]:
        """Return the prompts that are sampled together."""
        return [prompt for prompt in prompts if prompt is not None]
