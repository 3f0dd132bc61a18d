# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs of packed samples whose row length changes: each sample is read as often as before."""

import json
import random
from collections import Counter

import pytest
from megatron.energon import stateless

from energon_ext.errors import ConfigError, StateMismatchError
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import forecast
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.samples.test_planned_samples import dataset_of, run, write
from tests.samples.vision import Encoded, Packed, PackedCaptions, PlannedCaptions, write_images
from tests.saves import newest_cursor, save_cursor
from tests.support import loader_for, take, write_texts

COUNTS = {"photos": 50, "charts": 30}
EPOCHS = 6


class Sized(PackedCaptions):
    """Packs samples of 1 to 21 tokens into rows that name their source."""

    encoding_fingerprint = {"version": 2}

    def __init__(self, seq_len=40):
        self.seq_len = seq_len

    @stateless
    def encode_sample(self, sample):
        long = super().encode_sample(sample)
        return Encoded.derive_from(long, number=long.number, greys=[], noise=long.noise[4:])

    @stateless
    def pack_selected_samples(self, samples):
        packed = super().pack_selected_samples(samples)
        packed.samples = [(self.source_key, number, length) for number, length, _ in packed.samples]
        return packed


class FirstFit(Sized):
    """Packs in order of arrival and leaves the last samples for later."""

    def select_samples_to_pack(self, samples):
        rows = [[]]
        for sample in samples:
            if sum(each.total_len for each in rows[-1]) + sample.total_len > self.seq_len:
                rows.append([])
            rows[-1].append(sample)
        return rows[:-1]


def length_of(number):
    return 1 + number * 8 % 21


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longer")
    for name, count in COUNTS.items():
        write_images(folder / name, count, images=lambda number: 0)
    return folder


def mix(folder, weights, rule="interleave", epochs=EPOCHS, **fields):
    entries = [{"path": k, "weight": w, "max_epochs": epochs} for k, w in weights.items()]
    path = write(folder / "mix.yaml", {rule: entries})
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


@pytest.fixture(scope="module")
def orders(data):
    """The samples of each source over all epochs, in the order in which they are read singly."""
    found = {}
    for name, count in COUNTS.items():
        path = write(data / "alone.yaml", {"blend": [{"path": name, "max_epochs": EPOCHS}]})
        loader = loader_for(dataset_of(path, rows_per_step=1, batch_size=1))
        found[name] = [number for ((_, number, *_),) in loader]
        assert len(found[name]) == EPOCHS * count
    return found


class Model:
    """Lists of the samples read from each source, next to the real loader."""

    def __init__(self, orders):
        self.orders, self.read = orders, {name: [] for name in orders}
        self.packed = {}  # options with which each source was last packed

    def add(self, rows, seq_len):
        for row in rows:
            assert row and sum(length for *_, length in row) <= seq_len
            assert len({key for key, *_ in row}) == 1
            for key, number, length in row:
                assert length == length_of(number)
                self.read[key.split(":")[0]].append(number)

    def check_resume(self, state, names, packing):
        """Check that samples not yet drawn are repacked if the packing has changed."""
        for name in names:
            rows = next(v["rows"] for k, v in state["plan"]["sources"].items() if name in k)
            if self.packed.setdefault(name, packing) != packing:
                assert rows["carried"]["documents"] == sorted(self.at_hand(name, rows).elements())
                assert rows["taken"] is None and rows["next_row"] == 0
            self.packed[name] = packing
        self.check(state)

    def at_hand(self, name, rows):
        passed = rows["epoch"] * COUNTS[name] + rows["position"] + (rows["taken"] or 0)
        found = Counter(self.orders[name][:passed])
        found.subtract(self.read[name])
        assert min(found.values(), default=0) >= 0, "read before it was drawn, or twice"
        return found

    def check(self, state):
        """Check the counts of a state."""
        for key, counts in state["plan"]["sources"].items():
            name = key.split(":")[0]
            assert counts["documents"] == len(self.read[name])
            assert counts["tokens"] == sum(map(length_of, self.read[name]))
            self.at_hand(name, counts["rows"])

    @property
    def is_complete(self):
        return {k: sorted(v) for k, v in self.read.items()} == {
            k: sorted(v) for k, v in self.orders.items()
        }


