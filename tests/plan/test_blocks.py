# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources in random order on disk are read by blocks; a change begins with an epoch."""

import json

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder
from energon_ext.encoders import plan_mix
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.state.schema import seal, without_seal
from tests.plan.runs import SEQ_LEN, Run, numbered_documents, rows_of, tokens_of, write_split
from tests.plan.test_order import slow_epoch
from tests.support import LargeTokenizer, write_dataset, write_tokens

SIZE = 60
SHUFFLED = {"seed": 7, "input": "0123456789abcdef"}


REAL_SIZES = {name: getattr(plan_mix, name) for name in ("SHUFFLED_BLOCK_DOCS", "MIXED_DOCS")}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(plan_mix, "SHUFFLED_BLOCK_DOCS", 4)
    monkeypatch.setattr(plan_mix, "MIXED_DOCS", 12)
    monkeypatch.setattr(plan_mix, "LEAST_BUFFER_DOCS", 1)
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 1)


def describe(prefix, shuffled=SHUFFLED):
    """Write the meta file of a pair, as of a part of a random order."""
    meta = {"tokenizer": LargeTokenizer().fingerprint(), "vocab_size": 80_000}
    prefix.with_name(f"{prefix.name}.meta.json").write_text(
        json.dumps({**meta, "shuffled": shuffled} if shuffled else meta)
    )


@pytest.fixture
def folder(tmp_path):
    write_tokens(tmp_path / "web", DOCUMENTS, np.int32)
    describe(tmp_path / "web")
    return tmp_path


DOCUMENTS = numbered_documents(SIZE, 100, 1)
FIRST_TOKENS = {document[0]: number for number, document in enumerate(DOCUMENTS)}


def mix(folder, **fields):
    return write_split(folder / "mix.yaml", {"blend": [{"path": "web", **fields}]})


def run_of(path, seq_len=SEQ_LEN, **options):
    encoder = PackedTaskEncoder(
        LargeTokenizer(), seq_len, packing="sequential", packing_buffer_docs=5
    )
    return Run(path, encoder=encoder, **{"rows": 2, **options})


def documents_in(steps):
    """Return the documents of a stream in the order in which they begin."""
    return [FIRST_TOKENS[t] for step in steps for row in step for t in row[0] if t in FIRST_TOKENS]


def read(run, count):
    """Return the next steps of a run on one rank, with rows in their order."""
    iterator = iter(run.loaders[0])
    return [[row for _ in range(2) for row in rows_of(next(iterator))] for _ in range(count)]


def epoch_of(number, block=4, size=SIZE):
    mixed = max(1, 12 // block)
    return slow_epoch(size, "0/web", number, block, mixed)


def is_prefix(found, expected):
    return len(found) > 10 and found == expected[: len(found)]


def test_a_source_in_random_order_is_read_by_blocks(folder):
    found = documents_in(read(run_of(mix(folder)), 30))
    assert is_prefix(found, epoch_of(0) + epoch_of(1) + epoch_of(2)) and len(found) > SIZE
    for block in (1, 3, 50):  # 50 are more than are mixed
        options = {"block_docs": block}
        found = documents_in(read(run_of(mix(folder, **options)), 20))
        assert is_prefix(found, epoch_of(0, block) + epoch_of(1, block))


def test_blocks_of_256_documents_are_mixed_up_to_16384_documents(folder, monkeypatch):
    for name, value in REAL_SIZES.items():
        monkeypatch.setattr(plan_mix, name, value)
    write_tokens(folder / "large", [[n] * 40 for n in range(100, 1100)], np.int32)
    describe(folder / "large")
    path = write_split(folder / "mix.yaml", {"blend": [{"path": "large"}]})
    tokens = [t for step in read(run_of(path), 8) for row in step for t in row[0]]
    found = [token - 100 for token in dict.fromkeys(tokens)]
    assert is_prefix(found, slow_epoch(1000, "0/large", 0, 256, 64))


def test_other_files_are_read_in_one_permutation(folder):
    for other in (None, {**SHUFFLED, "seed": 8}):
        write_tokens(folder / "both/a", DOCUMENTS[:30], np.int32)
        write_tokens(folder / "both/b", DOCUMENTS[30:], np.int32)
        describe(folder / "both/a")
        describe(folder / "both/b", other)
        path = write_split(folder / "mix.yaml", {"blend": [{"path": "both"}]})
        found = documents_in(read(run_of(path), 8))
        assert is_prefix(found, slow_epoch(SIZE, "0/both", 0, 1, 1))


def test_a_part_of_a_source_is_read_by_blocks_too(folder):
    path = mix(folder, subset={"range": [20, 50]})
    found = documents_in(read(run_of(path), 7))
    assert is_prefix(found, [20 + n for n in slow_epoch(30, "0/web[20, 50]", 0, 4, 3)])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 3)])
def test_a_change_of_blocks_takes_effect_at_the_next_epoch(folder, before, after):
    run = run_of(mix(folder, block_docs=before))
    steps = read(run, 4)
    state = run.state()
    rows = json.loads(state)["plan"]["sources"]["web"]["rows"]
    assert rows.get("blocks") == ([4, 3] if before == 4 else None)
    path = mix(folder, block_docs=after)
    state = run_of(path).resume(state).state()  # saved again in the same epoch
    rest = read(run_of(path).resume(state), 25)
    found = documents_in(steps + rest)
    assert is_prefix(found, epoch_of(0, before) + epoch_of(1, after) + epoch_of(2, after))
    assert len(found) > SIZE + 20
    on_two_ranks = run_of(path, ranks=2).resume(state)
    assert on_two_ranks.steps(25) == [sorted(step) for step in rest]


