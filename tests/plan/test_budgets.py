# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Nested subsets of sources, against sums and sets by plain Python."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    DynamicBlendMixin,
    PackedTaskEncoder,
    PreferenceTaskEncoder,
    PromptTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.encoders.load import load_mix
from energon_ext.encoders.saved_task import plan_saved
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.keyed import KeyedPermutation
from energon_ext.metrics import file as metrics
from energon_ext.metrics.file import describe_blend, epochs_after
from energon_ext.plan import budget as module
from energon_ext.plan.budget import Budget, nested_subset
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import epochs_counted, forecast
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.spec import Spec
from energon_ext.plan.topology import Topology
from energon_ext.splice.frames import splices_of
from energon_ext.state.schema import seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.plan.memory_documents import MemoryDocuments, planned
from tests.plan.runs import Run, numbered_documents, tokens_of, write_split
from tests.support import (
    LargeTokenizer,
    config,
    loader_for,
    take,
    write_dataset,
    write_records,
    write_tokens,
)

COUNT = 60
DOCUMENTS = numbered_documents(COUNT, 100, longest=40)


def first_of(total, is_enough):
    """Return the first documents of the permutation until they are enough, one by one."""
    permute, chosen = KeyedPermutation(total, "subset"), []
    while not is_enough(chosen):
        chosen.append(int(permute(np.array([len(chosen)]))[0]))
    return chosen


def chosen_for(budget, documents=DOCUMENTS):
    """Return the set of documents that a budget in the YAML must give, by a slow model."""
    (unit, amount), total = *budget.items(), len(documents)
    if unit == "tokens":
        return {*first_of(total, lambda found: sum(len(documents[n]) for n in found) >= amount)}
    count = amount if unit == "documents" else round(amount * total)
    return {*first_of(total, lambda found: len(found) == count)}


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "web", DOCUMENTS, np.int32)
    write_tokens(tmp_path / "code", numbered_documents(50, 10_000), np.int32)
    return tmp_path


def mix_of(folder, subset, name="mix.yaml", rule="blend", **fields):
    entry = {"path": "web", **({} if subset is None else {"subset": subset}), **fields}
    return write_split(folder / name, {rule: [entry]})


def numbers_read(mix, key=None, *, encoder=None, ranks=1, seed=0, rows=16):
    """Return how often each document ends in the rows of a source, as they are planned."""
    dataset = get_train_dataset(
        mix,
        worker_config=config(0, 0, ranks, seed),
        batch_size=2,
        rows_per_step=rows,
        task_encoder=encoder or PackedTaskEncoder(LargeTokenizer(), 64),
    )
    sources = find_blend(dataset).sources
    source = sources[key or min(sources)]
    taken = source.rows().take(10_000 if source.max_epochs else 10)
    pieces = [piece for row in range(len(taken)) for piece in taken.contents(row)]
    return Counter(number for number, start, _ in pieces if not start), source


BUDGETS = [{"tokens": 300}, {"documents": 17}, {"fraction": 0.25}, {"tokens": "1k"}]


@pytest.mark.parametrize("budget", BUDGETS)
def test_each_epoch_reads_the_documents_of_the_budget_and_no_others(folder, budget):
    read, source = numbers_read(mix_of(folder, budget, max_epochs=3))
    exact = {name: 1000 if value == "1k" else value for name, value in budget.items()}
    expected = chosen_for(exact)
    assert read == dict.fromkeys(expected, 3)
    assert source.documents == len(expected) < COUNT
    tokens = sum(len(DOCUMENTS[number]) for number in expected)
    assert source.first_rows.epoch_tokens == tokens
    if "tokens" in exact:  # the last document may exceed the budget
        assert exact["tokens"] <= tokens < exact["tokens"] + 40


