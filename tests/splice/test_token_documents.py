# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spliced documents of a token file equal those of its text, and stay on disk."""

import numpy as np
import pytest

from energon_ext import (
    ConfigError,
    MultiSpliceTaskEncoder,
    SpliceTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.splice import MultiSpliceConfig, SpliceConfig
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.splice import mixes
from tests.support import (
    LargeTokenizer,
    config,
    documents_of,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

SEQ_LEN = 16
TEXTS = ["".join(chr(97 + (n * 7 + k * k) % 26) for k in range(3 + n * 5 % 11)) for n in range(20)]
TOKENS = [ByteTokenizer().encode(text) for text in TEXTS]
SPLICE = MultiSpliceConfig(num_docs=4, content_length=6, balance_mode="every_pair")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokens")
    write_dataset(root / "text", TEXTS, shard_size=7)
    write_tokens(root / "text_document", TOKENS)
    write_tokens(root / "other_document", [tokens[::-1] for tokens in TOKENS[::-1]])
    return root


def mix_of(data, name, **fields):
    return mixes.mix_of(data, name, (name, fields))


def build(path, splice=SPLICE, tokenizer=None, **options):
    encoder = MultiSpliceTaskEncoder if isinstance(splice, MultiSpliceConfig) else SpliceTaskEncoder
    return get_train_dataset(
        path,
        worker_config=config(options.pop("num_workers", 0)),
        batch_size=4,
        task_encoder=encoder(tokenizer or ByteTokenizer(), SEQ_LEN, splice),
        **options,
    )


def shown(dataset):
    """Count how often each (document, tokens, offset) was shown."""
    examples = mixes.shown(loader_for(dataset))
    return {(name.rpartition("/")[2], *rest): count for (name, *rest), count in examples.items()}


@pytest.mark.parametrize("mode", ["slide_within", "cyclic_roll", "coverage_balanced"])
def test_documents_equal_those_of_the_text(data, mode):
    splice = MultiSpliceConfig(**{**SPLICE.to_json(), "content_start_mode": mode})
    found = shown(build(mix_of(data, "text_document"), splice, repeat=False))
    assert found == shown(build(mix_of(data, "text"), splice, repeat=False))
    assert len({document for document, _, _ in found}) == 4


def test_tokens_stay_on_disk(data):
    found = documents_of(build(mix_of(data, "text_document")))
    assert len(found) == 4
    for tokens in found:
        assert tokens.dtype == np.uint16 and not tokens.flags.owndata
        assert tokens.tolist() in TOKENS


def test_a_subset_of_a_file_has_its_own_numbers(data):
    path = mix_of(data, "text_document", subset={"range": ["50%", "100%"]})
    dataset = build(path, SpliceConfig(doc_index=3))
    (source,), (tokens,) = splices_of(dataset), documents_of(dataset)
    assert tokens.tolist() == TOKENS[13]
    assert source.names == [name for name in source.names if name.endswith("/doc3")]


def test_resume_continues_and_other_documents_are_refused(data):
    path = mix_of(data, "text_document")
    loader = loader_for(build(path))
    expected = [batch.tokens.tolist() for batch in take(loader, 6)]
    first = loader_for(build(path))
    take(first, 3)
    state = first.save_state_rank()
    resumed = loader_for(build(path))
    resumed.restore_state_rank(state)
    assert [batch.tokens.tolist() for batch in take(resumed, 3)] == expected[3:]
    other = MultiSpliceConfig(**{**SPLICE.to_json(), "doc_select_mode": "shortest"})
    changed = loader_for(build(path, other))
    with pytest.raises(StateMismatchError, match="documents: saved"):
        changed.restore_state_rank(state)


def test_other_documents_of_equal_length_are_refused(tmp_path):
    write_tokens(tmp_path / "web", TOKENS)
    path = mix_of(tmp_path, "web")
    loader = loader_for(build(path))
    take(loader, 1)
    write_tokens(tmp_path / "web", [[token + 1 for token in tokens] for tokens in TOKENS])
    with pytest.raises(StateMismatchError, match="web: documents: saved"):
        loader_for(build(path)).restore_state_rank(loader.save_state_rank())


def test_a_prefix_may_use_ids_too_large_for_the_file(data):
    """The file has two bytes per token; the pad token needs three."""
    splice = SpliceConfig(doc_index=0, attend_prefix=True, pad_token_id=70_000)
    dataset = build(mix_of(data, "text_document"), splice, LargeTokenizer())
    batch = take(loader_for(dataset), 1)[0]
    assert 70_000 in batch.tokens[: int(batch.cu_seqlens[1])].tolist()


def test_validation_selects_the_same_documents(data):
    path = write_mix(data / "val.yaml", [("text_document", 1)], split="val")
    ((dataset, _),) = get_val_datasets(
        path,
        worker_config=config(),
        batch_size=4,
        task_encoder=MultiSpliceTaskEncoder(ByteTokenizer(), SEQ_LEN, SPLICE),
    )
    training = build(mix_of(data, "text_document"))
    shown, expected = ([t.tolist() for t in documents_of(each)] for each in (dataset, training))
    assert shown == expected


def test_keys_and_foreign_tokens_are_refused_for_token_files(data):
    with pytest.raises(ConfigError, match="doc_key: the documents of source .* have no keys"):
        build(mix_of(data, "text_document"), SpliceConfig(doc_key="*1"))
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 50
    with pytest.raises(ConfigError, match="the tokenizer .* has 50"):
        build(mix_of(data, "text_document"), tokenizer=tokenizer)