def test_a_change_before_the_first_step_takes_effect_at_once(folder):
    state = run_of(mix(folder)).state()
    found = documents_in(read(run_of(mix(folder, block_docs=1)).resume(state), 10))
    assert is_prefix(found, epoch_of(0, 1))


def test_a_state_without_blocks_is_continued_in_one_permutation(folder):
    """As saved before there were blocks: the fingerprint of the documents is the same."""
    describe(folder / "web", None)
    run = run_of(mix(folder))
    steps = read(run, 4)
    state = run.state()
    assert "blocks" not in json.loads(state)["plan"]["sources"]["web"]["rows"]
    describe(folder / "web")
    steps += read(run_of(mix(folder)).resume(state), 20)
    found = documents_in(steps)
    assert is_prefix(found, epoch_of(0, 1) + epoch_of(1, 4)) and len(found) > SIZE + 10


def test_blocks_cannot_change_inside_a_step(folder):
    run = run_of(mix(folder))
    next(iter(run.loaders[0]))
    state = run.state()
    with pytest.raises(StateMismatchError, match="block_docs.*blocks and packing buffers"):
        run_of(mix(folder, block_docs=1)).resume(state).step()
    assert run_of(mix(folder)).resume(state).step()


def test_rows_of_another_length_finish_the_epoch_in_its_blocks(folder):
    run = run_of(mix(folder))
    found = documents_in(read(run, 3))
    state = run.state()
    path = mix(folder, block_docs=1)
    for _ in range(2):  # the second state is saved before the longer rows have a plan
        longer = run_of(path, seq_len=2 * SEQ_LEN).resume(state)
        state = longer.state()
        rows = json.loads(state)["plan"]["sources"]["web"]["rows"]
        assert rows["blocks"] == [4, 3] and rows["taken"] is None
    iterator = iter(longer.loaders[0])
    tokens = [token for _ in range(20) for token in next(iterator).tokens.tolist()]
    found += [FIRST_TOKENS[token] for token in tokens if token in FIRST_TOKENS]
    assert is_prefix(found, epoch_of(0) + epoch_of(1, 1)) and len(found) > SIZE + 10


def test_exclusions_limits_and_longer_rows_work_in_blocks(folder):
    (folder / "excluded.txt").write_text("web:7\nweb:30\n")
    fields = {"exclude": "excluded.txt", "skip": [[2, 4]]}
    node = {"blend": [{"path": "web", "max_epochs": 2}]}
    path = write_split(folder / "mix.yaml", node, **fields)

    def run_with(seq_len, **options):
        return Run(path, encoder=PackedTaskEncoder(LargeTokenizer(), seq_len), rows=2, **options)

    run = run_with(SEQ_LEN)
    steps = run.steps(3)
    state = run.state()
    longer = [run_with(2 * SEQ_LEN, ranks=ranks).resume(state) for ranks in (1, 2)]
    loaders = [[iter(loader) for loader in each.loaders] for each in longer]
    batches = [[batch for loader in each for batch in loader] for each in loaders]
    tokens = [
        sorted(t for b in each for t, w in zip(b.tokens.tolist(), b.token_weights) if w > 0)
        for each in batches
    ]
    assert tokens[0] == tokens[1]
    counts = tokens_of(steps)
    for token in tokens[0]:
        counts[token] += 1
    for number, document in enumerate(DOCUMENTS):
        found = {counts[token] for token in document[:-1]}
        assert found <= ({0} if number in (7, 30) else {0, 1, 2}), number
    read_twice = sum(counts[document[0]] == 2 for document in DOCUMENTS)
    assert SIZE - 20 < read_twice < SIZE - 2  # two steps were skipped


def test_an_entry_of_a_metadataset_sets_the_blocks_of_the_sources_below_it(folder):
    mix(folder, weight=2)
    path = write_split(folder / "outer.yaml", {"blend": [{"path": "mix.yaml", "block_docs": 3}]})
    assert is_prefix(documents_in(read(run_of(path), 10)), epoch_of(0, 3))
    mix(folder, block_docs=2)
    assert is_prefix(documents_in(read(run_of(path), 10)), epoch_of(0, 2))


@pytest.mark.parametrize("value", [0, "4", 1.5, True])
def test_an_invalid_size_of_a_block_is_refused(folder, value):
    with pytest.raises(ConfigError, match=r"blend\[0\] \(web\).block_docs: .* an integer >= 1"):
        run_of(mix(folder, block_docs=value))


def test_blocks_of_documents_in_stored_order_are_refused(folder):
    describe(folder / "web", None)
    with pytest.raises(
        ConfigError, match="block_docs: 4 found, but the documents of .*web are not"
    ):
        run_of(mix(folder, block_docs=4))
    run_of(mix(folder, block_docs=1))
    write_dataset(folder / "text", ["one", "two"])
    path = write_split(folder / "mix.yaml", {"blend": [{"path": "text", "block_docs": 4}]})
    with pytest.raises(ConfigError, match="block_docs: 4 found, but .*text are not token files"):
        run_of(path)


def test_blocks_of_a_spliced_source_are_refused(folder):
    path = mix(folder, block_docs=4, splice={"num_docs": 2, "content_length": 8})
    with pytest.raises(ConfigError, match="block_docs: 4 found, but web is spliced"):
        run_of(path)


@pytest.mark.parametrize("blocks", [[4], [4, 0], [0, 4], "44", [4, 1, 1], None])
def test_blocks_of_a_damaged_state_are_refused(folder, blocks):
    run = run_of(mix(folder))
    read(run, 1)
    state = without_seal(json.loads(run.state()))
    state["plan"]["sources"]["web"]["rows"]["blocks"] = blocks
    with pytest.raises(StateFormatError, match="rows.blocks: .* two sizes is needed"):
        run_of(mix(folder)).resume(json.dumps(seal(state)))