def test_a_larger_budget_contains_a_smaller_one():
    for total in (1, 2, 60, 5000):
        sets = [{*nested_subset(total, count).tolist()} for count in range(1, min(total, 70) + 1)]
        assert [len(each) for each in sets] == [*range(1, len(sets) + 1)]
        assert all(small < large for small, large in zip(sets, sets[1:]))
    assert nested_subset(5000, 5000).tolist() == [*range(5000)]


def test_a_subset_is_spread_over_the_source():
    """Of each tenth of the source it has about a tenth."""
    parts = Counter((nested_subset(10**6, 10**4) // 10**5).tolist())
    assert all(abs(count - 1000) < 150 for count in parts.values()) and len(parts) == 10


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_tokens_are_counted_to_the_last_document_that_is_needed(monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    lengths = [len(each) for each in DOCUMENTS]
    documents = MemoryDocuments([5, 5, *lengths])
    reached = 0
    for count, number in enumerate(first_of(COUNT, lambda found: len(found) == COUNT), 1):
        for tokens in (reached + 1, reached + lengths[number]):
            budget = Budget("tokens", tokens, "subset")
            assert budget.count("web", range(2, COUNT + 2), documents) == count
        reached += lengths[number]
    with pytest.raises(
        ConfigError, match=rf"tokens: {reached + 1:,} found, but web has {reached:,}"
    ):
        Budget("tokens", reached + 1, "subset").count("web", range(2, COUNT + 2), documents)


def test_the_documents_depend_on_no_mix_seed_row_or_cluster(folder):
    budget = {"tokens": 500}
    expected = dict.fromkeys(chosen_for(budget), 1)
    mix = mix_of(folder, budget, max_epochs=1)
    other = folder / "elsewhere"
    other.mkdir()
    entry = {"path": "../web", "subset": {**budget, "range": ["0%", "100%"]}, "max_epochs": 1}
    members = [
        {"path": "../code", "weight": 3},
        {**entry, "subflavors": {"a": 1}, "order": "stored"},
    ]
    write_split(other / "mix.yaml", {"interleave": members})
    encoders = [PackedTaskEncoder(LargeTokenizer(), n, packing=p) for n, p in
                [(48, "bin"), (200, "sequential")]]  # fmt: skip
    found = [numbers_read(mix, encoder=each)[0] for each in encoders]
    found += [numbers_read(mix, seed=5)[0], numbers_read(mix, ranks=4, rows=32)[0]]
    found += [numbers_read(other / "mix.yaml", '../web{"a": 1}')[0]]
    assert found == [expected] * 5


def test_a_transform_does_not_change_which_documents_are_read(folder):
    """Each document becomes three tokens longer."""
    ids = {"prefix": 90_001, "suffix": 90_002, "middle": 90_003, "rate": 1}
    mix = mix_of(folder, {"tokens": 300}, max_epochs=1, transform={"fill_in_the_middle": ids})
    read, source = numbers_read(mix)
    expected = chosen_for({"tokens": 300})
    assert read == dict.fromkeys(expected, 1)
    longer = sum(len(DOCUMENTS[number]) + 3 for number in expected)
    assert source.first_rows.epoch_tokens == longer


def test_a_budget_within_a_range_reads_of_that_range(folder):
    read, _ = numbers_read(mix_of(folder, {"range": [20, 60], "documents": 10}, max_epochs=1))
    assert {*read} == {20 + number for number in first_of(40, lambda found: len(found) == 10)}


@pytest.mark.parametrize("order", ["stored", {"by": "length"}, {"by": "length", "buckets": 3}])
def test_an_order_sorts_the_documents_of_the_budget(folder, order):
    mix = mix_of(folder, {"documents": 20}, order=order, max_epochs=1)
    encoder = PackedTaskEncoder(LargeTokenizer(), 64, packing="sequential")
    read, _ = numbers_read(mix, encoder=encoder)
    expected = sorted(chosen_for({"documents": 20}))
    if order != "stored":
        expected.sort(key=lambda number: len(DOCUMENTS[number]))
    if "buckets" in order:
        bounds = [0, 6, 13, 20]
        for first, stop in zip(bounds, bounds[1:]):
            assert {*[*read][first:stop]} == {*expected[first:stop]}
    else:
        assert [*read] == expected


def test_a_whole_source_is_planned_as_without_a_budget(folder):
    def first_state(subset, name):
        run = Run(mix_of(folder, subset, name))
        run.steps(3)
        state = json.loads(run.state())
        run.close()
        return state["plan"]["sources"], state["data_digests"]

    tokens = sum(map(len, DOCUMENTS))
    whole = first_state(None, "whole.yaml")
    assert "subset" not in whole[0]["web"]["rows"]
    for subset in ({"tokens": tokens}, {"documents": COUNT}, {"fraction": 1}):
        assert first_state(subset, "all.yaml") == whole


def test_without_a_budget_no_length_is_looked_up(monkeypatch):
    monkeypatch.setattr(module, "nested_subset", None)
    looked_up = []
    monkeypatch.setattr(Budget, "count", lambda *args: looked_up.append(args))
    rows = planned([3] * 40)
    rows.take(10)
    assert rows.subset is None and not looked_up and not rows._order._subsets


def test_excluded_documents_are_left_out_of_the_subset_and_not_replaced(folder):
    chosen = chosen_for({"documents": 20})
    inside, outside = min(chosen), min({*range(COUNT)} - chosen)
    (folder / "excluded.txt").write_text(f"web:{inside}\nweb:{outside}\n")
    mix = mix_of(folder, {"documents": 20}, max_epochs=1)
    mix.write_text(json.dumps({**json.loads(mix.read_text()), "exclude": "excluded.txt"}))
    read, source = numbers_read(mix)
    assert {*read} == chosen - {inside}
    assert source.first_rows.epoch_tokens == sum(len(DOCUMENTS[n]) for n in chosen - {inside})
    assert source.first_rows.tokens_per_document == source.first_rows.epoch_tokens / 19


# Changes on a resume ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "workers"),
    [
        (0, 0),
        (1, 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(0, 2), (1, 0)]),
    ],
)
def test_a_change_takes_effect_at_the_next_epoch_and_nothing_is_lost(folder, seed, workers):
    """Which epochs have begun is read off the states; every token of each is read once."""
    epochs, draw = 6, random.Random(seed)
    sizes: list[int] = []  # documents of each epoch
    read, state, ended = Counter(), None, False
    while not ended:
        size = draw.choice([5, 12, 30, COUNT])
        unit = draw.choice(["documents", "fraction"])
        budget = {unit: size if unit == "documents" else size / COUNT}
        packing = draw.choice([None, {"order": "stored"}])
        mix = mix_of(folder, budget, max_epochs=epochs, **(packing or {}))
        ranks, batch = draw.choice([(1, 4), (2, 2), (4, 1)])
        run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=4)
        if state is not None:
            run.resume(state)
        for _ in range(draw.randint(1, 6)):
            if (rows := run.step()) is None:
                ended = True
                break
            read += tokens_of([rows])
        state = run.state()
        run.close()
        last = json.loads(state)["plan"]["sources"]["web"]["rows"]
        sizes += [size] * (last["epoch"] + 1 - len(sizes))
        assert last.get("subset", COUNT) == sizes[-1]
    assert len(sizes) == epochs and len({*sizes}) > 1
    permuted = first_of(COUNT, lambda found: len(found) == COUNT)
    for place, number in enumerate(permuted):
        times = sum(place < size for size in sizes)
        trained = DOCUMENTS[number][:-1]  # the last token has no label
        assert {read[token] for token in trained} == {times}, (number, sizes)


