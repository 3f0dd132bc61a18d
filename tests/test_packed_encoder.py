# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From prepared text to packed batches, through real Energon loaders."""

import math
import re
from collections import Counter

import megatron.energon
import numpy as np
import pytest
import torch
from megatron.energon import DefaultTaskEncoder, TextSample

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    PromptTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.errors import SampleError
from energon_ext.mixture.checks import BlendWarning
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    batch_hash,
    close_loaders,
    config,
    loader_for,
    stock_loader_for,
    take,
    write_dataset,
    write_mix,
)

SEQ_LEN = 48


@pytest.fixture(autouse=True)
def _several_pack_plans(monkeypatch):
    """Pack ``packing_buffer_docs`` documents at once: by default all of these fit into one plan."""
    monkeypatch.setattr("energon_ext.encoders.plan_mix.MAX_BUFFER_DOCS", 1)


def document(source, number):
    """Return a text that contains its name; lengths 9 to 98, shorter and longer than a row."""
    return f"<{source}{number:04d}>" + "." * (number * 37 % 90 + 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in (("prose", 120), ("code", 75), ("docs", 40)):
        write_dataset(
            root / source,
            [document(source, number) for number in range(count)],
            split_parts=[("train", "shard_00[0-9].tar"), ("val", "shard_000.tar")],
        )
    return root


@pytest.fixture(scope="module")
def mix(data):
    return write_mix(
        data / "mix.yaml",
        [("prose", {"linear": {0: 4, 40: 0}}), ("code", {"step": {0: 0, 20: 3}}), ("docs", 1)],
    )


def build(
    path,
    *,
    num_workers=0,
    rank=0,
    world_size=1,
    seed=0,
    batch_size=2,
    shuffle=16,
    rows_per_step=None,
    **options,
):
    encoder_options = {"packing_buffer_docs": 12, **options}
    repeat = encoder_options.pop("repeat", True)
    return get_train_dataset(
        path,
        worker_config=config(num_workers, rank, world_size, seed),
        batch_size=batch_size,
        rows_per_step=rows_per_step,
        shuffle_buffer_size=shuffle,
        repeat=repeat,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, **encoder_options),
    )


def trained_transitions(batches):
    """Count how often each (input, label) pair is trained."""
    counts = Counter()
    for batch in batches:
        weights = batch.token_weights.numpy()
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
            tokens = batch.tokens[start:end].tolist()
            labels = batch.labels[start:end].tolist()
            for position, (token, label) in enumerate(zip(tokens, labels)):
                if weights[start + position]:
                    counts[token, label] += 1
    return counts


def expected_transitions(sources):
    tokenizer = ByteTokenizer()
    counts = Counter()
    for source, number_of_documents in sources.items():
        for number in range(number_of_documents):
            tokens = tokenizer.encode(document(source, number))
            counts.update(zip(tokens, tokens[1:]))
    return counts


def sources_and_names_in(batches):
    """Return source and name of each document that starts in the batches, in row order."""
    found = []
    for batch in batches:
        ends = batch.cu_seqlens.tolist()
        for start, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
            tokens = batch.tokens[start:end]
            if source >= 0 and tokens[0] == 1:  # bos
                text = ByteTokenizer().decode(
                    tokens.tolist() + batch.labels[end - 1 : end].tolist()
                )
                found.append((batch.sources[source], text.split(">")[0].lstrip("<")))
    return found


