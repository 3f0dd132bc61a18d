# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spliced documents of Energon datasets, alone and in a blend."""

import json
import logging
from collections import Counter

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
from energon_ext.plan.lookup import find_blend
from energon_ext.splice import LossMap, MultiSpliceConfig, SpliceConfig, SpliceIndex
from energon_ext.splice.frames import splices_of
from energon_ext.state.consumption import Consumption
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.splice import slow
from tests.splice.mixes import mix_of, segments, shown
from tests.support import (
    batch_hash,
    close_loaders,
    config,
    documents_of,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

SEQ_LEN = 32
SPLICED = {"subflavors": {"splice": True}}
LENGTHS = [5 + number * 7 % 30 for number in range(40)]
SHORT = MultiSpliceConfig(
    num_docs=3, max_doc_length=12, content_start_mode="slide_within", balance_mode="every_pair"
)


def text(source, number):
    """Return letters that differ between documents; two tokens are added around them."""
    letters = "".join(chr(97 + (number * 5 + place * place) % 26) for place in range(40))
    return (source + letters)[: LENGTHS[number] - 2]


def tokens_of(number, source="k"):
    return ByteTokenizer().encode(text(source, number))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("splice")
    write_dataset(root / "book", [text("k", n) for n in range(40)], shard_size=9)
    write_tokens(root / "web", [tokens_of(n, "b") for n in range(40)])
    return root


@pytest.fixture(scope="module")
def mix(data):
    """Half of the rows are from the spliced book; from batch 6 on none are."""
    return mix_of(data, "mix", ("book", {**SPLICED, "weight": {"step": {0: 1, 6: 0}}}), ("web", {}))


def build(path, encoder, *, num_workers=0, rank=0, world_size=1, seed=0, batch_size=4, **options):
    return get_train_dataset(
        path,
        worker_config=config(num_workers, rank, world_size, seed),
        batch_size=batch_size,
        task_encoder=encoder,
        **options,
    )


def one(splice=None, **options):
    return SpliceTaskEncoder(ByteTokenizer(), SEQ_LEN, splice, packing_buffer_docs=8, **options)


def many(splice=SHORT, **options):
    return MultiSpliceTaskEncoder(
        ByteTokenizer(), SEQ_LEN, splice, packing_buffer_docs=8, **options
    )


def expected_examples(numbers):
    found = Counter()
    for number in numbers:
        doc = tokens_of(number)
        for t, s in slow.pairs(len(doc), SEQ_LEN):
            found[f"book:train/doc{number}", tuple(doc[t:]), s] += 1
    return found


def three_longest_short():
    fitting = [n for n in range(40) if LENGTHS[n] <= 12]
    return sorted(fitting, key=lambda n: (-LENGTHS[n], n))[:3]


def in_blend(data):
    """Write a metadataset of the book alone."""
    return write_mix(data / "book.yaml", [("book", 1)])


@pytest.mark.parametrize(
    ("num_workers", "world_size", "pack"),
    [(0, 1, True), (3, 2, False), pytest.param(3, 2, True, marks=pytest.mark.nightly)],
)
def test_one_epoch_shows_every_pair_once_on_any_ranks_and_workers(
    data, num_workers, world_size, pack
):
    splice = MultiSpliceConfig(**{**SHORT.to_json(), "pack_contents": pack})
    batches = []
    for rank in range(world_size):
        dataset = build(
            in_blend(data),
            many(splice),
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
            batch_size=12,
            repeat=False,
        )
        batches += [batch.validate() for batch in loader_for(dataset)]
    chosen = three_longest_short()
    assert shown(batches) == expected_examples(chosen)
    consumed = Consumption()
    for batch in batches:
        consumed.add_batch(batch)
    for number in chosen:
        name, doc = f"book:train/doc{number}", tokens_of(number)
        pairs = slow.pairs(len(doc), SEQ_LEN)
        assert consumed.rows[name] == len(pairs)
        assert consumed.tokens[name] == sum(len(doc) - t for t, _ in pairs)


def test_a_row_is_the_frame_of_its_pair(data):
    splice = SpliceConfig(doc_index=17, content_length=9, pad_token_id=3)
    dataset = build(in_blend(data), one(splice), batch_size=8)
    doc = np.array(tokens_of(17))
    frames = {
        (t, s): slow.frame(doc.tolist(), t, s, SEQ_LEN, 9, pad=3)
        for t, s in slow.pairs(len(doc), SEQ_LEN, 9)
    }
    seen = set()
    for batch in take(loader_for(dataset), 20):
        for row in range(8):
            part = slice(row * SEQ_LEN, (row + 1) * SEQ_LEN)
            weights = batch.token_weights[part]
            s = int(weights.nonzero()[0])
            inside = batch.tokens[part][s : s + int(weights.sum()) + 1].tolist()
            t = next(t for t in range(len(doc)) if doc[t : t + len(inside)].tolist() == inside)
            tokens, trained = frames[t, s]
            assert batch.tokens[part].tolist() == tokens
            assert batch.labels[part].tolist() == [*tokens[1:], 3]
            assert weights.tolist() == trained
            positions = batch.position_ids[part][s : s + len(inside)]
            assert positions.tolist() == list(range(s, s + len(inside)))
            grid = batch.grid(1, 8, SEQ_LEN)["segment_ids"][0, row]
            assert grid[: s + len(inside)].tolist() == [0] * s + [1] * len(inside)
            seen.add((t, s))
    assert len(seen) == 160 < len(frames)


def test_an_attended_prefix_belongs_to_the_segment_of_its_document(data):
    splice = SpliceConfig(doc_index=17, attend_prefix=True, eos_token_id=2)
    batch = take(loader_for(build(in_blend(data), one(splice), batch_size=16)), 1)[0].validate()
    doc, moved = tokens_of(17), 0
    for _, tokens, positions, weights in segments(batch):
        offset = weights.index(1.0)
        assert tokens[:offset] == ([0] * (offset - 1) + [2] if offset else [])
        content = tokens[offset:]
        assert content == doc[-len(content) :] or content == doc[: len(content)]
        assert positions == list(range(len(tokens)))
        assert weights == [0.0] * offset + [1.0] * (len(content) - 1) + [0.0]
        moved += offset > 0
    assert moved > 8


@pytest.mark.parametrize("pack", [False, True])
def test_contents_cut_at_the_frame_end_are_examples_too(data, pack):
    splice = SpliceConfig(doc_index=17, cut_at_frame_end=True, min_copy_len=5, pack_contents=pack)
    dataset = build(in_blend(data), one(splice), repeat=False)
    doc = tokens_of(17)
    found = shown(batch.validate() for batch in loader_for(dataset))
    assert found == Counter(
        ("book:train/doc17", tuple(doc[t : t + SEQ_LEN - s]), s)
        for t, s in slow.pairs(len(doc), SEQ_LEN, least=5, cut=True)
    )
    assert ("book:train/doc17", tuple(doc[:5]), SEQ_LEN - 5) in found


def test_a_cyclic_document_continues_at_its_beginning(data):
    splice = SpliceConfig(doc_index=3, content_start_mode="cyclic_roll")
    dataset = build(in_blend(data), one(splice), repeat=False)
    doc = tokens_of(3)
    rolls = {tuple(doc[t:] + doc[:t]) for t in range(len(doc))}
    assert {key[1] for key in shown(loader_for(dataset))} == rolls


def test_long_documents_slide_through_the_frame(data):
    longest = max(range(40), key=lambda n: (LENGTHS[n], -n))
    doc = tokens_of(longest)
    dataset = build(in_blend(data), one(SpliceConfig(mode="slide")), repeat=False)
    assert set(shown(loader_for(dataset))) == {
        (f"book:train/doc{longest}", tuple(doc[w : w + SEQ_LEN]), 0)
        for w in range(len(doc) - SEQ_LEN + 1)
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_spliced_and_packed_sources_share_a_schedule(mix, num_workers):
    encoder = many(spliced_subflavors={"splice": True})
    dataset = build(mix, encoder, num_workers=num_workers, batch_size=16)
    blend = find_blend(dataset)
    names = [f'book:train{{"splice": true}}/doc{n}' for n in three_longest_short()]
    shares = blend.shares_at_step(0)
    assert set(shares) == {*names, "web"} and shares["web"] == 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert blend.shares_at_step(6)["web"] == 1
    for index, batch in enumerate(take(loader_for(dataset), 9)):
        batch.validate()
        assert bool(set(batch.tokens_per_source()) & set(names)) == (index < 6)
        assert "web" in batch.tokens_per_source()


@pytest.mark.parametrize("weights", [(1, 1), (1, {"step": {0: 1, 40: 3}})])
def test_a_spliced_source_takes_its_share_of_an_interleave_in_tokens(data, weights):
    """Frames have few tokens, so they are drawn more often; the bound is the rows of a step.

    Their number of tokens is known only once all of them are drawn.
    """
    book, web = ({"weight": weight} for weight in weights)
    entries = ("book", {**SPLICED, **book}), ("web", web)
    path = mix_of(data, "interleave", *entries, node="interleave")
    encoder = many(spliced_subflavors={"splice": True})
    loader = loader_for(build(path, encoder, batch_size=4))

    def next_tokens(count):
        shown = Counter()
        for batch in take(loader, count):
            shown.update(batch.tokens_per_source())
        web = shown.pop("web")
        return sum(shown.values()), web

    book, web = next_tokens(40)
    assert abs(book - web) <= 4 * SEQ_LEN < book
    book, web = next_tokens(40)
    factor = 1 if weights[1] == 1 else 3
    assert abs(book - web / factor) <= 4 * SEQ_LEN < book


def test_a_folder_name_selects_the_spliced_source(data):
    path = write_mix(data / "named.yaml", [("book", 1), ("web", 1)])
    splice = MultiSpliceConfig(**{**SHORT.to_json(), "dataset_name": "book"})
    assert "web" in find_blend(build(path, many(splice))).shares_at_step(0)


def test_a_name_or_subflavors_without_a_match_list_the_sources(data):
    """Text and token files alike, also if an entry has its own splice settings."""
    named = MultiSpliceConfig(**{**SHORT.to_json(), "dataset_name": "bok"})
    message = "'bok' found, the sources are book, book:train, web; did you mean book"
    for web, start in (({}, "^dataset_name: "), ({"splice": {"num_docs": 1}}, "")):
        with pytest.raises(ConfigError, match=start + message):
            build(mix_of(data, "named", ("book", {}), ("web", web)), many(named))
    message = "No source to splice among book:train: spliced_subflavors is {'a': 1}"
    with pytest.raises(ConfigError, match=message):
        build(in_blend(data), many(spliced_subflavors={"a": 1}))


@pytest.mark.parametrize(("num_workers", "pack"), [(0, True), (2, False)])
def test_a_spliced_source_ends_at_its_limit_and_a_raised_limit_adds_epochs(data, num_workers, pack):
    """A content of 8 of 12, 12 and 11 tokens: 5 + 5 + 4 examples in an epoch, each once."""
    splice = MultiSpliceConfig(
        num_docs=3, max_doc_length=12, content_length=8, epoch_length=None, pack_contents=pack,
        balance_mode="every_pair",
    )  # fmt: skip

    def fresh(limit):
        path = mix_of(data, "limited", ("book", {**SPLICED, "max_epochs": limit}), ("web", {}))
        encoder = many(splice, spliced_subflavors={"splice": True})
        return loader_for(build(path, encoder, num_workers=num_workers))

    def of_book(loader):
        found = shown(take(loader, 20))
        return {key: count for key, count in found.items() if key[0].startswith("book")}

    loader = fresh(limit=2)
    twice = of_book(loader)
    assert len(twice) == 14 and set(twice.values()) == {2}
    state = loader.save_state_rank()
    for limit, expected in ((2, {}), (4, twice)):
        resumed = fresh(limit)
        resumed.restore_state_rank(state)
        assert of_book(resumed) == expected
    close_loaders()


def test_spliced_state_is_one_number_and_a_fingerprint(data):
    loader = loader_for(build(in_blend(data), many()))
    take(loader, 5)
    (source,) = loader.state_dict()["plan"]["sources"].values()
    documents = source["rows"].pop("documents")
    assert source["rows"] == {"kind": "spliced", "next_row": 20, "pass_start": 0}
    assert len(documents.pop("documents")) == 64  # a digest
    assert documents == {**SHORT.to_json(), "order": "even starts"}
    other = MultiSpliceConfig(**{**SHORT.to_json(), "content_length": 5})
    changed = loader_for(build(in_blend(data), many(other)))
    with pytest.raises(StateMismatchError, match=r"content_length: saved None, now 5\)"):
        changed.restore_state_rank(loader.save_state_rank())


ROWS_PER_STEP = 12


class SplicedRun:
    """A run that shows the book, whose ranks are read one after another."""

    def __init__(self, data, splice, *, repeat=True, state=None):
        self._data, self._splice, self._repeat = data, splice, repeat
        self.state = state

    def steps(self, ranks, workers, batch_size, count=None):
        """Return the sorted rows of each of the next steps, by default of all that are left."""
        found, states = [], []
        rounds = ROWS_PER_STEP // (ranks * batch_size)
        for rank in range(ranks):
            loader = loader_for(
                build(
                    in_blend(self._data),
                    many(self._splice),
                    num_workers=workers,
                    rank=rank,
                    world_size=ranks,
                    batch_size=batch_size,
                    rows_per_step=ROWS_PER_STEP,
                    repeat=self._repeat,
                )
            )
            if self.state is not None:
                loader.load_state_dict(json.loads(self.state))
            batches = list(loader) if count is None else take(loader, count * rounds)
            states.append(json.dumps(loader.state_dict()))
            loader.close()
            for start in range(0, len(batches), rounds):
                found.append([r for b in batches[start : start + rounds] for r in rows_in(b)])
        assert len(set(states)) == 1
        self.state = states[0]
        steps = len(found) // ranks
        return [sorted(row for part in found[n::steps] for row in part) for n in range(steps)]


def rows_in(batch):
    """Return the tokens, weights and position ids of each row."""
    fields = (batch.tokens, batch.token_weights, batch.position_ids)
    columns = [field.view(-1, SEQ_LEN).tolist() for field in fields]
    return list(zip(*columns))


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_a_step_match_on_any_topology_and_after_resumes(data, pack):
    splice = MultiSpliceConfig(**{**SHORT.to_json(), "pack_contents": pack})
    expected = SplicedRun(data, splice).steps(1, 0, ROWS_PER_STEP, 5)
    assert len({json.dumps(step) for step in expected}) == 5
    workers = 0 if pack else 2
    for topology in [(2, 0, 3), (4, 0, 1), (2, workers, 2)]:
        assert SplicedRun(data, splice).steps(*topology, 5) == expected
    run, found, sizes = SplicedRun(data, splice), [], []
    for hop in [(2, 0, 2, 1), (1, 0, 4, 1), (6, 0, 1, 1), (1, workers, 6, 1), (3, 0, 4, 1)]:
        found += run.steps(*hop)
        sizes.append(len(run.state))
    assert found == expected
    assert max(sizes) - min(sizes) < 20  # digits of counts


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_shows_every_pair_once_across_resumes(data, pack):
    splice = MultiSpliceConfig(**{**SHORT.to_json(), "pack_contents": pack})
    whole = SplicedRun(data, splice, repeat=False).steps(1, 0, 4)
    run, found = SplicedRun(data, splice, repeat=False), []
    for hop in [(1, 0, 4, 3), (2, 0, 3, 2), (3, 0, 1, 1), (2, 0, 6, None)]:
        found += run.steps(*hop)
    assert found == whole
    trained = sum(sum(map(sum, (weights for _, weights, _ in step))) for step in found)
    documents = [tokens_of(number) for number in three_longest_short()]
    assert trained == sum(len(d) - t - 1 for d in documents for t, _ in slow.pairs(len(d), SEQ_LEN))


def test_every_seed_and_key_has_its_own_order(data):
    first = take(loader_for(build(in_blend(data), many())), 1)[0]
    again = take(loader_for(build(in_blend(data), many())), 1)[0]
    other = take(loader_for(build(in_blend(data), many(), seed=1)), 1)[0]
    assert batch_hash(first) == batch_hash(again) != batch_hash(other)


def test_many_documents_are_counted_under_their_source_key(data):
    for named, names in ((False, {"book:train"}), (None, None)):
        encoder = many(named_documents=named)
        shares = find_blend(build(in_blend(data), encoder)).shares_at_step(0)
        assert set(shares) == (names or {f"book:train/doc{n}" for n in three_longest_short()})
    assert find_blend(build(in_blend(data), many())).documents == {
        f"book:train/doc{n}": len(slow.pairs(LENGTHS[n], SEQ_LEN)) for n in three_longest_short()
    }


def test_batches_give_access_to_document_metadata(data):
    dataset = build(in_blend(data), many())
    (source,) = splices_of(dataset)
    batch = take(loader_for(dataset), 1)[0]
    for name, *_ in segments(batch):
        number = int(name.rpartition("/doc")[2])
        (found,) = source.metadata_of(name)
        assert found.pop("key").endswith(f"{number:06d}")
        assert found == {"document": number, "tokens": LENGTHS[number]}
    unnamed = build(in_blend(data), many(named_documents=False))
    (source,) = splices_of(unnamed)
    numbers = [found["document"] for found in source.metadata_of("book:train")]
    assert numbers == three_longest_short()


def test_doc_key_in_the_yaml_selects_a_document(data):
    splice = SpliceConfig(doc_key="*21")
    shares = find_blend(build(in_blend(data), one(splice))).shares_at_step(0)
    assert shares == {"book:train/doc21": 1}


def test_validation_uses_a_fixed_grid_and_the_loss_map_separates_points(data):
    path = mix_of(data, "val", ("book", {"split_part": "train"}), split="val")
    encoder = many(validation_starts=3, validation_offsets=4)
    ((dataset, _),) = get_val_datasets(
        path, worker_config=config(), batch_size=5, task_encoder=encoder
    )
    (source,) = splices_of(dataset)
    losses = LossMap(source.examples, source.names)
    batches = list(loader_for(dataset))
    for batch in batches:
        # A loss that identifies its place: 1000 times the position id, plus the label.
        losses.add_batch(batch, batch.position_ids.numpy() * 1000.0 + batch.labels.numpy())
    assert not np.isnan(losses.losses).any()
    for document, number in enumerate(three_longest_short()):
        doc = tokens_of(number)
        starts, offsets, grid = losses.of(document)
        assert starts == [0, (len(doc) - 2) // 2, len(doc) - 2]
        for row, t in enumerate(starts):
            count = len(doc) - t - 1
            shown = np.flatnonzero(~np.isnan(grid[row]))
            assert len(shown) == 4 and offsets[shown[-1]] == SEQ_LEN - count - 1
            for column in shown:
                mean = 1000 * (offsets[column] + (count - 1) / 2) + sum(doc[t + 1 :]) / count
                assert grid[row, column] == pytest.approx(mean, rel=1e-5)
    assert set(losses.per_document()) == {f"book:train/doc{n}" for n in three_longest_short()}


def test_validation_packs_sources_that_are_not_spliced(data):
    """In validation, each source is a separate dataset."""
    splice = MultiSpliceConfig(**{**SHORT.to_json(), "dataset_name": "book"})
    (book, _), (web, _) = get_val_datasets(
        write_mix(data / "chosen.yaml", [("book", 1), ("web", 1)]),
        worker_config=config(),
        batch_size=2,
        task_encoder=many(splice),
        split_part="train",
    )
    assert len(splices_of(book)) == 1 and not splices_of(web)
    (counts,) = (Counter(batch.tokens_per_source()) for batch in take(loader_for(web), 1))
    assert set(counts) == {"web"}


def test_a_loss_map_refuses_batches_of_one_rank_of_several(data):
    """They would be counted as other points of the grid."""
    ((dataset, _),) = get_val_datasets(
        write_mix(data / "ranks.yaml", [("book", 1)]),
        worker_config=config(rank=0, world_size=2),
        batch_size=2,
        task_encoder=many(),
        split_part="train",
    )
    (source,) = splices_of(dataset)
    losses = LossMap(source.examples, source.names)
    with pytest.raises(ConfigError, match=r"found as content 2, not the one .*world_size=1"):
        for batch in loader_for(dataset):
            losses.add_batch(batch, np.ones(batch.num_tokens))


def test_the_plan_is_in_the_log(data, caplog):
    with caplog.at_level(logging.DEBUG, logger="energon_ext.splice.frames"):
        build(in_blend(data), many())
    first = three_longest_short()[0]
    assert (
        "book:train: 3 documents of 11 to 12 tokens, contents of up to 32 in frames of 32, 837 "
        "pairs, 837 examples per epoch; slide_within, content_length None, cut_at_frame_end "
        "False, content_stride 1, offset_stride 1, alpha 0.0, offset_jitter 0, balance_mode "
        "every_pair, balance_tau 1.0." in caplog.text
    )
    jittered = MultiSpliceConfig(num_docs=1, content_length=32, offset_jitter=26)
    with caplog.at_level(logging.DEBUG, logger="energon_ext.splice.frames"):
        build(in_blend(data), many(jittered))
    assert "contents of up to 6 in frames of 32" in caplog.text
    # 12 - t tokens have 21 + t places.
    assert f"book:train/doc{first}: 12 tokens, 286 pairs, 286 examples, each token " in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one(SHORT), "a MultiSpliceConfig found, SpliceTaskEncoder needs a SpliceConfig"),
        (lambda: many(alignment=2), "alignment: 2 found; frames begin at any offset"),
        (
            lambda: one(SpliceConfig(pack_contents=True), packing="sequential"),
            "Set mask_boundary_loss=True",
        ),
        (
            lambda: one(SpliceConfig(pad_token_id=260)),
            "pad_token_id: 260 found, the tokenizer has ids below 260",
        ),
        (lambda: one(validation_starts=0), "validation_starts: 0 found, an integer >= 1"),
        (lambda: one(validation_offsets="8"), "validation_offsets: '8' found"),
        (lambda: one(spliced_subflavors=["splice"]), r"spliced_subflavors: \['splice'\] found"),
    ],
)
def test_unsupported_combinations_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_epoch_may_have_fewer_examples_than_workers(data):
    """One example per epoch and three workers: worker 1 shows it in the second epoch."""
    splice = SpliceConfig(doc_index=3, content_start_mode="anchor_start", offset_stride=SEQ_LEN)
    loader = loader_for(build(in_blend(data), one(splice), num_workers=3))
    assert [len(segments(batch)) for batch in take(loader, 6)] == [4] * 6


def test_a_source_without_a_pair_is_refused_with_its_needs(data):
    splice = MultiSpliceConfig(content_length=32, adaptive_k=False, max_doc_length=20)
    message = "^Source book:train: No document has a pair: the longest has 20 tokens"
    with pytest.raises(ConfigError, match=message):
        build(in_blend(data), many(splice))
    with pytest.raises(ConfigError, match=message):
        get_val_datasets(
            in_blend(data),
            worker_config=config(),
            batch_size=1,
            task_encoder=many(splice),
            split_part="train",
        )
    assert SpliceIndex([20], SEQ_LEN, MultiSpliceConfig(content_length=32)).pairs == [1]


def test_random_document_choice_depends_on_data_and_not_on_yaml_place(data):
    """Regression: moving the metadataset changed the documents."""
    splice = MultiSpliceConfig(num_docs=3, max_doc_length=30, doc_select_mode="random")
    (data / "deep").mkdir()
    chosen = []
    for name, path in (("here.yaml", "book"), ("deep/there.yaml", "../book")):
        mix = write_mix(data / name, [(path, 1)])
        chosen.append([each.tolist() for each in documents_of(build(mix, many(splice)))])
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 3