def test_a_repacked_run_goes_on_with_its_subset(folder):
    mix = mix_of(folder, {"documents": 20}, max_epochs=2)
    run = Run(mix, rows=1)
    before = run.steps(5)
    state = run.state()
    run.close()
    mix_of(folder, {"documents": 30}, max_epochs=2)
    run = Run(mix, rows=1, encoder=PackedTaskEncoder(LargeTokenizer(), 64, packing="sequential"))
    run.resume(state)
    after = list(iter(run.step, None))
    run.close()
    read = tokens_of(before + after)
    for number, tokens in enumerate(DOCUMENTS):
        times = (number in chosen_for({"documents": 20})) + (
            number in chosen_for({"documents": 30})
        )
        # `sequential` may also train the transition to the next document in its row.
        assert {read[token] for token in tokens[:-1]} == {times}


def test_inside_a_step_the_subset_may_not_change(folder):
    mix = mix_of(folder, {"documents": 20})
    loader = Run(mix, batch=4, rows=16).loaders[0]
    take(loader, 1)
    state = loader.state_dict()
    mix_of(folder, {"documents": 30})
    with pytest.raises(StateMismatchError, match="subset: .*finished with the same.*subsets"):
        Run(mix, batch=4, rows=16).loaders[0].load_state_dict(state)