@pytest.mark.parametrize(
    ("packing", "num_workers", "world_size"),
    [
        ("bin", 0, 1),
        ("bin", 3, 2),
        ("sequential", 0, 1),
        *(
            pytest.param(packing, *topology, marks=pytest.mark.nightly)
            for packing in ("bin", "sequential")
            for topology in [(1, 1), (3, 1), (0, 2), (1, 2)]
        ),
        pytest.param("sequential", 3, 2, marks=pytest.mark.nightly),
    ],
)
def test_one_epoch_trains_every_transition_exactly_once(mix, packing, num_workers, world_size):
    weights = write_mix(mix.parent / "equal.yaml", [("prose", 3), ("code", 1), ("docs", 2)])
    batches = []
    for rank in range(world_size):
        dataset = build(
            weights,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
            packing=packing,
            mask_boundary_loss=True,
            repeat=False,
        )
        batches.extend(batch.validate() for batch in loader_for(dataset))
    assert trained_transitions(batches) == expected_transitions(
        {"prose": 120, "code": 75, "docs": 40}
    )
    documents = Counter()
    for batch in batches:
        documents.update(batch.documents_per_source())
    assert documents == {"prose:train": 120, "code:train": 75, "docs:train": 40}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.nightly), 3])
def test_the_first_batch_at_a_breakpoint_already_follows_the_new_weights(data, num_workers):
    path = write_mix(
        data / "switch.yaml", [("prose", {"step": {0: 1, 7: 0}}), ("code", {"step": {0: 0, 7: 1}})]
    )
    dataset = build(path, num_workers=num_workers, shuffle=30)
    sources = [set(batch.tokens_per_source()) for batch in take(loader_for(dataset), 14)]
    assert sources == [{"prose:train"}] * 7 + [{"code:train"}] * 7


def test_yaml_order_does_not_matter(data):
    entries = [("prose", {"linear": {0: 4, 40: 0}}), ("code", 2), ("docs", 1)]
    orders = []
    for arranged in (entries, entries[::-1]):
        path = write_mix(data / "arranged.yaml", arranged)
        orders.append([batch_hash(batch) for batch in take(loader_for(build(path)), 12)])
    assert orders[0] == orders[1]


def test_shares_follow_a_schedule(mix):
    dataset = build(mix, batch_size=64)
    blend = find_blend(dataset)
    drawn, expected, variance = Counter(), Counter(), Counter()
    for index, batch in enumerate(take(loader_for(dataset), 40)):
        first_segments = [
            int(batch.source_ids[batch.cu_seqlens[:-1].tolist().index(start)])
            for start in range(0, 64 * SEQ_LEN, SEQ_LEN)
        ]
        for key, share in blend.shares_at_step(index).items():
            drawn[key] += first_segments.count(batch.sources.index(key))
            expected[key] += 64 * share
            variance[key] += 64 * share * (1 - share)
    for key in expected:
        assert abs(drawn[key] - expected[key]) <= 5 * math.sqrt(variance[key])


def test_constant_weights_match_the_shares_of_stock_energon(data):
    """Stock Energon draws documents, we draw rows; here each row contains one document."""
    for source in ("left", "right"):
        write_dataset(data / source, [f"{source}{n:05d}"[:9] for n in range(60)])
    path = write_mix(data / "constant.yaml", [("left", 1), ("right", 3)])
    ours = build(path, batch_size=100, packing_max_docs_per_bin=1)
    drawn = Counter()
    for batch in take(loader_for(ours), 20):
        drawn.update(batch.documents_per_source())
    stock = megatron.energon.get_train_dataset(
        path,
        worker_config=config(),
        batch_size=100,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=DefaultTaskEncoder(),
    )
    texts = [text for batch in take(stock_loader_for(stock), 5) for text in batch.text]
    lefts = sum(text.startswith("left") for text in texts)
    for found, draws in ((lefts, 500), (drawn["left:train"], 2000)):
        assert abs(found - 0.25 * draws) <= 5 * math.sqrt(draws * 0.25 * 0.75)
    assert drawn["left:train"] + drawn["right:train"] == 2000


