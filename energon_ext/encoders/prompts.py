# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for reinforcement learning, from the same YAML and schedules as text."""

import functools
from typing import Any, Sequence

import numpy as np
from megatron.energon import Cooker, Sample, TaskEncoder, WorkerConfig, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry
from energon_ext.encoders.chat import ChatTemplate, default_template
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.quiet import quiet_errors
from energon_ext.encoders.text import TextDecoder
from energon_ext.encoders.tokenizer_protocol import Tokenizer, check_tokenizer
from energon_ext.errors import SampleError


@edataclass
class PromptText(Sample):
    """A prompt as text, or the messages of a conversation to be answered."""

    prompt: str | list[Any]
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

    @property
    def num_tokens(self) -> int:
        """Size of the prompt as an interleave counts it."""
        return len(self.tokens)


@stateless
def cook_prompt(sample: dict[str, Any]) -> PromptText:
    """Cook a crude JSONL or webdataset sample with ``prompt`` or ``messages``, and metadata."""
    record = sample.get("json", sample)
    field = "messages" if "messages" in record else "prompt"
    if not isinstance(record.get(field), (str, list)):
        raise SampleError(
            f"Sample {sample['__key__']}: needs `prompt` or `messages`; it has {sorted(record)}."
        )
    metadata = {
        key: value for key, value in record.items() if key != field and not key.startswith("__")
    }
    return PromptText(**basic_sample_keys(sample), prompt=record[field], metadata=metadata)


class PromptTaskEncoder(DynamicBlendMixin, TaskEncoder):
    """Prompts for an :class:`~energon_ext.RLDataset`; yields lists of ``batch_size`` prompts.

    A sample has a ``prompt``, or ``messages`` that end with a question; its other fields go to the
    reward function. Sources are shuffled separately and the draw comes last, so weights may be
    schedules, and an ``interleave`` counts the tokens of the prompts.

    Args:
        tokenizer: text to token ids; prepends its ``bos`` if it does so for text.
        chat_template: by default the same as for :class:`~energon_ext.SFTTaskEncoder`.
        max_prompt_tokens: longer prompts are skipped and counted in the log.
    """

    cookers = [Cooker(cook_prompt)]
    decoder = TextDecoder()

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        max_prompt_tokens: int | None = None,
    ):
        check_tokenizer(tokenizer)
        if max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        self.tokenizer = tokenizer
        self.chat_template = chat_template or default_template(tokenizer)
        self.max_prompt_tokens = max_prompt_tokens
        self._shuffle_buffer_prompts = 0

    @stateless
    def encode_prompt(self, sample: PromptText, source: str) -> Prompt:
        """Encode a prompt as tokens; override for other samples or another layout."""
        text, has_bos = sample.prompt, False
        if not isinstance(text, str):
            text = self.chat_template.render(text, add_generation_prompt=True)
            has_bos = self.chat_template.writes_special_tokens
        tokens = self.tokenizer.encode_array(text)
        tokens = tokens[int(has_bos and self.tokenizer.add_bos) :]
        tokens = tokens[: len(tokens) - int(self.tokenizer.add_eos)]
        limit = self.max_prompt_tokens or len(tokens)
        if not 1 <= len(tokens) <= limit:
            raise SampleError(
                f"Sample {sample.__key__}: prompt has {len(tokens)} tokens; 1 to {limit} allowed."
            )
        return Prompt.derive_from(sample, tokens=tokens, source=source, metadata=sample.metadata)

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
