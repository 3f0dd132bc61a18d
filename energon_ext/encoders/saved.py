# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The encoder of a saved run, rebuilt from the description in its state.

Rows are planned from token files, so the rebuilt encoder can plan what the run has read without its
tokenizer, which need not be installed where a state is inspected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megatron.energon import TaskEncoder

from energon_ext.chats.template_names import default_template, named_template
from energon_ext.chats.templates import ChatTemplate, Message
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.text_sources import encoding_of
from energon_ext.errors import ConfigError, EncoderNeededError, EnergonExtError, StateFormatError
from energon_ext.plan.cost import AttentionCost
from energon_ext.samples.methods import SampleMethods
from energon_ext.samples.packers import OnePerRow, WholePacker
from energon_ext.splice.config import splice_from_config
from energon_ext.tokenizers.protocol import Tokenizer

_CLASSES = {
    c.__name__: c
    for c in (PackedTaskEncoder, SFTTaskEncoder, SpliceTaskEncoder, MultiSpliceTaskEncoder)
}


class SavedTokenizer(Tokenizer):
    """The ids and the fingerprint of a tokenizer, without its vocabulary."""

    def __init__(self, saved: Mapping[str, Any]):
        self._fingerprint = dict(saved["fingerprint"])
        for name, value in saved["attributes"].items():
            setattr(self, name, value)

    def encode_array(self, text: str) -> np.ndarray:
        raise ConfigError("The state of a run contains no tokenizer; give --tokenizer.")

    def decode(self, tokens: Any) -> str:
        raise ConfigError("The state of a run contains no tokenizer; give --tokenizer.")

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint


class SavedTemplate(ChatTemplate):
    """The fingerprint of a chat template, without the template."""

    def __init__(self, fingerprint: Mapping[str, Any]):
        self._fingerprint = dict(fingerprint)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, **context: Any
    ) -> str:
        raise ConfigError("The state of a run contains no chat template; tokenize the text first.")

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint


class SavedSamples(DynamicBlendMixin, TaskEncoder):
    """An encoder that plans the samples of a saved run as its encoder did, but encodes none."""

    is_rebuilt = True

    def __init__(self, saved: Mapping[str, Any], seq_len: int | None = None):
        self._fingerprint = dict(saved["fingerprint"])
        self.sample_block = self._fingerprint.get("sample_block", 1)
        self._methods = _saved_methods(saved, seq_len)
        if self._methods.are_packed:
            self._fingerprint["seq_len"] = self._methods.packer.seq_len
            self.cost = None if saved["cost"] is None else AttentionCost(**saved["cost"])
        if saved.get("has_padding"):  # absent from older states
            self.make_padding = _unchanged

    def find_methods(self) -> SampleMethods:
        return self._methods

    def state_fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def _reason_to_stream(self, *arguments: Any) -> None:
        """Return None: the samples of a saved run were planned."""

    def _load_dataset(self, dataset: Any, offset: int, worker_config: Any) -> Any:
        return dataset.dataset.build(offset)  # without cooking


def _saved_methods(saved: Mapping[str, Any], seq_len: int | None) -> SampleMethods:
    """Return the methods of a saved encoder: how its samples are packed, but no code."""
    packer = saved["packer"]
    if packer is None:
        return SampleMethods(name="SavedSamples", packer=OnePerRow())
    options = dict(packer)
    if options.pop("name") != WholePacker.name:
        raise EncoderNeededError(
            f"The rows of this run were packed by its encoder's own {packer['name']}, which a "
            f"state does not contain; give --encoder."
        )
    tokenizer = None if saved["tokenizer"] is None else SavedTokenizer(saved["tokenizer"])
    return SampleMethods(
        name="SavedSamples",
        packer=WholePacker(**{**options, "seq_len": seq_len or options["seq_len"]}),
        identity=saved["lengths"],
        pack_tokens=None if tokenizer is None else _unchanged,
        tokenizer=tokenizer,
    )


def _unchanged(row: Any) -> Any:
    """Replace a method of an encoder that is not here; its rows are never read."""
    return row


def load_encoder(
    saved: Mapping[str, Any], tokenizer: Tokenizer | None = None, **changed: Any
) -> DynamicBlendMixin:
    """Rebuild the encoder that a state describes, with another tokenizer or changed options."""
    try:
        if saved.get("class") == "samples":
            return _samples_encoder(saved, changed)
        return _text_encoder(saved, tokenizer, changed)
    except EnergonExtError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateFormatError(f"The data state is damaged: {error!r:.200}.") from error


def _template(saved: Any, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the tokenizer's template if it is the saved one, else what is saved of that."""
    if not isinstance(saved, Mapping):  # states once had the name of a template
        return named_template(saved, tokenizer)
    template = default_template(tokenizer)
    return template if template.fingerprint() == saved else SavedTemplate(saved)


def _samples_encoder(saved: Mapping[str, Any], changed: Mapping[str, Any]) -> SavedSamples:
    if "packing" in changed or ("seq_len" in changed and saved["packer"] is None):
        raise ConfigError(
            "--seq-length and --packing: only for packed rows; samples keep the packer of their "
            "encoder, and without one each sample is a row."
        )
    return SavedSamples(saved, changed.get("seq_len"))


def _text_encoder(
    saved: Mapping[str, Any], tokenizer: Tokenizer | None, changed: Mapping[str, Any]
) -> DynamicBlendMixin:
    if saved.get("class") not in _CLASSES or not isinstance(saved.get("options"), Mapping):
        raise StateFormatError("The data state does not describe how its rows were encoded.")
    options = {**saved["options"], **changed}
    if options.get("packing") != saved["options"].get("packing"):
        kept = ("packing", "packing_buffer_docs")
        others = [name for name in options if name.startswith("packing_") and name not in kept]
        for name in (*others, "mask_boundary_loss"):
            options.pop(name, None)
    used_tokenizer = tokenizer or SavedTokenizer(saved["tokenizer"])
    if "chat_template" in options:
        options["chat_template"] = _template(options["chat_template"], used_tokenizer)
    if options.get("splice") is not None:
        options["splice"] = splice_from_config(options["splice"], "splice of the state")
    if options.get("cost") is not None:
        options["cost"] = AttentionCost(**options["cost"])
    encoder_class: Any = _CLASSES[saved["class"]]
    seq_len = options.pop("seq_len")
    encoder = encoder_class(used_tokenizer, seq_len, **options)
    encoding = saved.get("encoding")
    if encoding is not None and encoder.tokenizer.fingerprint() == encoding["tokenizer"]:
        encoder.saved_encoding = None if encoding_of(encoder) == encoding else encoding
    encoder.is_rebuilt = tokenizer is None or encoder.saved_encoding is not None
    return encoder