@pytest.mark.parametrize(
    ("num_workers", "packing"),
    [
        (0, "bin"),
        (1, "sequential"),
        pytest.param(0, "sequential", marks=pytest.mark.nightly),
        pytest.param(3, "bin", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_bit_exactly_over_three_hops(mix, num_workers, packing):
    hashes = [batch_hash(batch) for batch in take(loader_for(build(mix, packing=packing)), 44)]
    # Each worker process takes time to start.
    for save_points in ((1, 2, 3), (19, 30, 31)) if num_workers != 1 else ((3, 30, 31),):
        state, position = None, 0
        for save_point in (*save_points, 44):
            loader = loader_for(build(mix, num_workers=num_workers, packing=packing))
            loader.restore_state_rank(state)
            batches = take(loader, save_point - position)
            assert [batch_hash(b) for b in batches] == hashes[position:save_point]
            state, position = loader.save_state_rank(), save_point
            close_loaders()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"seq_len": SEQ_LEN + 1}, "seq_len"),
        ({"packing": "sequential"}, "packing"),
        ({"packing_max_docs_per_bin": 3}, "packing"),
        ({"packing_carry": 0.4}, "packing"),
        ({"alignment": 2}, "alignment"),
        ({"mask_boundary_loss": False}, "mask_boundary_loss"),
        ({"train_on_eos": False}, "train_on_eos"),
        ({"tokenizer": ByteTokenizer(add_bos=False)}, "tokenizer"),
    ],
)
def test_a_state_of_another_configuration_is_refused_with_the_field(mix, change, field):
    loader = loader_for(build(mix, rows_per_step=4))
    take(loader, 3)
    state = loader.save_state_rank()  # inside a step
    seq_len = change.pop("seq_len", SEQ_LEN)
    tokenizer = change.pop("tokenizer", ByteTokenizer())
    other = get_train_dataset(
        mix,
        worker_config=config(seed=change.pop("seed", 0)),
        batch_size=2,
        rows_per_step=4,
        task_encoder=PackedTaskEncoder(tokenizer, seq_len, **{"packing_buffer_docs": 12, **change}),
    )
    with pytest.raises(StateMismatchError) as error:
        loader_for(other).restore_state_rank(state)
    assert field in error.value.differences
    assert field in str(error.value)


def test_remaining_sources_continue_while_others_are_added_and_removed(data):
    """Every document appears once per epoch of its source, over three changes of the mix."""
    mixes = [
        [("prose", 2), ("code", 1)],
        [("docs", 1), ("code", 3), ("prose", 1)],
        [("code", 1)],
        [("code", 2), ("prose", 1), ("docs", 1)],
    ]
    seen, state = Counter(), None
    for number, entries in enumerate(mixes):
        path = write_mix(data / f"changing{number}.yaml", entries)
        loader = loader_for(build(path, packing_max_docs_per_bin=1))
        loader.restore_state_rank(state)
        seen.update(name for _, name in sources_and_names_in(take(loader, 9)))
        state = loader.save_state_rank()
    assert set(seen.values()) == {1}
    assert {name[:4] for name in seen} == {"pros", "code", "docs"}


def test_a_folder_listed_twice_is_read_in_two_orders(data):
    path = write_mix(data / "twice.yaml", [("prose", 1), ("prose", 1)])
    with pytest.warns(BlendWarning, match="listed more than once"):
        dataset = build(path, packing_max_docs_per_bin=1)
    assert find_blend(dataset).keys == ("prose:train", "prose:train#2")
    orders = {key: [] for key in find_blend(dataset).keys}
    for source, name in sources_and_names_in(take(loader_for(dataset), 60)):
        orders[source].append(name)
    first, second = orders.values()
    assert len(first) > 20
    assert len(second) > 20
    # Two independent orders of 120 documents agree in few places.
    assert sum(one == other for one, other in zip(first, second)) < 5


def test_validation_reads_every_document_once_and_in_order(data):
    path = write_mix(data / "val.yaml", [("prose", 1), ("code", 2)], split="val")
    encoder = PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing="sequential")
    datasets = get_val_datasets(path, worker_config=config(), batch_size=3, task_encoder=encoder)
    for (dataset, _), source in zip(datasets, ("prose", "code")):
        batches = list(loader_for(dataset))
        text = ByteTokenizer().decode(torch.cat([batch.tokens for batch in batches]))
        assert re.findall(r"<(\w+)>", text) == [f"{source}{number:04d}" for number in range(50)]
        assert batches[0].sources == (f"{source}:val",)


