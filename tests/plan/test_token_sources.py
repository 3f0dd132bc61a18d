# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files as sources: one read per epoch, exact resume, errors that name the file."""

import json

import numpy as np
import pytest

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.encoders import plan_mix
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.file_set import TokenFiles
from tests.plan.runs import write_split
from tests.support import (
    LargeTokenizer,
    batch_hash,
    close_loaders,
    config,
    loader_for,
    take,
    trained_transitions,
    write_dataset,
    write_mix,
    write_tokens,
)

SEQ_LEN = 16
FIRST = 1000  # token of document d: FIRST + 100 * d + position


def documents(lengths):
    return [[FIRST + 100 * d + p for p in range(length)] for d, length in enumerate(lengths)]


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 40, 40)]


def encoder(**options):
    return PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, **options)


def dataset_of(path, *, batch_size=2, task_encoder=None, seed=0, **worker_options):
    return get_train_dataset(
        path,
        worker_config=config(seed=seed, **worker_options),
        batch_size=batch_size,
        task_encoder=task_encoder or encoder(),
    )


@pytest.fixture
def pair(tmp_path):
    return write_tokens(tmp_path / "web_text_document", documents(LENGTHS))


@pytest.fixture
def mix(tmp_path, pair):
    return write_mix(tmp_path / "mix.yaml", [("web_text_document", 1)])


def one_epoch(mix, ranks, num_workers, packing):
    """Return the batches of all ranks of a blend that is read once."""
    batches = []
    for rank in range(ranks):
        dataset = get_train_dataset(
            mix,
            worker_config=config(num_workers, rank=rank, world_size=ranks),
            batch_size=1,
            task_encoder=encoder(packing=packing),
            repeat=False,
        )
        batches += list(loader_for(dataset))
    return batches


@pytest.mark.parametrize(
    ("packing", "ranks", "num_workers"),
    [
        ("bin", 2, 2),
        ("sequential", 3, 0),
        *(
            pytest.param(packing, *topology, marks=pytest.mark.nightly)
            for packing in ("bin", "sequential")
            for topology in ((1, 0), (1, 3), (3, 0), (2, 2))
        ),
    ],
)
def test_an_epoch_trains_every_transition_once(mix, ranks, num_workers, packing):
    batches = one_epoch(mix, ranks, num_workers, packing)
    counts = trained_transitions(batches)
    expected = {(a, b) for tokens in documents(LENGTHS) for a, b in zip(tokens, tokens[1:])}
    assert set(counts) == expected
    assert set(counts.values()) == {1}
    assert sum(sum(b.documents_per_source().values()) for b in batches) == len(LENGTHS)


def test_each_epoch_has_its_own_order_determined_by_the_seed(tmp_path):
    write_tokens(tmp_path / "web", documents([SEQ_LEN + 1] * 50))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])

    def order(seed):
        """Return the order of the documents, each of which is a row."""
        task_encoder = encoder(packing_carry=0)
        dataset = dataset_of(mix, batch_size=1, seed=seed, task_encoder=task_encoder)
        return [int(batch.tokens[0]) for batch in take(loader_for(dataset), 100)]

    first = order(seed=0)
    assert sorted(first[:50]) == sorted(first[50:]) == [FIRST + 100 * d for d in range(50)]
    assert first[:50] != first[50:]
    assert first == order(seed=0)
    assert first != order(seed=1)


