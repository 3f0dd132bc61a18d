# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Transforms of documents at reading time, against documents that are put together again."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch

from energon_ext.batch.columns import Column
from energon_ext.errors import ConfigError, EnergonExtError, StateMismatchError
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.transformed import TransformedLengths
from energon_ext.tokens.transforms import (
    TRANSFORMS,
    DocumentColumns,
    DocumentTransform,
    FillInTheMiddle,
    TokenNoise,
    Transform,
)
from tests.cli.command import energon_ext
from tests.plan.memory_documents import MemoryDocuments
from tests.support import take, write_mix, write_tokens
from tests.tokens.test_columns import (
    describe,
    documents,
    experts,
    loader_of,
    write_columns_of,
)

#: Not among the ids of documents.
PREFIX, SUFFIX, MIDDLE = 253, 254, 255
FILL = {"prefix": PREFIX, "suffix": SUFFIX, "middle": MIDDLE}


def mix_with(path, transform, *names, **fields):
    write_mix(path, [(name, 1) for name in names or ("web",)])
    content = json.loads(path.read_text())
    for entry in content["splits"]["train"]["blend"]:
        entry.update({"transform": transform, **fields})
    path.write_text(json.dumps(content))
    return path


def put_together(tokens):
    """Undo fill-in-the-middle; return the document and how it was changed."""
    if PREFIX not in tokens:
        return tokens, None
    prefix, suffix, middle = (tokens.index(each) for each in (PREFIX, SUFFIX, MIDDLE))
    if suffix == prefix + 1:  # a document <prefix><suffix> c <middle> a b
        after, whole = tokens[suffix + 1 : middle], tokens[middle + 1 :]
        return tokens[:prefix] + whole + after, "spm"
    first, after = tokens[prefix + 1 : suffix], tokens[suffix + 1 : middle]
    return tokens[:prefix] + first + tokens[middle + 1 :] + after, "psm"


def segments_of(batches):
    """Yield tokens and label weights of each segment, with a last token that is only a label."""
    for batch in batches:
        batch.validate()
        ends = batch.cu_seqlens.tolist()
        for first, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
            if source >= 0:
                is_label = end % 64 == 0 and batch.labels[end - 1] != 0
                labels = batch.labels[end - 1 : end].tolist() if is_label else []
                stop = end if is_label else end - 1
                weights = batch.token_weights[first:stop].tolist()
                yield batch.tokens[first:end].tolist() + labels, weights


def texts_of(batches):
    return [tokens for tokens, _ in segments_of(batches)]


# Fill-in-the-middle -----------------------------------------------------------------------------


def short(seed=1):
    """Documents that fit a row, each different."""
    return [[3 + n, *each[:50]] for n, each in enumerate(documents(seed))]


def test_a_document_is_whole_again_if_its_middle_goes_back(tmp_path):
    texts = short()
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": {**FILL, "rate": 0.5}})
    kinds = defaultdict(int)
    orders = defaultdict(set)
    for tokens in texts_of(take(loader_of(mix), 60)):
        before, kind = put_together(tokens)
        assert before in texts
        kinds[kind] += 1
        orders[texts.index(before)].add((kind is not None, tuple(tokens)))
    assert 0.35 < kinds[None] / sum(kinds.values()) < 0.65
    assert 0.3 < kinds["psm"] / (kinds["psm"] + kinds["spm"]) < 0.7
    # Whether a document is changed is always the same, how it is changed is new in each epoch.
    assert all(len({changed for changed, _ in each}) == 1 for each in orders.values())
    changed = [each for each in orders.values() if all(flag for flag, _ in each)]
    assert np.mean([len(each) for each in changed]) > 5


