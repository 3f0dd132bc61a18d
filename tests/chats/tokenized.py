# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The templates, conversations and tokenizers of these tests, each made once."""

import functools
import json
import unicodedata

import sentencepiece
from transformers import AutoTokenizer, LlamaTokenizer

from energon_ext.chats.templates import HFChatTemplate
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer
from tests.chats.conversations import CONVERSATIONS
from tests.chats.reference import Reference
from tests.chats.refusals import TEMPLATES
from tests.chats.tokenizers import FAST, MODELS, SLOW, save, save_model

#: Templates that need tool calls in another form than the first that they do not reject.
FORMS = {
    "prints None": [(True, False)],
    "writes Python's dict": [(True, True)],
    "Functionary": [(True, True)],
}
_TEMPLATES = {}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


class Remembered(HFChatTemplate):
    """A template that renders a text once."""

    def __init__(self, tokenizer, template):
        super().__init__(tokenizer, template=template)
        self.texts = {}

    def _render(self, messages, context, **how):
        key = json.dumps([list(messages), context, how], sort_keys=True)
        if key not in self.texts:
            try:
                self.texts[key] = super()._render(messages, context, **how)
            except SampleError as error:
                self.texts[key] = error
        if isinstance(self.texts[key], SampleError):
            raise SampleError(str(self.texts[key]))
        return self.texts[key]


@functools.lru_cache(None)
def reference(template, conversation):
    record = CONVERSATIONS[conversation]
    return Reference(SPECIAL_TOKENS, TEMPLATES[template], record, forms_of(template))


def forms_of(template):
    return FORMS.get(template, Reference.FORMS)


class Tokenized:
    """A tokenizer of `energon_ext`, and what its library gives for a text."""

    def __init__(self, kind, folder):
        self.kind = kind
        has_folder = kind in FAST or kind in SLOW
        # Otherwise only the template and its special tokens are from a folder.
        owner = save(kind if has_folder else "byte BPE", folder / "saved")
        self.theirs = AutoTokenizer.from_pretrained(owner)
        if has_folder:
            self.ours = HFTokenizer(owner)
            encode = functools.partial(_with_transformers, self.theirs)
        elif kind in MODELS:
            path = save_model(kind, folder / "tokenizer.model")
            self.ours = load_tokenizer(path)
            model = sentencepiece.SentencePieceProcessor(model_file=str(path))
            encode = functools.partial(_with_sentencepiece, model)
            if kind == "sentencepiece, identity":  # like Llama 2
                llama = LlamaTokenizer.from_pretrained(folder, legacy=True)
                encode = functools.partial(_with_transformers, llama)
        else:
            self.ours, encode = ByteTokenizer(), _bytes
        self.tokenize = functools.lru_cache(None)(encode)

    def template(self, text):
        """Return a template, one for all tokenizers with the same special tokens."""
        key = text, json.dumps(self.theirs.special_tokens_map, sort_keys=True, default=str)
        if key not in _TEMPLATES:
            _TEMPLATES[key] = Remembered(self.theirs, text)
        return _TEMPLATES[key]

    @functools.cached_property
    def drops_newlines(self):
        return self.tokenize("x\n") == self.tokenize("x")

    @functools.cached_property
    def is_faithful(self):
        """Whether a text can be read from its tokens; those that strip do not show all spaces."""
        text = "Is ½ the\n  Tide? 🙂"
        is_read = _readable(self.ours.show(self.tokenize(text))) == _readable(text)
        return is_read and self.kind != "tokens that strip"

    def check_read(self, tokens, text, end=""):
        """Assert that tokens are those of a text, as far as can be read."""
        shown, whole = self.ours.show(tokens), self.ours.show(self.tokenize(text)) + end
        if self.kind in ("Metaspace, always", "Prepend", "sentencepiece, identity"):
            # They put a space after each added token, but not behind a cut.
            shown, whole = shown.replace(" ", ""), whole.replace(" ", "")
        assert _readable(shown) == _readable(whole), text


def _readable(text):
    """Return a text without what normalizers change, and without a space before it."""
    return unicodedata.normalize("NFC", text).lower().removeprefix(" ")


def _with_sentencepiece(model, text):
    """Return the tokens of a text in which the names of control pieces are tokens."""
    for name, number in (("<s>", model.bos_id()), ("</s>", model.eos_id())):
        before, found, after = text.partition(name)
        if found:
            parts = (_with_sentencepiece(model, part) for part in (before, after))
            return [*next(parts), number, *next(parts)]
    return model.encode(text)


def _bytes(text):
    return [byte + 4 for byte in text.encode()]


def _with_transformers(library, text):
    return library(text, add_special_tokens=False)["input_ids"]