def test_eos_labels_and_boundaries_are_masked_on_request(mix):
    for options in ({"train_on_eos": False}, {"mask_boundary_loss": True}):
        batch = take(loader_for(build(mix, packing="sequential", **options)), 1)[0]
        masked = batch.labels == (2 if "train_on_eos" in options else 1)
        assert masked.any()
        assert not batch.token_weights[masked].any()
        assert batch.token_weights[~masked].all()


def test_a_first_window_by_hand(tmp_path):
    write_dataset(tmp_path / "hi", ["hi"] * 40)
    encoder = PackedTaskEncoder(ByteTokenizer(), 8, packing="sequential", mask_boundary_loss=True)
    dataset = get_train_dataset(
        tmp_path / "hi", worker_config=config(), batch_size=1, task_encoder=encoder
    )
    batch = take(loader_for(dataset), 1)[0]
    assert batch.tokens.tolist() == [1, 108, 109, 2] * 2
    assert np.flatnonzero(batch.token_weights.numpy() == 0).tolist() == [3, 7]
    assert batch.grid(1, 1, 8)["segment_ids"].tolist() == [[[1, 1, 1, 1, 2, 2, 2, 2]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "first-come"}, "'first-come' found"),
        ({"packing_buffer_docs": 0}, "packing_buffer_docs"),
        ({"packing_max_docs_per_bin": 0}, "packing_max_docs_per_bin"),
        ({"packing": "sequential", "packing_carry": 0.3}, "'sequential' has no option 'carry'"),
        ({"packing": "sequential", "packing_max_docs_per_bin": 2}, "no option 'max_docs_per_bin'"),
        ({"packing": "sequential", "alignment": 2}, "'sequential' has no option 'alignment'"),
        ({"alignment": 0}, "alignment: 0 found"),
    ],
)
def test_a_wrong_encoder_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, **options)


@pytest.mark.parametrize(("text", "shown"), [(b"bytes", "b'bytes'"), ("\ud800", r"'\\ud800'")])
def test_non_text_is_an_error_of_its_sample(text, shown):
    sample = TextSample(__key__="7", __restore_key__=(), text=text)
    with pytest.raises(SampleError, match=f"Sample 7: text is {shown}; Unicode text is needed"):
        PackedTaskEncoder(ByteTokenizer(), 16).encode_document(sample)


@pytest.mark.parametrize("encoder", [lambda t: PackedTaskEncoder(t, 16), PromptTaskEncoder])
def test_an_incomplete_tokenizer_is_refused_with_the_missing_names(encoder):
    class Incomplete:
        vocab_size, bos_id, eos_id, pad_id, add_eos = 9, None, None, 0, False

        def encode_array(self, text):
            return np.zeros(1, np.int64)

    message = (
        "tokenizer: a Incomplete has no add_bos, encode_batch, encode_bare, added_tokens, decode, "
        "show, fingerprint; make it a subclass of energon_ext.tokenizers.protocol.Tokenizer"
    )
    with pytest.raises(ConfigError, match=message):
        encoder(Incomplete())


def test_text_sources_are_identified_by_their_tokens(mix, monkeypatch):
    build(mix)
    monkeypatch.delattr("energon_ext.encoders.stream_mix.fingerprint_files")  # of streamed sources
    dataset = build(mix)
    sources = loader_for(dataset).state_dict()["plan"]["sources"].values()
    assert all(source["rows"]["documents"]["tokens"] for source in sources)


def test_a_cost_without_a_matching_balance_is_refused():
    with pytest.raises(ConfigError, match="cost: has no effect without balance='attention'"):
        PackedTaskEncoder(ByteTokenizer(), 8, cost=AttentionCost())