@pytest.mark.parametrize("subset", [0, COUNT + 1, -1, "20", 1.5])
def test_a_damaged_subset_in_a_state_is_refused(folder, subset):
    mix = mix_of(folder, {"documents": 20})
    run = Run(mix)
    run.step()
    state = json.loads(run.state())
    state["plan"]["sources"]["web"]["rows"]["subset"] = subset
    state.pop("energon_ext_digest")
    with pytest.raises(StateFormatError):
        Run(mix).loaders[0].load_state_dict(seal(state))


def test_the_state_plans_the_subset_without_the_encoder(folder):
    mix = mix_of(folder, {"tokens": 300})
    run = Run(mix, rows=4)
    read = [tokens_of([run.step()]) for _ in range(6)]
    state = json.loads(run.state())
    run.close()
    loaded, _ = load_mix(mix, split_part="train", trusted_modules=())
    again = plan_saved(loaded, Spec.from_json(state["spec"]), Topology(4), as_whole=False)
    steps = itertools.islice(again.draw_steps(), 6)
    rows = [[step.row(number) for number in range(4)] for step in steps]
    planned = [
        Counter(
            token
            for taken, index, _ in each
            for number, start, stop in taken.contents(index)
            for token in DOCUMENTS[number][start : stop - 1]  # the last one is only a label
        )
        for each in rows
    ]
    assert again.sources["web"].first_rows.subset == (len(chosen_for({"tokens": 300})), COUNT)
    assert planned == read and all(read)


# Kinds of sources -------------------------------------------------------------------------------


def test_text_and_validation_read_the_documents_of_the_budget(tmp_path):
    texts = [f"text {number:02d}" for number in range(40)]
    write_dataset(tmp_path / "web", texts)
    budget = {"tokens": 100}
    chosen = chosen_for(budget, [[0] * 9] * 40)  # seven bytes, the beginning and the end
    assert len(chosen) == 12
    encoder = PackedTaskEncoder(ByteTokenizer(), 32)
    mix = mix_of(tmp_path, budget, max_epochs=1)
    read, _ = numbers_read(mix, encoder=encoder)
    assert {*read} == chosen
    entry = {"path": "web", "split_part": "train", "subset": budget}
    val = write_split(tmp_path / "val.yaml", {"blend": [entry]}, "val")
    ((dataset, _),) = get_val_datasets(
        val, worker_config=config(), batch_size=1, task_encoder=encoder
    )
    found = "".join(ByteTokenizer().decode(b.tokens.numpy()) for b in loader_for(dataset))
    places = [found.find(texts[number]) for number in sorted(chosen)]
    assert -1 not in places
    assert found.count("text") == len(chosen)


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"q{n}"},
            {"role": "assistant", "content": "a" * 2 * n},
        ]
    }
    for n in range(1, 31)
]