def chain(data, orders, seed):
    """Resume with other lengths, packers, topologies and mixes; a source is absent at times."""
    rng, model, state = random.Random(seed), Model(orders), None
    for hop in range(7):
        names = rng.choice((["photos", "charts"], ["photos", "charts"], ["photos"]))
        path = mix(data, {name: rng.randint(1, 4) for name in names})
        seq_len, packer = rng.choice((21, 30, 40, 64)), PACKERS[seed % 3][hop > 3]
        ranks, workers = rng.choice(((1, 0), (2, 0), (4, 0), (1, 1)))
        if state is not None:
            loader = loader_for(dataset_of(path, encoder=packer(seq_len)))
            loader.load_state_dict(state)
            model.check_resume(loader.state_dict(), names, (seq_len, packer))
        model.packed.update(dict.fromkeys(names, (seq_len, packer)))
        read, state = run(path, rng.randint(0, 2), ranks, workers, state, encoder=packer(seq_len))
        model.add([row for step in read for row in step], seq_len)
        model.check(state)
    path = mix(data, {"photos": 1, "charts": 1})
    options = {"rows_per_step": 1, "batch_size": 1}  # so that the last rows fill their step
    loader = loader_for(dataset_of(path, encoder=packer(50), **options))
    loader.load_state_dict(state)
    model.add([row for step in loader for row in step], 50)
    model.check(loader.state_dict())
    return model


PACKERS = [(Sized, Sized), (FirstFit, FirstFit), (Sized, FirstFit)]  # before and after


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 99))]
)
def test_resumes_with_other_lengths_and_mixes_read_each_sample_once(data, orders, seed):
    assert chain(data, orders, seed).is_complete


def test_an_interleave_keeps_its_shares_when_row_length_changes(data):
    state, path = None, mix(data, {"photos": 1, "charts": 1}, epochs=99)
    for seq_len in (40, 64, 21, 100):
        _, state = run(path, 4, 1, 0, state, encoder=Sized(seq_len))
        photos, charts = (counts["tokens"] for counts in state["plan"]["sources"].values())
        assert abs(photos - charts) <= 2 * max(64, seq_len)
        (credits,) = (each["credits"] for each in state["plan"]["mixture"].values())
        assert sorted(credits.values()) == sorted([(photos - charts) / 2, (charts - photos) / 2])
    assert state["row_lengths"] == [[32, 40], [64, 64], [96, 21]]


def test_a_token_axis_counts_rows_at_their_length_when_read(data):
    """Two steps of 8 rows of 40 and one of 64: 1,152 tokens; photos alone before, charts after."""
    weights = {"photos": {"step": {0: 1, 1152: 0}}, "charts": {"step": {0: 0, 1152: 1}}}
    path = mix(data, weights, "blend", epochs=99, schedule_axis="tokens")
    read, state = [], None
    for seq_len, steps in ((40, 2), (64, 1), (64, 1), (30, 1)):
        found, state = run(path, steps, 1, 0, state, encoder=Sized(seq_len))
        read += [{key.split(":")[0] for row in step for key, *_ in row} for step in found]
    assert read == [{"photos"}] * 3 + [{"charts"}] * 2


def test_an_unchanged_resume_equals_an_uninterrupted_run(data):
    path = mix(data, {"photos": 1, "charts": 2})
    for encoder in (Sized, FirstFit):
        expected, state, read = run(path, 6, encoder=encoder())[0], None, []
        for steps in (1, 0, 3, 2):
            found, state = run(path, steps, 1, 0, state, encoder=encoder())
            read += found
        assert read == expected


# Samples that do not fit -------------------------------------------------------------------------


