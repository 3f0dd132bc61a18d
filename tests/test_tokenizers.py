# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import base64
import hashlib
import http.server
import io
import json
import pickle
import re
import sys
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from energon_ext.chats.templates import HFChatTemplate
from energon_ext.errors import ConfigError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A BPE tokenizer trained on a few words, with <s>, </s> and <pad>."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox", "the slow brown dog"] * 50, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class NoSuchName(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_the_hub_is_asked_once_for_a_name_that_is_neither_a_file_nor_cached(monkeypatch):
    """Without a network, transformers would try each of several files six times: 49 seconds."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoSuchName) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ConfigError, match="^Chat template of 'nosuch': transformers cannot"):
            HFChatTemplate("nosuch")
        server.shutdown()
    assert [path for path in NoSuchName.asked if "nosuch" in path] == ["/api/models/nosuch"]
    with pytest.raises(ConfigError, match="Check the path or the name"):
        HFChatTemplate("nosuch")  # nobody listens there now


def test_bytes_are_shifted_past_the_special_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("hi") == [1, 108, 109, 2]
    assert tokenizer.encode("é") == [1, 0xC3 + 4, 0xA9 + 4, 2]
    assert ByteTokenizer(add_bos=False, add_eos=False).encode("hi") == [108, 109]
    assert tokenizer.decode(tokenizer.encode("naïve ∑")) == "naïve ∑"
    assert tokenizer.encode("") == [1, 2]
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size(64)) == (260, 320)


def test_a_tokenizer_file_encodes_and_knows_its_special_tokens(tokenizer_file):
    tokenizer = HFTokenizer(
        tokenizer_file, add_bos=True, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokens = tokenizer.encode("the brown fox")
    assert (tokens[0], tokens[-1], tokenizer.pad_id) == (1, 2, 3)
    assert tokenizer.decode(tokens) == "the brown fox"
    assert len(tokens) < len("the brown fox")


def test_a_fingerprint_changes_with_the_ids(tokenizer_file):
    options = {"eos_token": "</s>"}
    first = load_tokenizer(tokenizer_file, **options)
    assert first.fingerprint() == load_tokenizer(tokenizer_file, **options).fingerprint()
    assert first.fingerprint() != load_tokenizer(tokenizer_file, eos_token="<pad>").fingerprint()
    assert ByteTokenizer().fingerprint() != ByteTokenizer(add_bos=False).fingerprint()


def test_a_transformers_folder_defines_its_special_tokens(tokenizer_file, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 3)
    assert tokenizer.encode("the dog")[-1] == 2


def test_a_bare_file_uses_a_well_known_eos_token_and_logs_it(tokenizer_file, caplog):
    assert load_tokenizer(tokenizer_file).encode("the")[-1] == 2
    assert caplog.messages == [
        f"{tokenizer_file}: </s> ends every text; --eos-token selects another."
    ]
    caplog.clear()
    named = load_tokenizer(tokenizer_file, eos_token="<pad>", bos_token="<s>").encode("the")
    assert HFTokenizer(tokenizer_file, eos_token="<pad>", bos_token="<s>").encode("the") == named
    assert (named[0], named[-1]) == (1, 3)
    assert caplog.messages == []


def test_a_config_next_to_a_tokenizer_file_names_its_special_tokens(
    tokenizer_file, tmp_path, caplog
):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    tokens = {"eos_token": {"content": "<pad>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 3, False)
    assert caplog.messages == []


def test_truncation_and_padding_in_a_file_are_switched_off(tokenizer_file, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=3, pad_token="<pad>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, loaded = (
        load_tokenizer(path, eos_token="</s>")
        for path in (tokenizer_file, tmp_path / "tokenizer.json")
    )
    texts = ["the quick brown fox " * 20, "the"]
    assert [loaded.encode(text) for text in texts] == [plain.encode(text) for text in texts]
    assert [ids.tolist() for ids in loaded.encode_batch(texts)] == [*map(plain.encode, texts)]
    assert len(loaded.encode(texts[0])) > 20
    assert loaded.fingerprint() == plain.fingerprint()


def test_a_folder_saved_after_a_truncating_call_does_not_truncate(tokenizer_file, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token="</s>", pad_token="<pad>"
    )
    fast(["the fox", "the"], truncation=True, max_length=4, padding="max_length")
    fast.save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path).encode("the quick brown fox " * 20)) > 20


def test_all_ids_are_below_the_vocabulary_size_even_with_gaps(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json", add_eos=False).vocab_size == 8


def test_an_invalid_tokenizer_is_one_clear_error(tmp_path, tokenizer_file):
    wrong = tmp_path / "tokenizer.json"
    wrong.write_text('{"not": "a tokenizer"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*is not a tokenizer"):
        load_tokenizer(wrong)
    with pytest.raises(ConfigError, match="not a file"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"absent\.json' does not exist"):
        load_tokenizer(tmp_path / "absent.json")
    words = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(words))
    with pytest.raises(ConfigError, match="no eos token in its files; name one with --eos-token"):
        load_tokenizer(words)
    with pytest.raises(ConfigError, match="bytes: has its own bos and eos tokens; remove 'x'"):
        load_tokenizer("bytes", eos_token="x")
    with pytest.raises(ConfigError, match="'<end>' in its vocabulary"):
        load_tokenizer(tokenizer_file, eos_token="<end>")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"eos_token": 5}', '{"eos_token": {}}'])
def test_invalid_tokenizer_settings_are_one_clear_error(tmp_path, tokenizer_file, content):
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes(Path(tokenizer_file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_tokenizer(tmp_path)
    try:  # next to a tokenizer file, settings that can be read name its special tokens
        load_tokenizer(tmp_path / "tokenizer.json")
    except ConfigError as error:
        assert "no eos token" in str(error)


@pytest.mark.parametrize("load", [load_tokenizer, HFChatTemplate])
def test_code_in_a_folder_is_neither_run_nor_prompted_for(tmp_path, monkeypatch, load):
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it prompted"))
    (tmp_path / "tok.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass T: ...\n")
    settings = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tok.T", "tok.T"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load(str(tmp_path))
    assert not (tmp_path / "it_ran").exists()


def train_sentencepiece(path, **options):
    """Write a sentencepiece model trained on a few words; its pad has no id."""
    library = pytest.importorskip("sentencepiece")
    content = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "the slow brown dog"] * 50),
        model_writer=content,
        vocab_size=60,
        hard_vocab_limit=False,
        user_defined_symbols=["<|end|>"],
        minloglevel=2,
        **options,
    )
    path.write_bytes(content.getvalue())
    return path


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


def test_a_sentencepiece_model_encodes_like_its_library(sentencepiece_file):
    library = pytest.importorskip("sentencepiece")
    model = library.SentencePieceProcessor(model_file=str(sentencepiece_file))
    tokenizer = load_tokenizer(sentencepiece_file)
    assert tokenizer.encode("the brown fox") == [*model.encode("the brown fox"), 2]
    batch = tokenizer.encode_batch(["the fox", ""])
    assert [ids.tolist() for ids in batch] == [[*model.encode("the fox"), 2], [2]]
    assert {ids.dtype for ids in batch} == {np.dtype(np.int64)}
    assert tokenizer.decode([1, *batch[0], model.vocab_size() + 7]) == "the fox"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.vocab_size == model.vocab_size()
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied.encode("the fox") == batch[0].tolist()


def test_control_pieces_that_a_chat_template_writes_are_tokens(tmp_path):
    """As for transformers, whose class finds them first; a document may contain their names."""
    transformers = pytest.importorskip("transformers")
    path = train_sentencepiece(
        tmp_path / "tokenizer.model",
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path, legacy=True)
    ours = load_tokenizer(path)
    texts = "<s>the fox</s>", "dog</s><s>the quick", "</s>", "brown", ""
    texts += " the fox", "<s> the fox </s> dog", "</s>  brown", "</s> <s>"
    for text, found in zip(texts, ours.encode_bare(texts)):
        assert found.tolist() == theirs(text, add_special_tokens=False)["input_ids"], text
    (continued,) = ours.encode_bare(["fox</s>fox"], continued=True)
    first, second = ours.encode_bare(["fox"], continued=True), ours.encode_bare(["fox"])
    assert continued.tolist() == [*first[0], ours.eos_id, *second[0]]
    assert ours.eos_id not in ours.encode_bare(["fox </ s>"])[0]
    assert ours.encode("</s>").count(ours.eos_id) == 1  # the one that ends the document


def test_other_sentencepiece_pieces_can_be_bos_and_eos(sentencepiece_file):
    tokenizer = load_tokenizer(sentencepiece_file, bos_token="<s>", eos_token="<|end|>")
    tokens = tokenizer.encode("the dog")
    assert (tokens[0], tokens[-1]) == (1, 3)
    assert tokenizer.decode(tokens) == "the dog"
    with pytest.raises(ConfigError, match="no eos token '<end>' in its vocabulary"):
        load_tokenizer(sentencepiece_file, eos_token="<end>")


def test_a_sentencepiece_model_is_identified_by_its_file_hash(sentencepiece_file, tmp_path):
    found = load_tokenizer(sentencepiece_file).fingerprint()
    assert found["sha256"] == hashlib.sha256(sentencepiece_file.read_bytes()).hexdigest()
    moved = tmp_path / "other.model"
    moved.write_bytes(sentencepiece_file.read_bytes())
    assert load_tokenizer(moved).fingerprint() == found
    assert load_tokenizer(moved, eos_token="<|end|>").fingerprint() != found


@pytest.mark.parametrize("content", [b"", b"no model", b"\x0a\xff", b"\x0a\x00"])
def test_an_invalid_sentencepiece_model_is_one_clear_error(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.model' is (not a sentencepiece model|empty)"):
        load_tokenizer(tmp_path / "a.model")
    with pytest.raises(ConfigError, match=r"absent\.model' does not exist"):
        load_tokenizer(tmp_path / "absent.model")


def test_a_missing_sentencepiece_package_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_bytes(b"\x0a")
    with pytest.raises(ConfigError, match="needs the package `sentencepiece`: pip install"):
        load_tokenizer(tmp_path / "a.model")


@pytest.mark.parametrize("name", ["a.tiktoken", "tokenizer.model"])
def test_the_error_for_a_tiktoken_file_has_code_that_converts_it(name, tmp_path, monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (b"th", b"the", b" the", b"qu"):
        ranks[token] = len(ranks)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (tmp_path / name).write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="is a tiktoken file") as raised:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(raised.value)
    pytest.importorskip("transformers")
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    exec(re.search('python -c "(.*)"', str(raised.value))[1], {})
    tokenizer = load_tokenizer("tokenizer.json")
    original = tiktoken.Encoding(
        "original", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={}
    )
    assert tokenizer.encode("the") == [*original.encode("the"), 260] == [257, 260]


def test_the_error_for_a_tiktoken_encoding_shows_how_to_convert_it(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"is a tiktoken encoding.*/tokenizer\.json\.$"):
        load_tokenizer("cl100k_base")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cl100k_base").mkdir()  # it was converted
    with pytest.raises(ConfigError, match="transformers"):
        load_tokenizer("cl100k_base")


def test_a_tokenizer_that_begins_texts_with_its_bos_token_does_so_here(tmp_path):
    """Llama 3 and Gemma do; a model that was trained with it is confused without."""
    transformers = pytest.importorskip("transformers")
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<unk>": 4}, "<unk>")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def save(folder):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)
        fast.save_pretrained(tmp_path / folder)
        return tmp_path / folder

    plain = save("plain")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    adding = save("adding")
    loaded = transformers.AutoTokenizer.from_pretrained(adding)
    theirs = loaded("a b")["input_ids"]
    assert theirs == [0, 2, 3]
    bare = tmp_path / "bare.json"
    bare.write_bytes((adding / "tokenizer.json").read_bytes())
    for path in (adding, adding / "tokenizer.json", bare):
        assert load_tokenizer(path).encode("a b") == [*theirs, 1]
        assert load_tokenizer(path, bos_token="none").encode("a b") == [2, 3, 1]
        # A bos token in the text itself is kept, as by transformers.
        assert loaded("<s> a b")["input_ids"] == [0, 0, 2, 3]
        assert load_tokenizer(path).encode("<s> a b") == [0, 0, 2, 3, 1]
        assert HFTokenizer(path, add_bos=False).encode("a b") == [2, 3, 1]
    assert load_tokenizer(plain).encode("a b") == [2, 3, 1]
    assert load_tokenizer(plain, bos_token="<s>").encode("a b") == [0, 2, 3, 1]
