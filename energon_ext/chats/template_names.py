# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chat templates by name: a tokenizer's own, a file, or that of another tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from energon_ext.chats.templates import ChatTemplate, HFChatTemplate, PlainChatTemplate
from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError
from energon_ext.tokenizers.files import load_with_transformers
from energon_ext.tokenizers.protocol import Tokenizer
from energon_ext.tokenizers.tokenizers import HFTokenizer

#: A template name followed by a date.
_DATED = re.compile(r"(.+)@(\d{4}-\d\d-\d\d)")
_MAX_TEMPLATE_BYTES = 2**24


def default_template(
    tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return the chat template of an HFTokenizer's folder or name, else the plain one.

    A ``tokenizer.json`` belongs to its folder if that has a chat template as well.

    Fine-tuning and prompts share it, so that a policy is prompted in the format it was trained on.
    """
    if (name := _name_of(tokenizer)) is not None:
        loaded = load_with_transformers(name, f"Chat template of {name!r}")
        if loaded.chat_template:
            return HFChatTemplate(loaded, template_kwargs=template_kwargs)
    return _plain(template_kwargs)


def named_template(
    name: str | None, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Load a chat template by name; None for no name.

    Args:
        name: ``plain``; a ``.jinja`` file, rendered with the special tokens of the tokenizer; one
            of the tokenizer's several templates; or the folder or name of another Hugging Face
            tokenizer. ``@2026-01-31`` at its end fixes the date.
        tokenizer: of the run.
        template_kwargs: variables for every conversation.
    """
    if name is None:
        return default_template(tokenizer, template_kwargs) if template_kwargs else None
    if name == PlainChatTemplate.name:
        return _plain(template_kwargs)
    dated = _DATED.fullmatch(name)
    path, date = (dated[1], dated[2]) if dated else (name, None)
    owner = _tokenizer_for(tokenizer)
    several = owner.chat_template if isinstance(owner.chat_template, dict) else {}
    text = several.get(path)
    if path.endswith((".jinja", ".jinja2")):
        text = read_template(path)
    if text is not None:
        return HFChatTemplate(owner, date, template=text, template_kwargs=template_kwargs)
    return HFChatTemplate(path, date, template_kwargs=template_kwargs)


def read_template(path: str) -> str:
    """Return the text of a ``.jinja`` file."""
    try:
        return read_data(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read ({error}).") from error


def _plain(template_kwargs: Mapping[str, Any] | None) -> PlainChatTemplate:
    if template_kwargs:
        raise ConfigError(
            f"chat_template_kwargs: {sorted(template_kwargs)} found, but the plain template has no "
            f"variables."
        )
    return PlainChatTemplate()


class _SpecialTokens:
    """The special tokens of a tokenizer that ``transformers`` did not load, for a template."""

    chat_template = None

    def __init__(self, tokenizer: Tokenizer):
        names = (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        self.special_tokens_map = {
            name: tokenizer.show([token]) for name, token in names if token is not None
        }


def _tokenizer_for(tokenizer: Tokenizer) -> Any:
    """Return an object with the special tokens, and perhaps templates, of a tokenizer."""
    if (name := _name_of(tokenizer)) is not None:
        return load_with_transformers(name, f"Chat template of {name!r}")
    return _SpecialTokens(tokenizer)


def _name_of(tokenizer: Tokenizer) -> str | None:
    """Return the folder or name from which ``transformers`` loads the template of a tokenizer."""
    if not isinstance(tokenizer, HFTokenizer):
        return None
    path = Path(tokenizer.name)
    if not path.is_file():
        return tokenizer.name
    has_template = path.name == "tokenizer.json" and _has_template(path.parent)
    return str(path.parent) if has_template else None


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    return b'"chat_template"' in read_data(config, _MAX_TEMPLATE_BYTES)
