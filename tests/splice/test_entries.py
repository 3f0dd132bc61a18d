# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``splice:`` on an entry of the YAML: separate settings, next to plain and other entries."""

import warnings

import pytest

from energon_ext import (
    ConfigError,
    MultiSpliceTaskEncoder,
    PackedTaskEncoder,
    PromptTaskEncoder,
    SFTTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.mixture.checks import BlendWarning
from energon_ext.splice import GridIndex, MultiSpliceConfig, SpliceConfig
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.splice import slow
from tests.splice.mixes import mix_of, shown
from tests.support import batch_hash, config, loader_for, take, write_tokens

SEQ_LEN = 16
BOOK = [[10 * d + 4 + n for n in range(6 + d)] for d in range(4)]  # 6, 7, 8 and 9 tokens
WEB = [[200 + d, 201, 202, 2] for d in range(9)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("entries")
    write_tokens(root / "book", BOOK)
    write_tokens(root / "web", WEB)
    return root


def build(path, encoder=None, *, num_workers=0, **options):
    return get_train_dataset(
        path,
        worker_config=config(num_workers),
        batch_size=options.pop("batch_size", 4),
        task_encoder=encoder or PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
        **options,
    )


SHORT = {"splice": {"num_docs": 2, "content_length": 3, "balance_mode": "every_pair"}}
LONG = {"splice": {"doc_index": 1, "content_start_mode": "anchor_start", "offset_stride": 3}}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_entries_have_their_own_settings_next_to_a_plain_source(data, num_workers):
    again = {**LONG, "subflavors": {"way": 2}}
    path = mix_of(data, "three", ("book", SHORT), ("book", again), ("web", {}))
    found = shown(loader_for(build(path, num_workers=num_workers, repeat=False)))
    by_name = {name.rpartition("/doc")[0] or name for name, *_ in found}
    second = 'book{"way": 2}'
    assert by_name == {"book", second, "web"}
    short = {key: n for key, n in found.items() if key[0].startswith("book/")}
    # The two longest, contents of 3 at the end of the frame.
    assert short == {
        (f"book/doc{d}", tuple(BOOK[d][t : t + 3]), 13): 1
        for d in (3, 2)
        for t, _ in slow.pairs(len(BOOK[d]), SEQ_LEN, 3, mode="coverage_balanced")
    }
    long = {key: n for key, n in found.items() if key[0].startswith(second)}
    assert long == {(f"{second}/doc1", tuple(BOOK[1]), s): 1 for s in (0, 3, 6, 9)}
    web = {key: n for key, n in found.items() if key[0] == "web"}
    assert sorted(tokens for _, tokens, _ in web) == sorted(map(tuple, WEB))


def test_entries_accept_every_field_of_both_kinds(data):
    values = {"dataset_name": "book", "content_length": 4, "max_doc_length": 9, "doc_key": None}
    for kind, number in ((SpliceConfig, {}), (MultiSpliceConfig, {"num_docs": 1})):
        for name in kind.__dataclass_fields__:
            fields = {name: values.get(name, getattr(kind(), name)), **number}
            path = mix_of(data, "field", ("book", {"splice": fields}))
            (source,) = splices_of(build(path))
            assert type(source.config) is kind
            assert getattr(source.config, name) == fields[name]
    (source,) = splices_of(build(mix_of(data, "empty", ("book", {"splice": {}}))))
    assert source.config == SpliceConfig()


@pytest.mark.parametrize("node", ["blend", "interleave"])
def test_weights_move_a_run_from_one_splice_to_another(data, node):
    """A curriculum: short contents for four steps, then whole documents."""
    path = mix_of(
        data,
        f"curriculum_{node}",
        ("book", {**SHORT, "weight": {"step": {0: 1, 4: 0}}, "subflavors": {"stage": 1}}),
        ("book", {**LONG, "weight": {"step": {0: 0, 4: 1}}, "subflavors": {"stage": 2}}),
        node=node,
    )
    lengths = [
        {len(tokens) for _, tokens, _ in shown([batch])}
        for batch in take(loader_for(build(path)), 8)
    ]
    assert lengths == [{3}] * 4 + [{7}] * 4


def test_a_dataset_may_be_spliced_twice_if_settings_differ(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error", BlendWarning)
        build(mix_of(data, "ways", ("book", SHORT), ("book", LONG), ("book", {})))
    with pytest.warns(BlendWarning, match="^book#3: the same source is listed more than once"):
        build(mix_of(data, "ways", ("book", SHORT), ("book", LONG), ("book", SHORT)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_continues_and_a_changed_splice_is_refused(data, num_workers):
    path = mix_of(data, "resumed", ("book", SHORT), ("web", {}))
    loader = loader_for(build(path, num_workers=num_workers))
    expected = [batch_hash(batch) for batch in take(loader, 6)]
    first = loader_for(build(path, num_workers=num_workers))
    take(first, 3)
    resumed = loader_for(build(path, num_workers=num_workers))
    resumed.restore_state_rank(first.save_state_rank())
    assert [batch_hash(batch) for batch in take(resumed, 3)] == expected[3:]
    if num_workers:
        return
    for fields, difference in (
        ({"content_length": 4}, r"content_length: saved 3, now 4"),
        ({"cut_at_frame_end": True, "content_start_mode": "slide_within"}, "cut_at_frame_end"),
    ):
        other = mix_of(data, "resumed", ("book", {"splice": SHORT["splice"] | fields}), ("web", {}))
        with pytest.raises(StateMismatchError, match=difference):
            loader_for(build(other)).restore_state_rank(first.save_state_rank())


def test_entries_override_the_encoder_and_inner_entries_the_outer(data):
    default = MultiSpliceTaskEncoder(
        ByteTokenizer(), SEQ_LEN, MultiSpliceConfig(num_docs=1, content_length=5)
    )
    path = mix_of(data, "default", ("book", LONG), ("web", {}))
    first, second = splices_of(build(path, default))
    assert isinstance(first.config, SpliceConfig) and first.config.doc_index == 1
    assert second.config == default.splice
    inner = mix_of(data, "inner", ("book", LONG), ("web", {}))
    outer = mix_of(data, "outer", (inner.name, SHORT))
    kinds = [type(source.config) for source in splices_of(build(outer))]
    assert kinds == [SpliceConfig, MultiSpliceConfig]


def test_a_name_selects_sources_within_a_nested_metadataset(data):
    inner = mix_of(data, "both", ("book", {}), ("web", {}))
    named = {"splice": {**SHORT["splice"], "dataset_name": "book"}}
    (source,) = splices_of(build(mix_of(data, "named", (inner.name, named))))
    assert source.key == "book"
    named["splice"]["dataset_name"] = "letters"
    with pytest.raises(ConfigError, match=r"splice: dataset_name: 'letters' found, .* book, web"):
        build(mix_of(data, "unnamed", (inner.name, named)))


def test_a_name_without_a_validation_source_is_refused(data):
    named = {"splice": {**SHORT["splice"], "dataset_name": "letters"}}
    path = mix_of(data, "misspelt", ("book", named), ("web", {}), split="val")
    with pytest.raises(ConfigError, match="dataset_name: 'letters' found, .* book"):
        get_val_datasets(
            path,
            worker_config=config(),
            batch_size=4,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
        )


def test_validation_shows_the_grid_of_an_entry(data):
    path = mix_of(data, "val", ("book", LONG), ("web", {}), split="val")
    (dataset, _), (plain, _) = get_val_datasets(
        path,
        worker_config=config(),
        batch_size=4,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
    )
    (source,) = splices_of(dataset)
    assert isinstance(source.examples, GridIndex)
    found = shown(loader_for(dataset))
    assert {s for name, _, s in found if name == "book/doc1"} == {0, 1, 3, 4, 5, 6, 8, 9}
    assert {name for name, *_ in shown(loader_for(plain))} == {"web"}


def test_an_entry_sets_the_pad_token_and_a_run_has_only_one(data):
    encoder = PackedTaskEncoder(ByteTokenizer(), SEQ_LEN)
    padded = {"splice": {**LONG["splice"], "pad_token_id": 3}}
    batch = take(loader_for(build(mix_of(data, "pad", ("book", padded)), encoder)), 1)[0]
    assert set(batch.tokens[batch.padding_mask()].tolist()) == {3}
    plain = take(loader_for(build(mix_of(data, "nopad", ("book", LONG)), encoder)), 1)[0]
    assert set(plain.tokens[plain.padding_mask()].tolist()) == {0}
    other = {"splice": {"pad_token_id": 4}}
    with pytest.raises(ConfigError, match="pad_token_id: 3 for book and 4 for web; all rows"):
        build(mix_of(data, "pads", ("book", padded), ("web", other)))


@pytest.mark.parametrize(
    ("splice", "message"),
    [
        (
            {"num_docs": 2, "content_lenght": 3},
            r"blend\[0\] \(book\).splice: no field 'content_lenght' in a splice of many documents; "
            r"it has .*; did you mean content_length",
        ),
        ({"balance_tau": 0.5}, "'balance_tau' in a splice of one document; one with num_docs has"),
        ({"num_docs": 2, "doc_index": 0}, "a splice of many documents; one without num_docs has"),
        ({"content_length": 1}, "splice: content_length: 1 found, an integer >= 2 is needed"),
        ([3], r"splice: \[3\] found, a mapping such as \{num_docs: 3\} is needed"),
        (True, r"splice: True found, a mapping"),
        (
            {"pack_contents": True, "attend_prefix": True},
            "attend_prefix: True found with pack_cont",
        ),
    ],
)
def test_a_mistake_on_an_entry_is_one_line_with_its_place(data, splice, message):
    path = mix_of(data, "wrong", ("book", {"splice": splice}), ("web", {}))
    with pytest.raises(ConfigError, match=message) as refused:
        build(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda t: SFTTaskEncoder(t, SEQ_LEN), "SFTTaskEncoder does not support splices"),
        (lambda t: PromptTaskEncoder(t), "PromptTaskEncoder does not support splices"),
        (lambda t: PackedTaskEncoder(t, SEQ_LEN, alignment=2), "alignment: 2 found; frames begin"),
        (
            lambda t: PackedTaskEncoder(t, SEQ_LEN, packing="sequential"),
            "pack_contents: True found with mask_boundary_loss=False",
        ),
    ],
)
def test_an_encoder_that_cannot_splice_refuses_the_entry(data, encoder, message):
    packed = {"splice": {**LONG["splice"], "pack_contents": True}}
    path = mix_of(data, "refused", ("book", packed), ("web", {}))
    with pytest.raises(ConfigError, match=message) as refused:
        build(path, encoder(ByteTokenizer()))
    assert f"{path}: blend[0] (" in str(refused.value) and "book).splice: " in str(refused.value)


def test_commands_show_the_settings_of_entries(data):
    path = mix_of(data, "commands", ("book", SHORT), ("web", {}))
    plan = energon_ext("plan", path, "--seq-length", SEQ_LEN).stdout
    assert "book: 2 documents, 17 tokens, 13 examples in an epoch" in plan
    assert [line.split()[:4] for line in plan.splitlines()[-2:]] == [
        ["doc3", "9", "7", "7"],
        ["doc2", "8", "6", "6"],
    ]
    peek = energon_ext("peek", path, "--seq-length", SEQ_LEN, "--rows", 1, "--source", "book")
    assert "  book/doc" in peek.stdout and ": 3 tokens, 2 trained" in peek.stdout
    wrong = mix_of(data, "misspelt", ("book", {"splice": {"alpa": 1}}))
    assert "did you mean alpha" in error_line(energon_ext("plan", wrong))
