# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Matching of saved states with sources, worked out by hand."""

import pytest

from energon_ext.errors import StateMismatchError
from energon_ext.state.match import (
    SourceChange,
    SourceNames,
    check_fingerprint,
    compare_sources,
    match_sources,
)


def state_of(**sources):
    """Return documents, tokens and names of each source of one run or worker."""
    fields = ("documents", "tokens", "names")
    return {key: dict(zip(fields, values)) for key, values in sources.items()}


WORKERS = [
    state_of(web=(3, 300, ["/d/web", "web"]), old=(1, 10, ["/d/old", "old"]), a=(5, 50, ["", ""])),
    state_of(web=(4, 401, ["/d/web", "web"]), old=(2, 25, ["/d/old", "old"]), a=(0, 0, ["", ""])),
]


def test_sources_are_kept_moved_new_or_retained_across_workers():
    current = {
        "code": SourceNames("/d/code", "code"),
        "../web": SourceNames("/d/web", "web"),
        "a": SourceNames("/d/a", "a"),
    }
    changes = compare_sources(WORKERS, current)
    assert changes == [
        SourceChange("code", "new"),
        SourceChange("../web", "moved", 7, 701, "web"),
        SourceChange("a", "kept", 5, 50),
        SourceChange("old", "retained", 3, 35),
    ]
    assert [str(change) for change in changes] == [
        "code: new",
        "../web: moved, was web, 701 tokens read",
        "a: kept, 50 tokens read",
        "old: retained, 35 tokens read",
    ]
    assert changes[0].to_json() == {"key": "code", "change": "new", "documents": 0, "tokens": 0}
    assert changes[1].to_json()["saved_key"] == "web"


def test_a_state_matches_by_key_then_by_names_and_only_once():
    saved = WORKERS[0]
    # The key matches one source and the names another: the key wins.
    assert match_sources(saved, {"old": SourceNames("/d/web", "web")}) == {"old": "old"}
    # Different names, no names, or a state that is already taken.
    assert match_sources(saved, {"x": SourceNames("/d/web", "other")}) == {}
    assert match_sources(saved, {"x": SourceNames("", "")}) == {}
    assert SourceNames() == ("", "", "")
    assert match_sources({"y": {"names": [*SourceNames()]}}, {"x": SourceNames()}) == {}
    twice = {"x": SourceNames("/d/web", "web"), "y": SourceNames("/d/web", "web")}
    assert match_sources(saved, twice) == {"x": "web"}


def test_a_source_that_was_away_while_all_moved_is_found_by_its_content():
    def saved(**names):
        return {key: {"names": each} for key, each in names.items()}

    away = saved(web=["/before/web", "web", "c1"], code=["/before/code", "code", "c2"])
    assert match_sources(away, {"../web": SourceNames("/now/web", "web", "c1")}) == {
        "../web": "web"
    }
    # Other content, another order, or none known.
    for names in (("web", "c9"), ("code", "c1"), ("web", ""), ("", "c1")):
        assert match_sources(away, {"x": SourceNames("/now/web", *names)}) == {}
    # One of several alike would be a guess.
    alike = {"a/web": SourceNames("/now/a/web", "web", "c1")}
    assert match_sources(away, {**alike, "b/web": SourceNames("/now/b/web", "web", "c1")}) == {}
    twice = saved(**{"a/web": ["/1/web", "web", "c1"], "b/web": ["/2/web", "web", "c1"]})
    assert match_sources(twice, {"web": SourceNames("/now/web", "web", "c1")}) == {}
    # A source that is found by its place is not one of them.
    there = {"../a": SourceNames("/1/web", "web", "c1"), "x": SourceNames("/3/web", "web", "c1")}
    assert match_sources(twice, there) == {"../a": "a/web", "x": "b/web"}


def test_every_differing_field_is_named_with_a_remedy():
    saved, current = {"seed": 0, "seq_len": 8, "gone": 1}, {"seed": 0, "seq_len": 9, "come": None}
    with pytest.raises(StateMismatchError) as refused:
        check_fingerprint(saved, current, "web")
    assert refused.value.differences == {"web: seq_len": (8, 9), "web: gone": (1, None)}
    assert str(refused.value).endswith("Use the saved values, or start a new run.")
    with pytest.raises(StateMismatchError, match=r"\(seq_len: saved 8, now 9\). Do that.$"):
        check_fingerprint({"seq_len": 8}, {"seq_len": 9}, advice="Do that.")
    check_fingerprint(saved, dict(saved))