@pytest.mark.parametrize(
    ("packing", "num_workers"),
    [
        ("bin", 0),
        ("sequential", 0),
        ("bin", 2),
        pytest.param("sequential", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_resume_is_exact_at_every_batch_and_over_two_resumes(mix, num_workers, packing):
    def fresh():
        return loader_for(
            dataset_of(mix, task_encoder=encoder(packing=packing), num_workers=num_workers)
        )

    loader = fresh()
    iterator = iter(loader)
    hashes, states = [], []
    for _ in range(30):  # more than an epoch
        hashes.append(batch_hash(next(iterator)))
        states.append(loader.save_state_rank())
    for position in range(29) if num_workers == 0 else (6, 22):
        resumed = fresh()
        resumed.restore_state_rank(states[position])
        again = iter(resumed)
        assert batch_hash(next(again)) == hashes[position + 1]
        hop = fresh()
        hop.restore_state_rank(resumed.save_state_rank())
        expected = hashes[position + 2 : position + 6]
        assert [batch_hash(batch) for batch in take(hop, len(expected))] == expected
        close_loaders()


def test_a_subset_reads_only_its_documents_and_validation_in_order(tmp_path, pair):
    reference = {"path": "web_text_document", "subset": {"range": ["50%", "100%"]}}
    train = write_split(tmp_path / "train.yaml", {"blend": [reference]})
    batches = take(loader_for(dataset_of(train)), 40)
    seen = {t for b in batches for t in b.tokens.tolist() + b.labels.tolist()}
    read = {(t - FIRST) // 100 for t in seen if t >= FIRST}
    assert read == set(range(20, 40))
    [(validation, _)] = get_val_datasets(
        write_split(tmp_path / "val.yaml", reference, split="val"),
        worker_config=config(),
        batch_size=1,
        task_encoder=encoder(packing="sequential"),
    )
    stream = [t for batch in loader_for(validation) for t in batch.tokens.tolist() if t >= FIRST]
    assert stream == [t for tokens in documents(LENGTHS)[20:] for t in tokens][: len(stream)]


def test_multi_sequence_and_empty_documents_are_read_whole(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/web.bin", dtype=np.int32)
    builder.add_document(torch.tensor([5, 6, 7, 8, 9]), [2, 3])
    builder.add_document(torch.tensor([], dtype=torch.int64), [0])
    builder.add_document(torch.tensor([70000, 70001]), [1, 1])
    builder.finalize(f"{tmp_path}/web.idx")
    file = TokenFiles([tmp_path / "web"])
    assert len(file) == 3
    found = [file.document(index).tolist() for index in range(3)]
    assert found == [[5, 6, 7, 8, 9], [], [70000, 70001]]
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    [batch] = take(loader_for(dataset_of(mix, batch_size=1)), 1)
    assert batch.validate().tokens.max() == 70001


def test_documents_longer_than_a_row_are_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 8)
    write_tokens(tmp_path / "long", [[FIRST + d] * (10 * SEQ_LEN + 1) for d in range(40)])
    mix = write_mix(tmp_path / "mix.yaml", [("long", 1)])
    task_encoder = encoder(packing_buffer_docs=8)
    batches = take(loader_for(dataset_of(mix, batch_size=10, task_encoder=task_encoder)), 30)
    assert sum(len(set(batch.tokens.tolist())) for batch in batches) / 30 > 4.5


def test_a_file_that_grew_is_refused_by_a_resume(tmp_path, pair, mix):
    loader = loader_for(dataset_of(mix))
    take(loader, 3)
    state = loader.save_state_rank()
    write_tokens(pair, documents([*LENGTHS, 5]))
    grown = loader_for(dataset_of(mix))
    with pytest.raises(StateMismatchError) as refused:
        grown.restore_state_rank(state)
    differences = refused.value.differences
    assert differences.pop("web_text_document: index")
    assert differences.pop("web_text_document: sample")
    assert differences == {
        "web_text_document: documents": (40, 41),
        "web_text_document: tokens": (sum(LENGTHS), sum(LENGTHS) + 5),
    }


def test_a_file_with_equal_lengths_but_other_tokens_is_refused_by_a_resume(pair, mix):
    loader = loader_for(dataset_of(mix))
    take(loader, 3)
    cursor = loader.state_dict()
    write_tokens(pair, [[token + 1 for token in document] for document in documents(LENGTHS)])
    message = r"\(web_text_document: sample: saved '\w+', now '\w+'\)"
    with pytest.raises(StateMismatchError, match=message):
        loader_for(dataset_of(mix)).load_state_dict(cursor)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pair: pair.with_suffix(".idx").unlink(), "web_text_document.idx: does not exist"),
        (lambda pair: pair.with_suffix(".bin").unlink(), "web_text_document.bin: does not exist"),
        (lambda pair: pair.with_suffix(".bin").write_bytes(b"123"), "has 3 bytes"),
        (lambda pair: pair.with_suffix(".idx").write_bytes(b"no index"), "not a Megatron index"),
    ],
)
def test_a_damaged_pair_is_refused_when_the_dataset_is_built(pair, mix, damage, message):
    damage(pair)
    with pytest.raises(ConfigError, match=message):
        dataset_of(mix)


def test_a_suffix_in_the_path_does_not_change_the_rows(tmp_path, mix, pair):
    other = write_mix(tmp_path / "other.yaml", [("web_text_document.bin", 1)])
    first, second = (take(loader_for(dataset_of(path)), 5) for path in (mix, other))
    assert [batch_hash(batch) for batch in first] == [batch_hash(batch) for batch in second]


def test_a_megatron_cache_folder_of_the_same_name_is_not_a_dataset(tmp_path, pair, mix):
    (tmp_path / "web_text_document" / "cache").mkdir(parents=True)
    assert take(loader_for(dataset_of(mix)), 1)[0].validate().sources == ("web_text_document",)
    write_dataset(tmp_path / "web_text_document", ["a prepared folder wins"] * 3)
    assert find_blend(dataset_of(mix)).keys == ("web_text_document:train",)


def test_a_source_with_fewer_documents_than_workers_does_not_end_the_run(tmp_path):
    write_tokens(tmp_path / "one", documents([30]))
    write_tokens(tmp_path / "many", documents(LENGTHS))
    mix = write_mix(tmp_path / "mix.yaml", [("one", 1), ("many", 1)])
    assert len(take(loader_for(dataset_of(mix, num_workers=2)), 9)) == 9


def test_token_ids_outside_the_vocabulary_are_refused(mix):
    with pytest.raises(
        ConfigError, match="contains token id 4[0-9]+, but the tokenizer bytes has 260"
    ):
        dataset_of(mix, task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN))


