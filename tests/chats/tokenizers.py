# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tiny tokenizers of every kind, trained on a few sentences of our own."""

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = [
    "The",
    "boats",
    "stayed",
    "in",
    "the",
    "harbour",
    "all",
    "morning.",
    "What",
    "is",
    "four",
    "and",
    "three?",
    "Seven.",
    "Is",
    "91",
    "prime?",
    "No,",
    "it",
    "is",
    "7",
    "times",
    "13.",
    "Name",
    "a",
    "harbour",
    "in",
    "the",
    "east",
    "and",
    "one",
    "in",
    "the",
    "west.",
    "user",
    "assistant",
    "system",
    "tool",
    "name",
    "arguments",
    "content",
    "read_tide",
    "ring_bell",
    "harbour",
    "hour",
    "times",
    "type",
    "function",
    "description",
    "parameters",
    "properties",
    "think",
    "because",
    "so",
    "the",
    "answer",
    "is",
    "42.",
    "USER:",
    "ASSISTANT:",
    "Instruction",
    "Response.",
    "I",
    "rang",
    "once,",
    "and",
    "the",
    "tide",
    "is",
    "high;",
    "the",
    "water",
    "rises",
    "by",
    "0.7",
    "metres.\n",
]
TEXT = [" ".join(WORDS)] * 20

#: Special tokens of the families of templates.
CHAT_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|start|>", "<|message|>"),
    *("<|channel|>", "<|return|>", "<|call|>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[THINK]", "[/THINK]"),
]
#: Added tokens that are not special: they are shown when a text is decoded.
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL = ["<unk>", "<s>", "</s>"]
FALLBACK = [f"<0x{number:02X}>" for number in range(256)]


def byte_bpe(added=(), normalizer=None, prefix=False, plain=()):
    """Like GPT-2, Llama 3 and Qwen."""
    found = Tokenizer(models.BPE())
    found.normalizer = normalizer
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIAL, *added], initial_alphabet=alphabet
    )
    found.train_from_iterator(TEXT, trainer)
    found.add_tokens(list(plain))
    return found


def _fallback_bpe():
    """Train merges of words that begin with ▁, with bytes for everything else."""
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[*SPECIAL, *FALLBACK])
    model.train_from_iterator(TEXT, trainer)
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _without_added(model, FALLBACK)


def _without_added(tokenizer, tokens):
    """Keep tokens in the vocabulary, but find them only by merges."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in tokens]
    return Tokenizer.from_str(json.dumps(content))


def metaspace(scheme, added=(), plain=()):
    """Like the current conversions of Llama 2 and Mistral v0.1."""
    found = _fallback_bpe()
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    found.add_special_tokens(list(added))
    found.add_tokens(list(plain))
    return found


def prepending(added=(), plain=()):
    """Like older conversions: the normalizer puts ▁ before each piece of a text."""
    found = _fallback_bpe()
    found.pre_tokenizer = None
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.add_special_tokens(list(added))
    found.add_tokens(list(plain))
    return found


def unigram(added=()):
    """Like T5 and ALBERT, with byte fallback."""
    found = Tokenizer(models.Unigram())
    found.normalizer = normalizers.NFKC()
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    found.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, *added], unk_token="<unk>"
    )
    found.train_from_iterator(TEXT, trainer)
    return found


def word_piece(added=()):
    """Like BERT: lower case, and `##` inside words."""
    found = Tokenizer(models.WordPiece(unk_token="<unk>"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=[*SPECIAL, *added])
    found.train_from_iterator(TEXT, trainer)
    return found


def stripping():
    """Like Phi-3: special tokens take the white space around them."""
    tokens = [AddedToken(t, rstrip=True, lstrip=t.endswith("end|>")) for t in CHAT_TOKENS]
    words = [AddedToken("four", single_word=True), AddedToken(" tide", normalized=True)]
    found = metaspace("first")
    found.add_special_tokens(tokens)
    found.add_tokens(words)
    return found


def converted_tiktoken():
    """Ranks of bytes, as tiktoken has them, with its pattern for GPT-4."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for pair in (b"th", b"the", b" the", b" t", b"in", b"er", b" a", b"is", b" i", b".\n", b"\n\n"):
        ranks[pair] = len(ranks)
    characters = bytes_to_unicode()

    def text(token):
        return "".join(characters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    merges = []
    for token in ranks:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [tuple(map(text, pair)) for pair in splits if all(p in ranks for p in pair)]
    found = Tokenizer(models.BPE(vocabulary, merges))
    pattern = (
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
    )
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([*SPECIAL, *CHAT_TOKENS])
    found.add_tokens(PLAIN_TOKENS)
    return found


FAST = {
    "byte BPE": lambda: byte_bpe(CHAT_TOKENS, plain=PLAIN_TOKENS),
    "Metaspace, always": lambda: metaspace("always", plain=PLAIN_TOKENS),
    "Metaspace, first": lambda: metaspace("first", CHAT_TOKENS),
    "tiktoken": converted_tiktoken,  # two newlines are one token, as in Qwen's
    "lower case": lambda: byte_bpe(
        CHAT_TOKENS[:4],
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
        plain=PLAIN_TOKENS,
    ),
}
SLOW = {
    "byte BPE with a space before a text": lambda: byte_bpe(prefix=True),
    "Unigram": lambda: unigram(CHAT_TOKENS),
    "Prepend": lambda: prepending(
        CHAT_TOKENS, [AddedToken(token, normalized=False) for token in PLAIN_TOKENS]
    ),
    "WordPiece": lambda: word_piece(CHAT_TOKENS),
    "tokens that strip": stripping,
}


#: Options of ``.model`` files: what sentencepiece does unless told otherwise, and like Llama 2.
MODELS = {
    "sentencepiece": {},
    "sentencepiece, identity": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


def save(kind, folder):
    """Write a tokenizer like the folder of a model."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object={**FAST, **SLOW}[kind](),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    fast.save_pretrained(folder)
    return folder


def save_model(kind, path):
    """Write a ``.model`` file of sentencepiece."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=content,
        vocab_size=500,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        **MODELS[kind],
    )
    Path(path).write_bytes(content.getvalue())
    return path