def too_long_for(seq_len):
    return [number for number in range(50) if length_of(number) > seq_len]


def exclude(folder, numbers):
    lines = [f'photos:train{{"caption": true}}:{number}' for number in numbers]
    (folder / "excluded.txt").write_text("\n".join(lines))
    return {"exclude": "excluded.txt"}


@pytest.mark.parametrize("encoder", [Sized, FirstFit])
def test_samples_that_no_longer_fit_are_counted_before_the_first_step(data, encoder):
    path = mix(data, {"photos": 1})
    _, state = run(path, 2, encoder=encoder(40))
    loader = loader_for(dataset_of(path, encoder=encoder(12)))
    count = len(too_long_for(12))
    assert count == 21
    with pytest.raises(
        ConfigError,
        match=f"{count} samples have more than the 12 tokens of a row, but were read in rows of 40 "
        "before; use a `seq_len` of at least 21, or `exclude` them",
    ):
        loader.load_state_dict(state)
    run(path, 1, 1, 0, state, encoder=encoder(21))


@pytest.mark.parametrize("encoder", [Sized, FirstFit])
def test_rows_may_be_too_short_for_excluded_samples(data, encoder):
    """Including those already planned; also if resumed again before the first row."""
    path, model = mix(data, {"photos": 1}), Counter()
    read, state = run(path, 2, encoder=encoder(40))
    model.update(number for step in read for row in step for _, number, _ in row)
    path = mix(data, {"photos": 1}, **exclude(data, too_long_for(12)))
    for steps in (0, 0, 2):
        read, state = run(path, steps, 2, 0, state, encoder=encoder(12))
        model.update(number for step in read for row in step for _, number, _ in row)
    loader = loader_for(dataset_of(path, encoder=encoder(12), rows_per_step=1, batch_size=1))
    loader.load_state_dict(state)
    model.update(number for (row,) in loader for _, number, _ in row)
    kept = set(range(50)) - set(too_long_for(12))
    assert {number: model[number] for number in kept} == dict.fromkeys(kept, EPOCHS)


@pytest.mark.parametrize("encoder", [Sized, FirstFit])
def test_samples_that_were_too_long_are_read_once_rows_are_longer(data, encoder):
    path, model = mix(data, {"photos": 1}), Counter()
    read, state = run(path, 1, encoder=encoder(12))
    model.update(number for step in read for row in step for _, number, _ in row)
    (source,) = state["plan"]["sources"].values()
    assert (source["rows"]["epoch"], source["rows"]["taken"]) == (0, 50), "all of one epoch"
    assert not {*model} & {*too_long_for(12)}
    loader = loader_for(dataset_of(path, encoder=encoder(40), rows_per_step=1, batch_size=1))
    loader.load_state_dict(state)
    model.update(number for (row,) in loader for _, number, _ in row)
    missed = dict.fromkeys(too_long_for(12), 1)
    assert model == {number: EPOCHS - missed.get(number, 0) for number in range(50)}


# Token files alongside --------------------------------------------------------------------------


class WithText(Sized):
    """Packs rows of text as their bytes."""

    tokenizer = ByteTokenizer()

    def pack_tokens(self, row):
        samples = [(row.source, tuple(each.tolist()), len(each)) for each in row.slices]
        return Packed(__key__=row.source, __restore_key__=(), samples=samples)


