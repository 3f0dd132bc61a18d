# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The encoder of a saved run, made again from its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_ext.encoders.chat import named_template
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.sft import SFTTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder, SpliceTaskEncoder
from energon_ext.encoders.tokenizers import Tokenizer, load_tokenizer
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.plan.cost import AttentionCost
from energon_ext.splice.config import splice_from_config

_CLASSES = {
    each.__name__: each
    for each in (PackedTaskEncoder, SFTTaskEncoder, SpliceTaskEncoder, MultiSpliceTaskEncoder)
}


def load_encoder(
    saved: Mapping[str, Any], tokenizer: Tokenizer | None = None, **changed: Any
) -> PackedTaskEncoder:
    """The encoder that a state describes.

    Args:
        saved: of :func:`energon_ext.encoders.pretrain.saved_encoder`.
        tokenizer: instead of the saved one.
        changed: options of the encoder that are to be others.

    Raises:
        ConfigError: the saved tokenizer cannot be loaded here.
        StateFormatError: the state describes no encoder.
    """
    if saved.get("class") not in _CLASSES or not isinstance(saved.get("options"), Mapping):
        raise StateFormatError("The data state does not say how its rows were encoded.")
    options = {**saved["options"], **changed}
    if "chat_template" in options:
        options["chat_template"] = named_template(options["chat_template"])
    if options.get("splice") is not None:
        options["splice"] = splice_from_config(options["splice"], "splice of the state")
    if options.get("cost") is not None:
        options["cost"] = AttentionCost(**options["cost"])
    encoder_class: Any = _CLASSES[saved["class"]]
    return encoder_class(tokenizer or _saved_tokenizer(saved), options.pop("seq_len"), **options)


def _saved_tokenizer(saved: Mapping[str, Any]) -> Tokenizer:
    options = dict(saved.get("tokenizer") or {})
    name = options.pop("name_or_path", None)
    if name is None:
        raise ConfigError("The state does not name its tokenizer; give --tokenizer.")
    try:
        return load_tokenizer(name, **options)
    except ConfigError as error:
        raise ConfigError(f"{error} Or give --tokenizer.") from error