def test_lengths_are_planned_exactly(tmp_path):
    texts = short()
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": {**FILL, "rate": 1}})
    loader = loader_of(mix)
    batches = take(loader, 20)
    assert all(PREFIX in tokens or len(tokens) < 3 for tokens in texts_of(batches))
    drawn = loader.state_dict()["plan"]["sources"]["web"]["tokens"]
    assert drawn == sum(int((~batch.padding_mask()).sum()) for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_on_other_ranks_and_workers_makes_the_same_choices(tmp_path, workers):
    write_tokens(tmp_path / "web", documents(1))
    transform = {"fill_in_the_middle": {**FILL, "rate": 0.7}}
    mix = mix_with(tmp_path / "mix.yaml", transform)
    loader = loader_of(mix, packing="sequential")
    take(loader, 5)
    state = loader.state_dict()
    expected = [batch.tokens.view(4, 64) for batch in take(loader, 12)]
    found = []
    for rank in range(2):
        resumed = loader_of(mix, workers=workers, rank=rank, ranks=2, packing="sequential")
        resumed.load_state_dict(state)
        found.append([batch.tokens.view(2, 64) for batch in take(resumed, 12)])
        resumed.close()
    for whole, *parts in zip(expected, *found):
        assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())


def test_all_columns_stay_with_their_tokens(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": {**FILL, "rate": 1}})
    for batch in take(loader_of(mix), 12):
        batch.validate()
        tokens = batch.tokens.numpy()
        carried = (batch.segment_sources().numpy() >= 0) & ~np.isin(
            tokens, [PREFIX, SUFFIX, MIDDLE]
        )
        expected = np.where(carried[:, None, None], experts(tokens), -1)
        assert batch.columns["experts"].numpy().tolist() == expected.tolist()


def test_ends_of_a_document_stay_where_they_are():
    change = FillInTheMiddle(**FILL, rate=1, ends=[1, 2])
    tokens = np.array([1, *range(10, 30), 2])
    rng = np.random.default_rng(0)
    for _ in range(50):
        columns = DocumentColumns({"tokens": tokens, "label_weights": None}, {})
        after = change.apply(0, columns, rng)["tokens"].tolist()
        assert (after[0], after[-1], len(after)) == (1, 2, 25)
        assert put_together(after[:-1])[0] + [2] == tokens.tolist()


def test_tokens_may_be_named(tmp_path, monkeypatch):
    names = {"<p>": PREFIX, "<s>": SUFFIX, "<m>": MIDDLE}
    monkeypatch.setattr(ByteTokenizer, "added_tokens", lambda self: names)
    texts = short()
    write_tokens(tmp_path / "web", texts)
    options = {"prefix": "<p>", "suffix": "<s>", "middle": "<m>", "rate": 1}
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": options})
    assert all(put_together(each)[0] in texts for each in texts_of(take(loader_of(mix), 5)))
    options["middle"] = "<x>"
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": options})
    with pytest.raises(ConfigError, match=r"transform: the tokenizer has no token '<x>'; it has"):
        take(loader_of(mix), 1)


# Metadata and noise -----------------------------------------------------------------------------


def write_with_metadata(prefix, texts):
    """Write documents with one to three tokens of metadata each, from 200 on."""
    columns = {"site": Column("int32", (3,), per="document", fill=-1)}
    writer = TokenWriter(prefix, 300, columns)
    for number, tokens in enumerate(texts):
        count = 1 + number % 3
        site = [200 + number % 50] * count + [-1] * (3 - count)
        writer.write(np.array(tokens), columns={"site": site})
    writer.close({"tokenizer": ByteTokenizer().fingerprint(), **describe(columns)})


def test_metadata_come_before_a_document_and_are_not_trained(tmp_path):
    texts = [[100 + n % 90, *range(3, 3 + n % 40)] for n in range(60)]
    write_with_metadata(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"metadata_prefix": {"column": "site"}})
    seen = set()
    expected = {(*[200 + n % 50] * (1 + n % 3), *each): n for n, each in enumerate(texts)}
    for tokens, weights in segments_of(take(loader_of(mix), 12)):
        number = expected[tuple(tokens)]
        count = 1 + number % 3
        # The labels are the tokens one place on.
        assert weights == [0] * (count - 1) + [1] * (len(tokens) - count)
        seen.add(number)
    assert len(seen) > 50


