# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for reinforcement learning, from the same YAML and schedules as text."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megatron.energon import Cooker, Sample, TaskEncoder, WorkerConfig, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.arguments import check_integer
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import Conversation, read_prompt
from energon_ext.chats.templates import ChatTemplate
from energon_ext.config.mix import Entry
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.quiet import quiet_errors
from energon_ext.encoders.sft import template_of
from energon_ext.encoders.text import TextDecoder
from energon_ext.errors import SampleError
from energon_ext.tokenizers.protocol import Tokenizer, check_tokenizer


@edataclass
class PromptText(Sample):
    """A prompt as text, or the messages of a conversation to be answered."""

    prompt: str | list[Any]
    metadata: dict[str, Any]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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

    @property
    def num_tokens(self) -> int:
        """Size of the prompt as an interleave counts it."""
        return len(self.tokens)


@stateless
def cook_prompt(sample: dict[str, Any]) -> PromptText:
    """Cook a crude JSONL or webdataset sample with ``prompt`` or messages, and metadata."""
    try:
        found, metadata = read_prompt(sample.get("json", sample))
    except SampleError as error:
        raise SampleError(f"Sample {sample['__key__']}: {error}.") from None
    return PromptText(
        **basic_sample_keys(sample),
        prompt=found.messages[0]["content"] if found.is_pair else found.messages,
        metadata=metadata,
        tools=found.tools,
        chat_template_kwargs=dict(found.template_kwargs),
    )


class PromptTaskEncoder(DynamicBlendMixin, TaskEncoder):
    """Prompts for an :class:`~energon_ext.RLDataset`; yields lists of ``batch_size`` prompts.

    A sample has a ``prompt`` as text, or messages that end with a question, in the formats of
    :class:`~energon_ext.SFTTaskEncoder` and with their ``tools`` and ``chat_template_kwargs``. Its
    other fields go to the reward function. Sources are shuffled separately and the draw comes last,
    so weights may be schedules, and an ``interleave`` counts the tokens of the prompts.

    Args:
        tokenizer: text to token ids; prepends its ``bos`` if it does so for text.
        chat_template, chat_template_kwargs: as for :class:`~energon_ext.SFTTaskEncoder`, whose
            samples begin with the same tokens.
        max_prompt_tokens: longer prompts are skipped and counted in the log.
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
        self._shuffle_buffer_prompts = 0

    @stateless
    def encode_prompt(self, sample: PromptText, source: str) -> Prompt:
        """Encode a prompt as tokens; override for other samples or another layout."""
        tokens = self._encode(sample)
        limit = self.max_prompt_tokens or len(tokens)
        if not 1 <= len(tokens) <= limit:
            raise SampleError(
                f"Sample {sample.__key__}: prompt has {len(tokens)} tokens; 1 to {limit} allowed."
            )
        return Prompt.derive_from(sample, tokens=tokens, source=source, metadata=sample.metadata)

    def _encode(self, sample: PromptText) -> np.ndarray:
        if isinstance(sample.prompt, str):
            return self._conversations.encode_text(sample.prompt)
        variables = sample.chat_template_kwargs or {}
        try:
            return self._conversations.encode_prompt(
                Conversation(sample.prompt, sample.tools, variables)
            )
        except SampleError as error:
            raise SampleError(f"Sample {sample.__key__}: {error}.") from None

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            "tokenizer": self.tokenizer.fingerprint(),
            "vocab_size": self.tokenizer.vocab_size,
            "chat_template": self.chat_template.fingerprint(),
            "max_prompt_tokens": self.max_prompt_tokens,
            "shuffle_buffer_prompts": self._shuffle_buffer_prompts,
        }

    def build_source(self, entry: Entry, *, worker_config: WorkerConfig, repeat: bool) -> Any:
        """Load, repeat, encode and shuffle one source."""
        texts = super().build_source(entry, worker_config=worker_config, repeat=repeat)
        worker_config, encode = texts.worker_config, self.encode_prompt
        prompts = MapDataset(
            texts,
            functools.partial(encode, source=entry.key),
            worker_config=worker_config,
            stateless_map_fn=get_stateless(encode),
            failure_tolerance=get_failure_tolerance(encode, self.__default_failure_tolerance__),
        )
        quiet_errors(prompts, entry.key)
        size = self._shuffle_buffer_prompts
        if size > 1:
            return ShuffleBufferDataset(prompts, size, worker_config=worker_config)
        return prompts

    def _bound_to(self, entries: Sequence[Entry], stages: dict[str, Any], **how: bool) -> Any:
        """Return a copy for one dataset, which shuffles each source before the draw."""
        bound = super()._bound_to(entries, stages, **how)
        bound._shuffle_buffer_prompts = stages.pop("shuffle_buffer_size", None) or 0
        return bound

    @stateless
    def batch(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts that are sampled together."""
        return prompts
