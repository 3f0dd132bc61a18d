# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Chains of runs: the mix changes between steps, the topology after any batch.

A list model predicts the rows of each step for sequential packing and shares no code with the plan.
Best-fit packing is compared with the undisturbed run, and by the totals in the end.
"""

import itertools
import json
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder
from energon_ext.encoders import plan_mix
from energon_ext.keyed import KeyedPermutation
from energon_ext.plan import packed_rows
from tests.mixture.slow import places_of_equals, uniform
from tests.plan.runs import SEQ_LEN, Run, numbered_documents, rows_of, write_split
from tests.plan.test_order import slow_epoch
from tests.support import LargeTokenizer, write_tokens

MAX_EPOCHS, MAX_PROCESSES = 3, 6
BLOCK_DOCS, MIXED_DOCS = 2, 6
FIRST_DOCS = 2  # of the first pack plan of a run; later ones double
ROUNDING = Fraction(1, 10**9)


# The list model -----------------------------------------------------------------------------------


class ListSource:
    """The rows of one source: a stream of documents, planned a few at a time."""

    def __init__(self, name, documents):
        self.name, self.documents = name, documents
        self.rows, self.carried = [], []  # pieces are (document, tokens)
        self.epoch = self.place = 0
        self.order = None  # of the epoch, from its first document on
        self.size = None  # documents of the epoch that began last
        self.first_was_label = False

    def has_read(self, limit):
        while self.epoch < limit and self.place == self.size:
            self.epoch, self.place, self.order = self.epoch + 1, 0, None
        return self.epoch >= limit

    def ended(self, limit):
        return not self.rows and not self.carried and self.has_read(limit)

    def take(self, limit, buffer_docs, excluded, block, subset):
        while not self.rows:
            if self.ended(limit):
                return None
            self.plan(limit, buffer_docs, excluded, block, subset)
        return self.rows.pop(0)

    def plan(self, limit, buffer_docs, excluded, block, subset):
        if self.carried and self.carried[0][0] in excluded:
            self.first_was_label = False
        pieces = [piece for piece in self.carried if piece[0] not in excluded]
        taken = self.epoch * (self.size or 0) + self.place
        room = buffer_docs - len({document for document, _ in pieces})
        wanted = max(1, min(room, max(FIRST_DOCS, taken)))
        if not self.has_read(limit):
            if self.order is None:
                self.size, mixed = len(subset), max(1, MIXED_DOCS // block)
                order = slow_epoch(self.size, f"0/{self.name}", self.epoch, block, mixed)
                self.order = [subset[place] for place in order]
            new = self.order[self.place : self.place + wanted]
            self.place += len(new)
            pieces += [(d, self.documents[d]) for d in new if d not in excluded]
        is_last = self.has_read(limit)
        rows, rest = self.cut(pieces, is_last)
        while any(are_copies(*each) for row in rows for each in itertools.combinations(row, 2)):
            earlier = [
                sum(document == pieces[other][0] for other in range(index))
                for index, (document, _) in enumerate(pieces)
            ]
            firsts = [piece for piece, count in zip(pieces, earlier) if not count]
            held = [piece for piece, count in zip(pieces, earlier) if count]
            first_rows, first_rest = self.cut(firsts, False)
            if not first_rows:
                if not is_last and max(earlier) < 2:  # the copies wait for other documents
                    rows, rest = [], pieces
                break
            self.add(first_rows)
            pieces = first_rest + held
            rows, rest = self.cut(pieces, is_last)
        self.add(rows)
        self.carried = rest
        if is_last and not rest:
            self.first_was_label = False

    def add(self, rows):
        self.rows += [[token for _, tokens in row for token in tokens] for row in rows]
        self.first_was_label = self.first_was_label or bool(rows)

    def cut(self, pieces, is_last):
        """Return the rows of a stream as lists of pieces, and the pieces left."""

        def grouped(tokens):
            groups = itertools.groupby(tokens, lambda each: each[0])
            return [(pieces[n][0], [token for _, token in group]) for n, group in groups]

        stream = [(n, token) for n, (_, tokens) in enumerate(pieces) for token in tokens]
        rows, first_was_label = [], self.first_was_label
        while len(stream) > SEQ_LEN:
            rows.append(grouped(stream[: SEQ_LEN + 1]))
            stream, first_was_label = stream[SEQ_LEN:], True
        if is_last:
            if len(stream) > first_was_label:
                rows.append(grouped(stream))
            stream = []
        return rows, grouped(stream)


def are_copies(one, other):
    """Return True if two pieces of a row are of one document and share more than a boundary."""
    (first, tokens), (second, others) = one, other
    if first != second:
        return False
    shared = len(set(tokens) & set(others))
    return tokens[0] == others[0] or tokens[-1] == others[-1] or shared > 1


class ListRun:
    """A run as a list of steps, drawn row by row."""

    def __init__(self, sources):
        self.sources = sources
        self.owed = dict.fromkeys(sources, 0.0)
        self.number = self.row = 0  # of the next step and row

    def step(self, mix, rows):
        """Return the next step that is not skipped, sorted; None if all sources have ended."""
        while True:
            drawn = self.draw(mix, rows)
            is_skipped = any(first <= self.number - 1 < stop for first, stop in mix["skip"])
            if drawn is None or not is_skipped:
                return drawn

    def draw(self, mix, rows):
        weights = {name: weight_at(w, self.number) for name, w in mix["weights"].items()}
        limits = mix["limits"]
        left = {name for name in weights if not self.sources[name].ended(limits[name])}
        missing, found, attempt = list(range(rows)), [], 0
        while missing and left:
            total = sum(Fraction(weights[name]) for name in left)
            shares = {name: Fraction(weights[name]) / total for name in sorted(left)}
            pick = self.owing if mix["rule"] == "interleave" else self.by_chance
            picked = pick(shares, [self.row + place for place in missing], attempt, sorted(weights))
            read, retry = dict.fromkeys(shares, 0), []
            for place, name in zip(missing, picked):
                options = mix["buffer"], mix["excluded"][name], mix["blocks"][name]
                subset = mix["subsets"][name]
                row = None
                if name in left:
                    row = self.sources[name].take(limits[name], *options, subset)
                if row is None:
                    left.discard(name)
                    retry.append(place)
                else:
                    found.append((tuple(row[:SEQ_LEN]), tuple(itertools.pairwise(row))))
                    read[name] += min(len(row), SEQ_LEN)
            if mix["rule"] == "interleave":
                for name, share in shares.items():
                    self.owed[name] += float(share) * sum(read.values()) - read[name]
            missing, attempt = retry, attempt + 1
        if not found:
            return None
        self.number, self.row = self.number + 1, self.row + rows
        return sorted(found)

    def owing(self, shares, numbers, attempt, members):
        """Pick by credits, like :class:`tests.plan.test_hops.ListModel`."""
        least = Fraction(1, max(2 * len(members) - 2, 2))
        equals = dict(zip(members, places_of_equals(len(members))))
        credit = {name: Fraction(self.owed[name]) / SEQ_LEN for name in shares}
        for _ in numbers:
            for name in shares:
                credit[name] += shares[name]
            due = [name for name in shares if credit[name] >= least - ROUNDING]
            turns = {
                name: math.floor((1 - least - credit[name]) / shares[name] + ROUNDING)
                if due
                else math.ceil((least - credit[name]) / shares[name] - ROUNDING)
                for name in due or shares
            }
            best = min(turns, key=lambda name: (turns[name], equals[name]))
            credit[best] -= 1
            yield best

    def by_chance(self, shares, numbers, attempt, members):
        names, ends = list(shares), list(itertools.accumulate(shares.values()))
        for number in numbers:
            chance = uniform("0/" if attempt == 0 else f"0//attempt {attempt}", number)
            yield next(name for name, end in zip(names, ends) if chance < end)


def weight_at(weight, step):
    if not isinstance(weight, dict):
        return weight
    (first, low), (last, high) = weight["linear"].items()
    return low + min(max(step - first, 0) / (last - first), 1) * (high - low)


# The chain ----------------------------------------------------------------------------------------


class Chain:
    """A random chain."""

    def __init__(self, folder, seed, max_workers, has_subsets):
        self.folder, self.rng = folder / "0", random.Random(seed)
        self.folder.mkdir()
        self.moves = random.Random(f"moves {seed}")
        self.subsets = random.Random(f"subsets {seed}") if has_subsets else None
        self.yaml_folder = "."  # in the folder of the data
        self.packing = "sequential" if seed % 3 else "bin"
        self.workers_left = max_workers if seed % 2 else 0
        self.rule = "blend" if seed % 4 > 2 else "interleave"
        self.names = [f"source{n}" for n in range(self.rng.choice([1, 3, 4, 5]))]
        self.documents = {}
        for n, name in enumerate(self.names):
            count, longest = self.rng.randint(2, 16), self.rng.choice([4, 60, 60, 150])
            self.documents[name] = numbered_documents(count, 100 + 15_000 * n, seed, longest)
            write_tokens(self.folder / name, self.documents[name], np.int32)
            if n % 2 == 0:  # as parts of a random order
                meta = {"tokenizer": LargeTokenizer().fingerprint(), "shuffled": {"seed": n}}
                (self.folder / f"{name}.meta.json").write_text(json.dumps(meta))

    def mix(self, step, is_last):
        """Return a new mix that starts at ``step``; the last one reads all sources to the end."""
        names = self.names
        if not is_last:
            fewest = max(1, len(names) - 2)
            names = sorted(self.rng.sample(names, self.rng.randint(fewest, len(names))))
        mix = {
            "rule": self.rule if self.rng.random() < 0.8 else "blend",
            "weights": {name: self.weight(step) for name in names},
            "limits": {n: MAX_EPOCHS if is_last else self.rng.choice([1, 3, 3]) for n in names},
            "buffer": self.rng.choice([1, 3, 20]),
            "excluded": {name: [] for name in names},
            "blocks": dict.fromkeys(names, 1),
            "subsets": {name: [*range(len(self.documents[name]))] for name in names},
            "skip": [],
        }
        for name in [name for name in names if name in self.names[::2]]:
            mix["blocks"][name] = self.rng.choice([1, BLOCK_DOCS, BLOCK_DOCS, 5])
        if not is_last and self.rng.random() < 0.4:
            for name in names:
                numbers = range(len(self.documents[name]))
                mix["excluded"][name] = sorted(self.rng.sample(numbers, len(numbers) // 2))
        if not is_last and self.rng.random() < 0.2:
            first = step + self.rng.randint(0, 2)
            mix["skip"] = [[first, first + self.rng.randint(1, 2)]]
        for name in names if self.subsets else ():
            every = len(self.documents[name])
            permute = KeyedPermutation(every, "subset")
            count = self.subsets.choice([every, self.subsets.randint(1, every)])
            chosen = sorted(int(permute(np.array([place]))[0]) for place in range(count))
            if {*chosen} - {*mix["excluded"][name]}:
                mix["subsets"][name] = chosen
        return mix

    def weight(self, step):
        if self.rng.random() < 0.6:
            return self.rng.choice([0.25, 1, 2, 3])
        return {"linear": {step: self.rng.choice([0.5, 2]), step + 5: self.rng.choice([0.25, 4])}}

    def move(self):
        """Move all data with its metadataset, or the metadataset alone, or both, or nothing."""
        if self.moves.random() < 0.4:
            self.folder = self.folder.rename(self.folder.with_name(f"{int(self.folder.name) + 1}"))
        self.yaml_folder = self.moves.choice([self.yaml_folder, ".", "deep", "very/deep"])

    @property
    def yaml(self):
        return self.folder / self.yaml_folder / "mix.yaml"

    def write(self, mix):
        self.yaml.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * len(self.yaml.parent.relative_to(self.folder).parts)
        entries = [
            {"path": up + name, "name": name, "weight": weight, "max_epochs": mix["limits"][name]}
            | ({"block_docs": mix["blocks"][name]} if name in self.names[::2] else {})
            | self.subset_of(name, len(mix["subsets"][name]))
            for name, weight in mix["weights"].items()
        ]
        fields = {"skip": mix["skip"]} if mix["skip"] else {}
        write_split(self.yaml, {mix["rule"]: entries}, exclude="excluded.txt", **fields)
        lines = [f"{name}:{n}\n" for name, numbers in mix["excluded"].items() for n in numbers]
        self.yaml.with_name("excluded.txt").write_text("".join(lines))

    def subset_of(self, name, count):
        every = len(self.documents[name])
        return {} if count == every else {"subset": {"documents": count}}

    def ranks_and_batch(self, rows):
        """Return ranks and a micro-batch size that divide a step."""
        ranks = self.rng.choice([r for r in range(1, 9) if rows % r == 0])
        batch = self.rng.choice([b for b in (1, 2, 3) if rows // ranks % b == 0])
        return ranks, batch

    def workers(self, ranks):
        """Return a number of workers, which may change inside a step too."""
        most = min(3, MAX_PROCESSES // ranks - 1, self.workers_left // ranks)
        workers = self.rng.randint(0, max(most, 0))
        self.workers_left -= ranks * workers
        return workers

    def run(self, mix, state, rows, ranks=1, workers=0, batch=1):
        encoder = PackedTaskEncoder(
            LargeTokenizer(), SEQ_LEN, packing=self.packing, packing_buffer_docs=mix["buffer"]
        )
        options = {"ranks": ranks, "workers": workers, "batch": batch, "rows": rows}
        run = Run(self.yaml, encoder=encoder, **options)
        return run if state is None else run.resume(state)


def contents(batches):
    """Return the tokens and trained transitions of each row that is not empty, sorted."""
    return sorted(
        (
            tuple(token for token in tokens if token),
            tuple((a, b) for a, b, weight in zip(tokens, labels, weights) if weight > 0),
        )
        for batch in batches
        for tokens, labels, weights, _ in rows_of(batch)
        if any(tokens)
    )


def stopped_anywhere(chain, mix, rows, state, expected, states):
    """Read a segment in hops over topologies; return the state at the end."""
    step, batches, is_changed = 0, [], True  # the first resume changes the mix
    while step < len(expected):
        if not batches:
            ranks, batch = chain.ranks_and_batch(rows)
        topology = ranks, chain.workers(ranks), batch
        run = chain.run(mix, state, rows, *topology)
        assert is_changed or run.state() == state
        is_changed = False
        iterators = [iter(loader) for loader in run.loaders]
        most = run.rounds * max(2, len(expected) // 3) + 1
        for _ in range(chain.rng.randint(1, most)):
            batches += [next(iterator) for iterator in iterators]
            if len(batches) == run.rounds * len(iterators):
                assert contents(batches) == expected[step], topology
                assert run.state() == states[step], topology
                step, batches = step + 1, []
            if step == len(expected):
                break
        state = run.state()
        run.close()
    return state


def check_chain(folder, seed, segments, max_workers, has_subsets=False):
    """Check one chain.

    Args:
        segments: Number of mixes.
        max_workers: Worker processes that the chain may start in total; they are slow to start.
        has_subsets: Whether mixes read nested subsets of sources, each one others.
    """
    chain = Chain(folder, seed, max_workers, has_subsets)
    model = ListRun({name: ListSource(name, docs) for name, docs in chain.documents.items()})
    state, trained, number = None, Counter(), 0
    ever_excluded = set()  # by their first tokens, also those that were outside a subset
    for segment in range(segments):
        is_last = segment == segments - 1
        mix = chain.mix(number, is_last)
        chain.move()
        chain.write(mix)
        rows = chain.rng.randint(1, 8) * chain.rng.randint(1, 3)
        rows *= 2 if is_last else chain.rng.randint(1, 2)  # few steps to the end
        reference = chain.run(mix, state, rows)
        iterator, expected, states = iter(reference.loaders[0]), [], []
        for _ in itertools.count() if is_last else range(chain.rng.randint(1, 3)):
            batches = list(itertools.islice(iterator, rows))
            if not batches:
                break
            expected.append(contents(batches))
            states.append(reference.state())
            if chain.packing == "sequential":
                assert expected[-1] == model.step(mix, rows), (segment, len(expected))
        trained.update(pair for step in expected for _, pairs in step for pair in pairs)
        for name, numbers in mix["excluded"].items():
            outside = {*range(len(chain.documents[name]))} - {*mix["subsets"][name]}
            ever_excluded |= {chain.documents[name][n][0] for n in {*numbers} | outside}
        state = stopped_anywhere(chain, mix, rows, state, expected, states)
        number = json.loads(state)["plan"]["step"] if state else 0
        assert states == [] or state == states[-1]
    check_totals(chain, trained, ever_excluded, json.loads(state)["skipped"])


def check_totals(chain, trained, ever_excluded, skipped):
    """Every transition inside a document was trained as often as the last limit says."""
    for document in itertools.chain(*chain.documents.values()):
        counts = {trained[pair] for pair in itertools.pairwise(document)}
        if document[0] in ever_excluded or skipped:
            assert max(counts, default=0) <= MAX_EPOCHS
        else:
            assert counts <= {MAX_EPOCHS}, document[0]


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    monkeypatch.setattr(plan_mix, "MAX_BUFFER_DOCS", 1)
    monkeypatch.setattr(plan_mix, "MIXED_DOCS", MIXED_DOCS)
    monkeypatch.setattr(packed_rows, "_FIRST_DOCS", FIRST_DOCS)


@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
@pytest.mark.parametrize(
    ("seed", "max_workers"),
    [
        *((seed, 2) for seed in range(10)),
        *(pytest.param(seed, 2, marks=pytest.mark.nightly) for seed in range(10, 20)),
        *(pytest.param(seed, 7, marks=pytest.mark.nightly) for seed in range(40)),
    ],
)
def test_a_chain_of_changes_and_stops_reads_what_the_list_model_reads(tmp_path, seed, max_workers):
    check_chain(tmp_path, seed, segments=4, max_workers=max_workers)


@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 63))]
)
def test_a_chain_of_changed_subsets_reads_what_the_list_model_reads(tmp_path, seed):
    """Every second one has workers."""
    segments = 5 if seed < 3 else 10
    check_chain(tmp_path, seed, segments, max_workers=2 if seed < 3 else 9, has_subsets=True)


@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
@pytest.mark.parametrize("seed", [1043, 1226, 1240])
def test_an_empty_plan_before_a_limit_does_not_begin_the_next_epoch(tmp_path, seed):
    """Blocks change after a source has ended with a plan that all its documents were left out of.

    In these chains the blocks of the ended epoch were used for the next one.
    """
    check_chain(tmp_path, seed, segments=6, max_workers=7)


@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
def test_credits_are_kept_while_a_blend_is_in_place_of_the_interleave_and_sources_move(tmp_path):
    check_chain(tmp_path, seed=1028, segments=6, max_workers=7)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::energon_ext.mixture.checks.BlendWarning")
@pytest.mark.parametrize("first", range(1000, 2000, 10))
def test_a_thousand_chains_read_what_the_list_model_reads(tmp_path, first):
    for seed in range(first, first + 10):
        (tmp_path / str(seed)).mkdir()
        check_chain(tmp_path / str(seed), seed, segments=6, max_workers=1000)