def test_noise_replaces_a_share_and_is_not_trained(tmp_path):
    texts = [[*range(10, 60)] for _ in range(40)]
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"token_noise": {"rate": 0.2, "token": 7}})
    replaced = total = 0
    for batch in take(loader_of(mix), 20):
        is_noise = batch.labels == 7
        assert not batch.token_weights[is_noise].any()
        ends = batch.cu_seqlens.tolist()
        for first, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
            if source >= 0:
                tokens = batch.tokens[first:end]
                expected = torch.arange(10, 60)
                assert ((tokens == expected) | (tokens == 7)).all()
                replaced, total = replaced + int((tokens == 7).sum()), total + 50
    assert 0.15 < replaced / total < 0.25


def test_random_ids_are_below_the_limit():
    change = TokenNoise(rate=1, below=5)
    columns = DocumentColumns({"tokens": np.arange(100, 400), "label_weights": None}, {})
    after = change.apply(0, columns, np.random.default_rng(0))
    assert {*after["tokens"].tolist()} == {*range(5)} and not after["label_weights"].any()


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        ("fim", "one of fill_in_the_middle, metadata_prefix, token_noise"),
        ({"fim": {}}, "'fim' found, it may be fill_in_the_middle"),
        ({"token_noise": 3}, r"transform.token_noise: 3 found, its options are needed"),
        ({"token_noise": {"rate": 2, "token": 1}}, "rate: 2 found, a share from 0 to 1"),
        ({"token_noise": {"rate": 0.5}}, "give either below or token"),
        ({"token_noise": {"rate": 0.5, "token": -3}}, "token: -3 found, a token is needed"),
        ({"fill_in_the_middle": {"prefix": 1}}, "missing 2 required keyword-only arguments"),
        ({"fill_in_the_middle": {**FILL, "ends": "abc"}}, "ends: 'abc' found, a list of tokens"),
        ({"fill_in_the_middle": {**FILL, "pad": 1}}, "got an unexpected keyword argument 'pad'"),
        ({"metadata_prefix": {"column": "site"}}, "no column per document 'site'; they have none"),
    ],
)
def test_a_field_that_is_no_transform_is_refused(tmp_path, transform, reason):
    write_tokens(tmp_path / "web", short())
    mix = mix_with(tmp_path / "mix.yaml", transform)
    with pytest.raises(ConfigError, match=reason):
        loader_of(mix)


def test_conversations_and_splices_are_not_transformed(tmp_path):
    noise = {"token_noise": {"rate": 0.1, "token": 7}}
    write_tokens(tmp_path / "web", short())
    spliced = mix_with(tmp_path / "mix.yaml", noise, splice={"num_docs": 2})
    with pytest.raises(ConfigError, match="transform: web is spliced"):
        loader_of(spliced)


def test_a_resume_with_another_transform_is_refused_by_its_name(tmp_path):
    write_tokens(tmp_path / "web", short())
    mix = mix_with(tmp_path / "mix.yaml", {"token_noise": {"rate": 0.1, "token": 7}})
    loader = loader_of(mix)
    take(loader, 2)
    state = loader.state_dict()
    mix = mix_with(tmp_path / "mix.yaml", {"token_noise": {"rate": 0.2, "token": 7}})
    with pytest.raises(StateMismatchError, match="transform"):
        loader_of(mix).load_state_dict(state)


@pytest.mark.parametrize(
    "transform",
    [
        {"fill_in_the_middle": {**FILL, "middle": 260, "rate": 1}},
        {"token_noise": {"rate": 1, "token": 260}},
        {"token_noise": {"rate": 1, "below": 100_000}},
    ],
)
def test_tokens_that_the_tokenizer_does_not_have_are_refused(tmp_path, transform):
    write_tokens(tmp_path / "web", short())
    mix = mix_with(tmp_path / "mix.yaml", transform)
    with pytest.raises(EnergonExtError, match=r"has the token \d+ after it, but .* has 260 ids"):
        take(loader_of(mix), 1)