def test_chats_are_counted_as_they_are_stored_whatever_the_row(tmp_path):
    write_records(tmp_path / "web", CHATS)
    mix = mix_of(tmp_path, {"tokens": 600}, max_epochs=1)
    found = []
    for seq_len in (48, 400):  # in rows of 48, long chats are cut
        encoder = SFTTaskEncoder(ByteTokenizer(), seq_len)
        found.append(numbers_read(mix, encoder=encoder)[0])
    assert found[0] == found[1] and 2 < len(found[0]) < 30


def test_prompts_have_documents_and_fractions_but_no_tokens(tmp_path):
    write_records(tmp_path / "web", [{"prompt": f"q{number}"} for number in range(20)])
    encoder = PromptTaskEncoder(ByteTokenizer())
    for budget in ({"documents": 5}, {"fraction": 0.25}):
        read, _ = numbers_read(mix_of(tmp_path, budget, max_epochs=2), encoder=encoder)
        assert read == dict.fromkeys(first_of(20, lambda found: len(found) == 5), 2)
    with pytest.raises(ConfigError, match=r"\(web\)\.subset\.tokens: the tokens of .* not known"):
        numbers_read(mix_of(tmp_path, {"tokens": 5}), encoder=encoder)


def test_a_sample_that_cannot_be_read_is_replaced_by_one_of_the_subset(tmp_path):
    prompts = [f"q{number}" if number % 3 else "q" * 50 for number in range(60)]
    write_records(tmp_path / "web", [{"prompt": prompt} for prompt in prompts])
    dataset = get_train_dataset(
        mix_of(tmp_path, {"documents": 12}),
        worker_config=config(),
        batch_size=4,
        task_encoder=PromptTaskEncoder(ByteTokenizer(), max_prompt_tokens=40),
    )
    batches = take(loader_for(dataset), 12)
    read = {ByteTokenizer().decode(prompt.tokens) for batch in batches for prompt in batch}
    chosen = first_of(60, lambda found: len(found) == 12)
    assert read == {prompts[number] for number in chosen if number % 3}
    assert len(read) < 12


def test_packed_samples_count_as_measured_also_those_that_fit_no_row(tmp_path):
    pairs = [{"prompt": "q", "chosen": "a" * n, "rejected": "b" * n} for n in range(1, 41)]
    write_records(tmp_path / "web", pairs)
    mix = mix_of(tmp_path, {"tokens": 600})
    short, long = (
        numbers_read(mix, encoder=PreferenceTaskEncoder(ByteTokenizer(), seq_len))[1]
        for seq_len in (48, 400)
    )
    assert short.documents == long.documents < 40
    assert short.first_rows.epoch_tokens < 600 <= long.first_rows.epoch_tokens


SPLICE = {"num_docs": 100, "content_length": 2}


def frames_of(mix, split="train"):
    encoder = PackedTaskEncoder(LargeTokenizer(), 64)
    if split == "train":
        dataset = get_train_dataset(
            mix, worker_config=config(), batch_size=2, rows_per_step=4, task_encoder=encoder
        )
    else:
        ((dataset, _),) = get_val_datasets(
            mix, worker_config=config(), batch_size=2, task_encoder=encoder
        )
    (frames,) = splices_of(dataset)
    return dataset, frames


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_splice_chooses_among_the_documents_of_the_budget(folder, split):
    budget = {"range": [10, 60], "tokens": 200}
    entry = {"path": "web", "split_part": "train", "subset": budget, "splice": SPLICE}
    mix = write_split(folder / "mix.yaml", {"blend": [entry]}, split)
    _, frames = frames_of(mix, split)
    assert {*frames.numbers} == chosen_for({"tokens": 200}, DOCUMENTS[10:])
    assert frames.subset == (len(frames.numbers), 50)


def test_a_splice_of_a_document_outside_the_subset_is_refused(folder):
    inside = chosen_for({"documents": 20})
    for index in (min(inside), min({*range(COUNT)} - inside)):
        splice = {"doc_index": index, "content_length": 2}
        mix = mix_of(folder, {"documents": 20}, splice=splice)
        if index in inside:
            assert frames_of(mix)[1].numbers == [index]
            continue
        with pytest.raises(ConfigError, match=rf"doc_index: document {index} of web is not among"):
            frames_of(mix)


