# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every format of tokenized documents gives the rows of token files with the same content."""

import errno
import json
import os
import pickle
import re
import sys

import numpy as np
import pytest

import energon_ext
from energon_ext import ConfigError, PackedTaskEncoder, StateMismatchError, get_train_dataset
from energon_ext.storage import folders
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.formats import find_format, open_documents, register_documents
from energon_ext.tokens.paths import is_token_file
from tests.cli.command import energon_ext as command
from tests.plan.runs import SEQ_LEN, Run, write_split
from tests.support import LargeTokenizer, config, loader_for, write_dataset, write_mix, write_tokens
from tests.tokens.stores import OWN, STORES, register_own, write_parquet, write_shard

END = 79_999
LENGTHS = [int(n) for n in np.random.default_rng(5).integers(1, 60, 60)]
DOCUMENTS = [
    [*range(1000 * number, 1000 * number + length), END] for number, length in enumerate(LENGTHS)
]
OTHERS = [name for name in STORES if name != "pairs"]


@pytest.fixture(autouse=True)
def _own_store():
    forget = register_own()
    yield
    forget()


def mix_of(folder, store, documents=DOCUMENTS, **fields):
    """Write the documents to the folder ``web`` in a format, and a metadataset that names it."""
    STORES[store](folder / "web", documents)
    return write_split(folder / "mix.yaml", {"blend": [{"path": "web", **fields}]})


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The rows of 12 steps of token files, more than an epoch."""
    run = Run(mix_of(tmp_path_factory.mktemp("pairs"), "pairs"), rows=4)
    steps = run.steps(12)
    run.close()
    return steps


@pytest.mark.parametrize("store", OTHERS)
def test_rows_are_those_of_token_files_over_saves_and_other_ranks_and_workers(
    tmp_path, store, expected
):
    mix = mix_of(tmp_path, store)
    assert Run(mix, ranks=4, rows=4).steps(2) == expected[:2]
    state, steps = None, []
    for ranks, workers, batch, count in ((1, 0, 4, 3), (2, 2, 1, 4), (2, 0, 2, 2), (1, 1, 1, 3)):
        run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=4)
        if state is not None:
            run.resume(state)
        steps += run.steps(count)
        state = run.state()
        run.close()
    assert steps == expected


@pytest.mark.parametrize("store", STORES)
def test_documents_are_read_in_any_order_and_place(tmp_path, store):
    STORES[store](tmp_path / "web", DOCUMENTS)
    documents = pickle.loads(pickle.dumps(open_documents(tmp_path / "web")))
    numbers = np.random.default_rng(0).permutation(len(DOCUMENTS))
    assert documents.lengths(numbers).tolist() == [len(DOCUMENTS[n]) for n in numbers]
    starts = [len(DOCUMENTS[n]) // 3 for n in numbers]
    stops = [len(DOCUMENTS[n]) - len(DOCUMENTS[n]) // 4 for n in numbers]
    tokens, weights = documents.read(numbers.tolist(), starts, stops).values()
    assert [t.tolist() for t in tokens] == [
        DOCUMENTS[n][a:b] for n, a, b in zip(numbers, starts, stops)
    ]
    assert weights == [None] * len(DOCUMENTS)
    assert documents.tokens_in(7, 44) == sum(map(len, DOCUMENTS[7:44]))
    assert documents.tokens_in(44, 44) == 0
    file, number, _ = documents.origin(31)
    if store != "own":
        assert number == 1 and "/web/b" in file


def test_a_fingerprint_depends_on_the_documents_only(tmp_path):
    def fingerprint(store, documents, name):
        STORES[store](tmp_path / name, documents)
        return json.dumps(open_documents(tmp_path / name).fingerprint())

    found = {store: fingerprint(store, DOCUMENTS, f"a {store}") for store in OTHERS}
    assert len(set(found.values())) == 1
    # A saved run goes on only if these stay as they are.
    assert json.loads(found["npy"]) == {
        "documents": 60,
        "index": "8d807055d1358019dc45b3184da96f6c0e1cddc171b66ee890f3226c59e36283",
        "sample": "2dd3eb4fbd518436007cf44a3dd3204724aa951e0fd562e5c506402357b8f2a5",
    }
    write_parquet(tmp_path / "whole" / "all.parquet", DOCUMENTS, rows=7)
    assert json.dumps(open_documents(tmp_path / "whole").fingerprint()) == found["npy"]
    longer = [*DOCUMENTS[:-1], [*DOCUMENTS[-1], END]]
    other = [[token + 1 for token in tokens] for tokens in DOCUMENTS]
    for number, changed in enumerate((longer, DOCUMENTS[1:], DOCUMENTS[::-1], other)):
        for store in ("parquet", "npy"):
            assert fingerprint(store, changed, f"{store} {number}") != found["npy"]


@pytest.mark.parametrize("store", ["parquet", "npy"])
def test_a_resume_accepts_other_files_with_the_same_documents_and_refuses_others(tmp_path, store):
    state = Run(mix_of(tmp_path / "a", store), rows=4)
    state.steps(2)
    moved = mix_of(tmp_path / "b" / "c", "parquet" if store == "npy" else "npy")
    expected = state.state()
    rows = Run(moved, rows=4).resume(expected).step()
    assert rows == state.step()
    changed = mix_of(tmp_path / "d", store, DOCUMENTS[1:])
    with pytest.raises(StateMismatchError, match="web: documents: saved 60, now 59"):
        Run(changed, rows=4).resume(expected)


@pytest.mark.parametrize("store", ["pairs", "parquet", "npy"])
def test_a_source_that_grew_is_refused_with_a_remedy_that_works(tmp_path, store):
    mix = mix_of(tmp_path, store)
    run = Run(mix, rows=4)
    run.steps(2)
    state = run.state()
    STORES[store](tmp_path / "new", DOCUMENTS[:7])
    for path in (tmp_path / "new").iterdir():
        path.rename(tmp_path / "web" / f"later-{path.name}")
    with pytest.raises(StateMismatchError) as caught:
        Run(mix, rows=4).resume(state)
    assert "web: documents: saved 60, now 67" in str(caught.value)
    assert str(caught.value).endswith(
        "The source grew by 7: move what was added to a path of its own and list that as a source "
        "of its own, or start a new run."
    )
    for path in (tmp_path / "web").glob("later-*"):
        path.rename(tmp_path / "new" / path.name)
    both = write_split(tmp_path / "mix.yaml", {"blend": [{"path": "web"}, {"path": "new"}]})
    resumed = Run(both, rows=4).resume(state)
    assert [(each.key, each.change) for each in resumed.loaders[0].changes] == [
        ("new", "new"),
        ("web", "kept"),
    ]


@pytest.mark.parametrize("store", OTHERS)
def test_commands_show_and_leave_out_documents(tmp_path, store):
    words = [[5 + letter for letter in f"word {n:02d}".encode()] + [2] for n in range(30)]
    mix = mix_of(tmp_path, store, words)
    shown = command("peek", mix, "--tokenizer", "bytes", "--seq-length", 64, "--rows", 1)
    assert shown.exit_code == 0, shown.output
    assert "web: records no tokenizer" in shown.stderr
    (tmp_path / "run").mkdir()
    options = ("--seq-length", 16, "--global-batch-size", 2)
    traced = command("trace", tmp_path / "run", mix, "--step", 0, *options, "--exclude-lines")
    assert traced.exit_code == 0, traced.output
    left_out = {int(n) for n in re.findall(r"^web:(\d+)", traced.stdout, re.MULTILINE)}
    assert 2 <= len(left_out) <= 6
    (tmp_path / "out.txt").write_text(traced.stdout)
    blend = {"blend": [{"path": "web"}]}
    without = write_split(tmp_path / "without.yaml", blend, exclude="out.txt")
    encoder = PackedTaskEncoder(LargeTokenizer(), 16)
    dataset = get_train_dataset(
        without, worker_config=config(), batch_size=1, task_encoder=encoder, repeat=False
    )
    read = {tuple(t) for batch in loader_for(dataset) for t in _documents_in(batch)}
    assert read == {tuple(words[n]) for n in range(30) if n not in left_out}


def _documents_in(batch):
    """Yield the documents of a batch, which end with token 2."""
    tokens, document = [*batch.tokens.tolist()], []
    for token, label in zip(tokens, batch.labels.tolist()):
        document.append(token)
        if label == 2:
            yield [*document, 2]
            document = []
        elif token == 2:
            document = []


@pytest.mark.parametrize("store", OTHERS)
def test_documents_are_spliced(tmp_path, store):
    def first_rows(folder, name):
        mix = mix_of(folder, name, [[*range(9 * n, 9 * n + 9), END] for n in range(6)])
        write_split(mix, {"blend": [{"path": "web", "splice": {}}]})
        return Run(mix, rows=2).steps(3)

    assert first_rows(tmp_path / "a", store) == first_rows(tmp_path / "b", "pairs")


def test_ids_outside_the_vocabulary_are_refused_with_the_place(tmp_path):
    for store in OTHERS:
        mix = mix_of(tmp_path / store, store, [[5, 6, 80_000], [7, 80_000]])
        with pytest.raises(ConfigError, match=r"contains token id 80000, but the tok.* 80000 ids"):
            Run(mix)


# What a path names ------------------------------------------------------------------------------


def opened(path):
    return type(open_documents(path)).__name__


def test_a_path_names_a_file_a_folder_or_a_pattern(tmp_path):
    write_parquet(tmp_path / "p" / "x" / "b.parquet", [[1]])
    write_parquet(tmp_path / "p" / "a.parquet", [[2], [3]])
    write_parquet(tmp_path / "p" / ".hidden" / "c.parquet", [[4]])
    for path, count in (("p", 3), ("p/a.parquet", 2), ("p/*.parquet", 2), ("p/**/*.parquet", 3)):
        assert opened(tmp_path / path) == "ParquetTokens"
        assert len(open_documents(tmp_path / path)) == count
    first = open_documents(tmp_path / "p").document(0).tolist()
    assert first == [2]
    with pytest.raises(ConfigError, match=r"p/z\*.parquet: names no .parquet file"):
        open_documents(tmp_path / "p" / "z*.parquet")
    assert find_format(tmp_path / "missing.parquet") is None


def test_pairs_and_prepared_folders_win_over_other_files_in_a_folder(tmp_path):
    write_tokens(tmp_path / "web" / "part", [[1, 2]])
    np.save(tmp_path / "web" / "document_index.npy", np.arange(3))  # Megatron's cache
    assert opened(tmp_path / "web") == "TokenFiles"
    write_dataset(tmp_path / "texts", ["a", "b"])
    np.save(tmp_path / "texts" / "features.npy", np.arange(3))
    assert find_format(tmp_path / "texts") is None
    assert find_format(tmp_path / "nothing here") is None


def test_a_folder_with_files_of_two_formats_is_refused(tmp_path):
    write_parquet(tmp_path / "web" / "a.parquet", [[1]])
    write_shard(tmp_path / "web" / "b.npy", [[1]])
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    with pytest.raises(
        ConfigError, match=r"web: contains .parquet and .npy files, which cannot be"
    ):
        Run(mix)


def test_a_folder_with_several_splits_is_refused(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", [[1]])
    with pytest.raises(ConfigError, match="contains the splits test and train, which cannot be"):
        open_documents(tmp_path / "data")
    assert len(open_documents(tmp_path / "data" / "train*.parquet")) == 2


def test_a_folder_with_one_split_is_a_source_wherever_it_is(tmp_path):
    data = tmp_path / "test" / "data"
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        write_parquet(data / f"{name}.parquet", [[1]])
    assert len(open_documents(data)) == 2


def test_a_link_from_a_folder_to_itself_is_not_followed_forever(tmp_path, monkeypatch):
    folder = tmp_path / "data.parquet"  # so it is not first searched for pairs
    write_parquet(folder / "a.parquet", [[1]])
    (folder / "below").symlink_to(folder)
    monkeypatch.setattr(folders, "MAX_FOLDERS", 20)
    with pytest.raises(ConfigError, match="data.parquet: has more than 20 folders below it"):
        open_documents(folder)


def test_object_stores_are_refused_for_formats_of_local_files():
    with pytest.raises(ConfigError, match="msc://store/a.parquet: .parquet files with token ids"):
        open_documents("msc://store/a.parquet")


def test_token_files_have_no_key(tmp_path):
    for store in ("npy", "own", "pairs"):
        mix = mix_of(tmp_path / store, store, key="content")
        with pytest.raises(ConfigError, match="are token files, which have no fields; remove it"):
            Run(mix)


# Own sources ------------------------------------------------------------------------------------


class Wrong(Documents):
    def __init__(self, lengths, tokens):
        self._lengths, self._tokens = lengths, tokens

    def __len__(self):
        return 2

    def lengths(self, numbers):
        return self._lengths

    def tokens(self, number, start, stop):
        return self._tokens


GOOD = np.array([1, 1])


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1, 2]], "are a list; a subclass of energon_ext.tokens.documents.Documents is needed"),
        (Wrong([1, 1], GOOD), r"lengths\(2 numbers\) returned a list; as many integers >= 0"),
        (Wrong(np.array([1.0, 1.0]), GOOD), r"an array of float64 with the shape \(2,\)"),
        (Wrong(np.array([1]), GOOD), r"an array of int64 with the shape \(1,\)"),
        (Wrong(np.array([1, -1]), GOOD), "as many integers >= 0"),
        (Wrong(GOOD, GOOD), r"tokens\(\d, 0, 1\) returned an array of int64 with the shape \(2,\)"),
        (Wrong(GOOD, np.array([0.5])), "returned an array of float64"),
    ],
)
def test_a_wrong_class_is_refused(tmp_path, documents, message):
    register_documents(OWN, lambda path: documents)
    (tmp_path / f"web{OWN}").touch()
    mix = write_mix(tmp_path / "mix.yaml", [(f"web{OWN}", 1)])
    with pytest.raises(
        ConfigError, match=rf"web{OWN}: the documents registered for {OWN}"
    ) as error:
        Run(mix)
    assert error.match(message)


@pytest.mark.parametrize("suffix", ["own", ".", "", ".yaml", ".bin", 7])
def test_a_suffix_that_would_never_be_asked_is_refused(suffix):
    with pytest.raises(ConfigError, match="register_documents: .* found, a suffix such as"):
        energon_ext.register_documents(suffix, print)


def test_the_longest_suffix_wins(tmp_path):
    (tmp_path / "a.tokens.npy").write_bytes(b"")
    register_documents(".tokens.npy", print)  # forgotten after the test, see `_own_store`
    assert find_format(tmp_path / "a.tokens.npy").suffix == ".tokens.npy"
    assert find_format(tmp_path / "b.npy") is None


@pytest.mark.parametrize("name", ["", "*", "**"])
def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, name, monkeypatch):
    write_parquet(tmp_path / "web" / "below" / "a.parquet", DOCUMENTS[:2])

    def refuse(path="."):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigError, match="web.*: cannot be read \\(Permission denied\\)"):
        open_documents(os.path.join(tmp_path, "web", name))


def test_a_folder_named_like_its_files_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    write_parquet(tmp_path / "web.parquet" / "a.parquet", DOCUMENTS[:2])

    def refuse(path="."):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"web.parquet: cannot be read \(Permission denied\)"):
        open_documents(tmp_path / "web.parquet")


def test_a_suffix_may_be_that_of_a_folder_or_in_an_object_store(tmp_path):
    paths = []

    def remember(path):
        paths.append(path)
        return Wrong(GOOD, np.array([3]))

    register_documents(OWN, remember)
    (tmp_path / f"web{OWN}").mkdir()
    assert find_format(tmp_path / f"missing{OWN}") is None
    for path in (f"{tmp_path}/web{OWN}", f"{tmp_path}/web{OWN}/", f"msc://store/web{OWN}"):
        open_documents(path)
    assert paths == [f"{tmp_path}/web{OWN}", f"{tmp_path}/web{OWN}/", f"msc://store/web{OWN}"]


def test_chats_need_label_weights_in_every_store(tmp_path):
    for store in OTHERS:
        mix = mix_of(tmp_path / store, store)
        with pytest.raises(ConfigError, match="has no label weights, so questions would be"):
            Run(mix, encoder=energon_ext.SFTTaskEncoder(LargeTokenizer(), SEQ_LEN))


def test_a_load_looks_for_the_format_of_each_source_once(tmp_path):
    """It is asked when the YAML is checked, when the path is resolved and when it is opened."""
    names = [f"s{number}" for number in range(5)]
    for name in names:
        write_tokens(tmp_path / name, DOCUMENTS)
    mix = write_mix(tmp_path / "mix.yaml", [(name, 1) for name in names])
    looked = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is is_token_file.__code__:
            looked.append(str(frame.f_locals["path"]))

    sys.setprofile(note)
    try:
        Run(mix, rows=4).close()
    finally:
        sys.setprofile(None)
    assert sorted(each for each in looked if each.endswith(tuple(names))) == [
        str(tmp_path / name) for name in names
    ]