@pytest.mark.parametrize("lengths", [(40, 90, 24), (90, 30, 64)])
def test_token_files_alongside_samples_are_repacked_too(data, lengths):
    texts = [f"{number:03d}{'abcdefghij' * (number % 9)}" for number in range(120)]
    write_texts(data / "text", texts)
    entries = [{"path": path, "max_epochs": 2} for path in ("photos", "text/train")]
    path = write(data / "both.yaml", {"interleave": entries})
    read, state = [], None
    for seq_len in lengths:
        found, state = run(path, 2, 1, 0, state, encoder=WithText(seq_len))
        read += [row for step in found for row in step]
    options = {"rows_per_step": 1, "batch_size": 1}
    loader = loader_for(dataset_of(path, encoder=WithText(50), **options))
    loader.load_state_dict(state)
    read += [row for (row,) in loader]
    samples = Counter(number for row in read for key, number, _ in row if "photos" in key)
    assert samples == dict.fromkeys(range(50), 2)
    transitions = Counter(
        pair
        for row in read
        for key, part, _ in row
        if "text" in key
        for pair in zip(part, part[1:])
    )
    documents = [ByteTokenizer().encode(each) for n, each in enumerate(texts) if n % 4]
    expected = Counter(pair for each in documents for pair in zip(each, each[1:]))
    assert transitions == {pair: 2 * count for pair, count in expected.items()}


# Commands ---------------------------------------------------------------------------------------


@pytest.fixture
def saved_run(data, tmp_path):
    """A run of two steps with rows of 40 tokens and two with 64, and the rows of each step."""
    path, steps, state = mix(data, {"photos": 1, "charts": 1}), [], None
    for seq_len in (40, 64):
        read, state = run(path, 2, 1, 0, state, encoder=Sized(seq_len))
        steps += read
        save_cursor(tmp_path / "run", len(steps), state)
    return tmp_path / "run", path, steps


def test_a_trace_crosses_a_length_change_without_user_code(saved_run):
    folder, path, steps = saved_run
    for number, rows in enumerate(steps):
        result = energon_ext("trace", folder, path, "--step", number, "--json")
        assert result.exit_code == 0, result.output
        traced = [json.loads(line) for line in result.stdout.splitlines()]
        found = [[(row["source"], *each[:1]) for each in row["contents"]] for row in traced]
        assert found == [[(key, sample) for key, sample, _ in row] for row in rows]
    sample = steps[3][0][0]
    result = energon_ext("trace", folder, path, "--document", f"{sample[0]}:{sample[1]}")
    assert "step 3, row 0" in result.stdout


def test_checkpoint_diff_counts_repacked_samples(saved_run, data, orders):
    folder, path, steps = saved_run
    result = energon_ext("checkpoint", "diff", folder, path, "--seq-length", 100)
    assert result.exit_code == 0, result.output
    assert "Rows are packed differently from here on: seq_len 64, now 100." in result.output
    model = Model(orders)
    model.add([row for step in steps for row in step], 64)
    loader = loader_for(dataset_of(path, encoder=Sized(100)))
    loader.load_state_dict(newest_cursor(folder))
    for key, counts in loader.state_dict()["plan"]["sources"].items():
        count = len(+model.at_hand(key.split(":")[0], counts["rows"]))
        assert f"{key}: {count} documents not yet drawn are packed again" in result.output
    result = energon_ext("checkpoint", "diff", folder, path, "--seq-length", 20)
    assert result.exit_code == 1 and "refused: " in result.output
    assert "samples have more than the 20 tokens of a row" in result.output


def test_a_token_file_packer_is_refused_for_samples(saved_run):
    result = energon_ext("checkpoint", "diff", *saved_run[:2], "--packing", "sequential")
    assert result.exit_code == 1 and "samples keep the packer of their encoder" in result.output


@pytest.mark.parametrize("seq_len", [64, 100])
def test_a_forecast_from_a_checkpoint_matches_the_run(saved_run, seq_len):
    folder, path, _ = saved_run
    read, _ = run(path, 3, 1, 0, newest_cursor(folder), encoder=Sized(seq_len))
    result = energon_ext(
        "checkpoint", "forecast", folder, path, "--steps", 3, "--seq-length", seq_len, "--json"
    )
    assert result.exit_code == 0, result.output
    for key, source in json.loads(result.stdout)["sources"].items():
        lengths = [[n for row in step for k, _, n in row if k == key] for step in read]
        assert source["tokens"] == [sum(each) for each in lengths]
        assert source["documents"] == [len(each) for each in lengths]