def test_a_splice_cannot_continue_with_another_subset(folder):
    mix = mix_of(folder, {"documents": 20}, splice=SPLICE)
    loader = loader_for(frames_of(mix)[0])
    take(loader, 2)
    state = loader.state_dict()
    loader_for(frames_of(mix)[0]).load_state_dict(state)
    mix_of(folder, {"documents": 30}, splice=SPLICE)
    with pytest.raises(StateMismatchError, match="web.*subset: saved 20, now 30"):
        loader_for(frames_of(mix)[0]).load_state_dict(state)


# Epochs of different sizes ----------------------------------------------------------------------


def test_epochs_are_counted_as_they_were_read_after_a_change(folder):
    """A row has one document. The first document of an epoch is planned with the last row before.

    Two epochs of 6 documents, one of all 10, two of 3, all but the last two read.
    """
    documents = [[100 * n + k for k in range(8)] for n in range(1, 11)]
    write_tokens(folder / "ten", documents, np.int32)
    encoder = PackedTaskEncoder(LargeTokenizer(), 8, packing_buffer_docs=1)
    state, read, starts = None, 0, []
    hops = [(6, 6, 1), (None, 4, 1 + 4 / 6), (None, 7, 2.5), (3, 5, 3), (3, 1, 3 + 1 / 3)]
    for count, steps, expected in hops:
        entry = {"path": "ten", **({"subset": {"documents": count}} if count else {})}
        mix = write_split(folder / "mix.yaml", {"blend": [{**entry, "max_epochs": 5}]})
        run = Run(mix, rows=1, encoder=encoder)
        if state is not None:
            run.resume(state)
        blend = find_blend(run.loaders[0].dataset)
        starts.append({"step": read, **describe_blend(blend)})
        take(run.loaders[0], steps)
        state = run.state()
        run.close()
        # As in the plan, so in the scalars of a log.
        assert epochs_counted(blend).tolist() == pytest.approx([expected])
        logged = epochs_after(starts[-1], "ten", 8 * steps, steps, (8 * read, read))
        assert logged == pytest.approx(expected)
        read += steps
    tokens, documents = np.full((read, 1), 8), np.ones((read, 1))  # a report reads these
    assert metrics._epochs(starts, ["ten"], tokens, documents) == pytest.approx([expected])
    assert json.loads(state)["plan"]["sources"]["ten"]["documents"] == 6 + 6 + 10 + 1
    for found in (forecast(blend, 20), estimate(blend, 20)):
        assert found.epochs_before.tolist() == [3 + 1 / 3]
        assert (found.steps, found.epochs[-1].tolist()) == (5, pytest.approx([5]))
    whole = write_split(folder / "mix.yaml", {"blend": [{"path": "ten", "max_epochs": 5}]})
    (loader,) = Run(whole, rows=1, encoder=encoder).resume(state).loaders
    found = forecast(find_blend(loader.dataset), 20)  # the rest of this epoch, and one of all
    assert (found.steps, found.epochs[-1].tolist()) == (12, [5])