def test_a_token_file_from_another_tokenizer_is_refused(mix, pair):
    meta = pair.with_name(pair.name + ".meta.json")
    meta.write_text(json.dumps({"tokenizer": LargeTokenizer().fingerprint()}))
    dataset_of(mix)
    meta.write_text(json.dumps({"tokenizer": {"kind": "hf", "sha256": "5f"}}))
    with pytest.raises(
        ConfigError,
        match="written with a different tokenizer, but bytes is used .* .kind hf, now bytes",
    ):
        dataset_of(mix)
    meta.write_text("[]")
    with pytest.raises(ConfigError, match="meta.json: not written by"):
        dataset_of(mix)


def test_a_source_ends_at_its_limit_and_returns_when_it_is_raised(tmp_path, pair):
    write_tokens(tmp_path / "other", documents(LENGTHS))

    def fresh(limit):
        entries = [{"path": "web_text_document", "max_epochs": limit}, {"path": "other"}]
        path = write_split(tmp_path / "limited.yaml", {"interleave": entries})
        return loader_for(dataset_of(path))

    def documents_of_web(batches):
        return sum(b.documents_per_source().get("web_text_document", 0) for b in batches)

    loader = fresh(limit=2)
    assert documents_of_web(take(loader, 110)) == 2 * len(LENGTHS)
    state = loader.save_state_rank()
    for limit, more in ((2, 0), (3, len(LENGTHS))):
        resumed = fresh(limit)
        resumed.restore_state_rank(state)
        assert documents_of_web(take(resumed, 70)) == more