def test_a_resume_with_other_metadata_is_refused_by_its_name(tmp_path):
    texts = [[100 + n % 90, *range(3, 3 + n % 40)] for n in range(60)]
    write_with_metadata(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"metadata_prefix": {"column": "site"}})
    loader = loader_of(mix)
    take(loader, 2)
    state = loader.state_dict()
    columns = np.load(tmp_path / "web.site.npy")
    np.save(tmp_path / "web.site.npy", np.where(columns < 0, columns, columns + 1))
    with pytest.raises(StateMismatchError, match="transform"):
        loader_of(mix).load_state_dict(state)


class Reversed(DocumentTransform):
    def lengths(self, numbers, stored):
        return stored

    def apply(self, number, columns, rng):
        count = len(columns["tokens"])
        return columns.move(np.arange(count)[::-1], columns["tokens"][::-1])

    def to_json(self):
        return {}


class Forgetful(Reversed):
    def apply(self, number, columns, rng):
        return {"tokens": columns["tokens"][1:], "label_weights": None}


class Wrong(Reversed):
    """Returns of the tokens what a test sets."""

    def apply(self, number, columns, rng):
        return type(self).found(columns["tokens"])


@pytest.fixture
def registered():
    own = {"reversed": Reversed, "forgetful": Forgetful, "wrong": Wrong}
    for name, each in own.items():
        TRANSFORMS[name] = each
    yield
    for name in own:
        del TRANSFORMS[name]


def test_a_transform_of_a_user_is_registered_by_its_name(tmp_path, registered):
    texts = short()
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"reversed": {}})
    assert all(each[::-1] in texts for each in texts_of(take(loader_of(mix), 5)))


def test_a_transform_with_another_length_than_planned_is_named(tmp_path, registered):
    write_tokens(tmp_path / "web", short())
    mix = mix_with(tmp_path / "mix.yaml", {"forgetful": {}})
    with pytest.raises(EnergonExtError, match=r"transform forgetful: document \d+ became"):
        take(loader_of(mix), 1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda tokens: None, r"became NoneType; the columns \['label_weights', 'tokens'\] are"),
        (lambda tokens: tokens - 1000, r"has the token -\d+ after it, but the tokenizer has 260"),
        (lambda tokens: tokens + 0.5, r"column tokens: \d+\.5 does not fit int64"),
        (lambda tokens: tokens[:, None], r"column tokens: \w+ \[(\d+), 1\] found, int64 \[\1\] is"),
    ],
)
def test_what_a_transform_returns_wrongly_is_named(tmp_path, registered, returned, message):
    write_tokens(tmp_path / "web", short())

    def found(tokens):
        changed = returned(tokens.astype(np.int64))
        return None if changed is None else {"tokens": changed, "label_weights": None}

    Wrong.found = staticmethod(found)
    mix = mix_with(tmp_path / "mix.yaml", {"wrong": {}})
    with pytest.raises(EnergonExtError, match=rf"transform wrong: document \d+ .*{message}"):
        take(loader_of(mix), 1)


@pytest.mark.parametrize("wrong", [None, [3], np.array([2.5]), np.array([-4]), np.array([1, 2])])
def test_lengths_that_are_none_are_refused_when_a_run_is_planned(wrong):
    transform = Reversed()
    transform.lengths = lambda numbers, stored: wrong
    found = TransformedLengths(MemoryDocuments([3]), Transform("wrong", transform))
    with pytest.raises(ConfigError, match="transform wrong: its lengths of 1 documents are .*"):
        found.lengths(np.array([0]))


def test_plan_counts_transformed_tokens_and_peek_shows_them(tmp_path):
    texts = [[*range(10, 50)] for _ in range(20)]
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"fill_in_the_middle": {**FILL, "rate": 1}})
    shown = energon_ext("peek", mix, "--tokenizer", "bytes", "--seq-length", 64, "--rows", 1)
    assert shown.exit_code == 0 and "web: 43 tokens" in shown.stdout