@pytest.mark.parametrize("seq_len", [16, 64])
@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_epochs_of_a_subset_count_tokens_also_of_documents_read_in_part(folder, packing, seq_len):
    excluded = [f"web:{number}\n" for number in range(0, COUNT, 7)]
    (folder / "excluded.txt").write_text("".join(excluded))
    mix = mix_of(folder, {"documents": 20})
    mix.write_text(json.dumps({**json.loads(mix.read_text()), "exclude": "excluded.txt"}))
    encoder = PackedTaskEncoder(LargeTokenizer(), seq_len, packing=packing, packing_buffer_docs=1)
    run = Run(mix, rows=1, encoder=encoder)
    blend = find_blend(run.loaders[0].dataset)
    read, size = 0, sum(len(DOCUMENTS[n]) for n in chosen_for({"documents": 20}) if n % 7)
    for batch in itertools.islice(run.loaders[0], 90):
        read += batch.tokens_per_source()["web"]
        (counted,) = epochs_counted(blend.fork()) * size
        # `read` lacks last tokens of documents that are only labels.
        assert counted == pytest.approx(read, rel=0.03, abs=size / seq_len)
    assert read > size


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "reason"),
    [
        ({"tokens": 10, "documents": 3}, r"\(web\).subset: tokens and documents found; give only"),
        ({"tokens": 0}, "subset.tokens: 0 found, an integer >= 1"),
        ({"tokens": "many"}, "subset.tokens: 'many' found, an integer is needed, such as 1000"),
        ({"tokens": 1.5}, "subset.tokens: 1.5 found"),
        ({"tokens": 10**9}, "subset.tokens: 1,000,000,000 found, but web has [0-9,]+ tokens; give"),
        ({"documents": 61}, "subset.documents: 61 found, but web has 60 documents; give a smaller"),
        ({"documents": True}, "subset.documents: True found"),
        ({"fraction": 0}, "subset.fraction: 0 found, a number > 0 and <= 1"),
        ({"fraction": "10%"}, "subset.fraction: '10%' found"),
        ({"fraction": 1e-3}, "0.001 of the 60 documents of web is none; give a larger one"),
        ({"token": 5}, "no field 'token' .*did you mean tokens"),
        ({}, "it needs"),
        ({"range": [10, 20], "documents": 11}, "11 found, but web.* has 10 documents"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused_with_its_place(folder, subset, reason):
    with pytest.raises(ConfigError, match=reason):
        numbers_read(mix_of(folder, subset))


def test_a_fraction_goes_to_each_source_of_a_nested_file_and_tokens_to_one(folder):
    write_split(folder / "inner.yaml", {"blend": [{"path": "web"}, {"path": "code"}]})

    def around(subset):
        return write_split(
            folder / "mix.yaml", {"blend": [{"path": "inner.yaml", "subset": subset}]}
        )

    for key, count in (("web", 6), ("code", 5)):
        assert numbers_read(around({"fraction": 0.1}), key)[1].documents == count
    with pytest.raises(ConfigError, match=r"subset.tokens: the entry has 2 sources; give a `frac"):
        numbers_read(around({"tokens": 50}))
    write_split(folder / "inner.yaml", {"blend": [{"path": "web", "subset": {"documents": 9}}]})
    with pytest.raises(ConfigError, match=r"fraction: .*blend\[0\] \(web\).subset gives a part of"):
        numbers_read(around({"fraction": 0.5}))


@pytest.mark.parametrize("node", ["blend", "blend_epochized", "path"])
def test_only_an_entry_of_a_blend_or_interleave_has_a_budget(folder, node):
    subset = {"documents": 5}
    split = {
        "blend": {"blend": [{"path": "web"}], "subset": subset},
        "blend_epochized": {"blend_epochized": [{"path": "web", "subset": subset}]},
        "path": {"path": "web", "subset": subset},
    }[node]
    with pytest.raises(ConfigError, match="subset: no field 'documents'"):
        numbers_read(write_split(folder / "mix.yaml", split))


def test_streamed_sources_and_other_encoders_have_no_budget(folder):
    class Streaming(DynamicBlendMixin, DefaultTaskEncoder):
        plan_samples = False

    write_dataset(folder / "samples", ["a", "b"])
    mix = write_split(
        folder / "mix.yaml", {"blend": [{"path": "samples", "subset": {"documents": 1}}]}
    )
    for encoder, reason in (
        (Streaming(), "subset.documents: samples are streamed, which reads ranges only"),
        (DefaultTaskEncoder(), r"\(samples\)\.subset: this TaskEncoder does not support"),
    ):
        with pytest.raises(ConfigError, match=reason):
            get_train_dataset(mix, worker_config=config(), batch_size=1, task_encoder=encoder)