def test_an_estimate_uses_the_samples_per_row(data):
    blend = find_blend(dataset_of(mix(data, {"photos": 1, "charts": 1}), encoder=Sized()))
    guess, exact = estimate(blend, 12), forecast(blend, 12)
    assert guess.tokens.sum() == pytest.approx(exact.tokens.sum(), rel=0.05)
    assert guess.documents.sum() == pytest.approx(exact.documents.sum(), rel=0.05)


# What is refused ----------------------------------------------------------------------------------


class Stale(FirstFit):
    """Packs by a length other than ``seq_len``."""

    def __init__(self, seq_len, capacity):
        super().__init__(seq_len)
        self.capacity = capacity

    def select_samples_to_pack(self, samples):
        return FirstFit(self.capacity).select_samples_to_pack(samples)


class Fixed(FirstFit):
    """Has a length that cannot be set."""

    length = 40

    def __init__(self):
        pass

    @property
    def seq_len(self):
        return self.length


class Wider(Fixed):
    length = 64


@pytest.mark.parametrize("lengths", [(40, 64), (64, 40)])
def test_a_packer_that_ignores_the_row_length_is_detected(data, lengths):
    path, (first, second) = mix(data, {"photos": 1}), lengths
    _, state = run(path, 1, encoder=Stale(first, first))
    loader = loader_for(dataset_of(path, encoder=Stale(second, second)))
    with pytest.raises(
        (ConfigError, StateMismatchError),
        match="rows of the open plan: saved|a row has .* tokens, at most 40 fit",
    ):
        loader.load_state_dict(state)


def test_a_length_that_cannot_be_set_is_named(data):
    path = mix(data, {"photos": 1})
    _, state = run(path, 1, encoder=Fixed())
    loader = loader_for(dataset_of(path, encoder=Wider()))
    with pytest.raises(ConfigError, match="Wider.seq_len: .* make it a writable attribute"):
        loader.load_state_dict(state)


def test_an_encoder_without_the_saved_packing_method_is_refused(data):
    path = mix(data, {"photos": 1})
    _, state = run(path, 1, encoder=FirstFit())
    loader = loader_for(dataset_of(path, encoder=Sized()))
    with pytest.raises(ConfigError, match="photos.*by select_samples_to_pack, which"):
        loader.load_state_dict(state)


def test_packing_cannot_begin_in_the_middle_of_a_run(data):
    path = write(data / "alone.yaml", {"blend": [{"path": "photos"}]})
    for first, second in ((PlannedCaptions(), Sized()), (Sized(), PlannedCaptions())):
        _, state = run(path, 1, encoder=first)
        loader = loader_for(dataset_of(path, encoder=second))
        with pytest.raises(StateMismatchError):
            loader.load_state_dict(state)


def test_row_length_cannot_change_within_a_step(data):
    path = mix(data, {"photos": 1})
    loader = loader_for(dataset_of(path, encoder=Sized(), batch_size=2))
    take(loader, 1)
    longer = loader_for(dataset_of(path, encoder=Sized(64), batch_size=2))
    with pytest.raises(StateMismatchError, match="seq_len: saved 40, now 64"):
        longer.load_state_dict(loader.state_dict())


class Cut(Sized):
    """Cuts samples to a row, with that length in its fingerprint."""

    @property
    def encoding_fingerprint(self):
        return {"version": 2, "seq_len": self.seq_len}

    @stateless
    def encode_sample(self, sample):
        whole = super().encode_sample(sample)
        noise = whole.noise[: self.seq_len]
        return Encoded.derive_from(whole, number=whole.number, greys=[], noise=noise)


def test_samples_whose_length_depends_on_the_row_are_refused(data):
    path = mix(data, {"photos": 1})
    _, state = run(path, 1, encoder=Cut(12))
    loader = loader_for(dataset_of(path, encoder=Cut(16)))
    with pytest.raises(StateMismatchError, match="photos.*: lengths: saved"):
        loader.load_state_dict(state)
