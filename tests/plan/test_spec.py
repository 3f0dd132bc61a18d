# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run is planned again from its metadataset and the JSON in its state, by whoever asks."""

import json
import subprocess
import sys

import pytest
from megatron.energon import WorkerConfig

from energon_ext import (
    PackedTaskEncoder,
    PreferenceTaskEncoder,
    PromptTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
)
from energon_ext.encoders.load import load_mix
from energon_ext.encoders.saved_task import plan_saved
from energon_ext.encoders.splice import MultiSpliceTaskEncoder
from energon_ext.errors import ConfigError, EncoderNeededError, EnergonExtError
from energon_ext.packing import PACKERS, BestFitPacker
from energon_ext.plan.cost import COSTS, AttentionCost
from energon_ext.plan.cursor import fork_at, save_cursor, save_cursor_of_plan
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.spec import Spec
from energon_ext.plan.topology import Topology
from energon_ext.splice import MultiSpliceConfig
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.plan.runs import SEQ_LEN
from tests.plan.test_questions import KINDS, ROWS, open_loader, write, write_sources
from tests.saves import save_cursor as save_state
from tests.support import LargeTokenizer, take

BYTES = ByteTokenizer()
ANSWERED = ["chats.jsonl"]


class Fullest(BestFitPacker):
    """A packer of a user's, which carries nothing over."""

    name = "fullest"

    def __init__(self, seq_len, **options):
        super().__init__(seq_len, **{**options, "carry": 0.0})


class Squares:
    """A cost of a user's."""

    def __call__(self, lengths):
        return lengths.astype(float) ** 2


def packed(**options):
    return lambda: PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, **options)


MORE = {
    "aligned": (["a", "b"], packed(alignment=4, mask_boundary_loss=False), "blend"),
    "few documents per row": (["a", "b"], packed(packing_max_docs_per_bin=2), "interleave"),
    "balanced": (["a", "b"], packed(balance="attention", cost=AttentionCost(1.0, 2.0)), "blend"),
    "spliced by the encoder": (
        ["a", "b"],
        lambda: MultiSpliceTaskEncoder(
            LargeTokenizer(), SEQ_LEN, MultiSpliceConfig(num_docs=3, content_length=8)
        ),
        "interleave",
    ),
    "chats": (ANSWERED, lambda: SFTTaskEncoder(BYTES, SEQ_LEN), "blend"),
    "chats, long ones left out": (
        ANSWERED,
        lambda: SFTTaskEncoder(BYTES, 24, over_long="drop", train_on_eos=False),
        "blend",
    ),
    "preferences": (["pairs.jsonl"], lambda: PreferenceTaskEncoder(BYTES, SEQ_LEN), "blend"),
    "prompts": (["prompts.jsonl"], lambda: PromptTaskEncoder(BYTES), "interleave"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_sources(tmp_path_factory.mktemp("spec"))
    records = {
        "chats": lambda n: {"prompt": f"{n}?", "response": "x" * (n * 5 % 30)},
        "pairs": lambda n: {"prompt": f"{n}?", "chosen": "y" * (1 + n % 9), "rejected": "n"},
        "prompts": lambda n: {"prompt": f"{n}?"},
    }
    for name, make in records.items():
        lines = (json.dumps(make(n)) + "\n" for n in range(50))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    KINDS.update(MORE)
    yield folder
    for name in MORE:
        KINDS.pop(name)


def planned_again(path, state):
    """Plan a run as a command does, with what the state says and nothing else."""
    spec = Spec.from_json(json.loads(json.dumps(state["spec"])))
    mix, as_whole = load_mix(path, split_part="train", trusted_modules=())
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return plan_saved(mix, spec, Topology.of(config, 2, ROWS), as_whole)


def drawn(run, count):
    """Return the rows of steps with their sources and places, and the cursor after them."""
    fork, rows = run.fork(), []
    for step in take(fork.draw_steps(), count):
        for row in range(step.num_rows):
            taken, index, source = step.row(row)
            rows.append((source, taken.contents(index)))
    return rows, save_cursor_of_plan(fork)


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_both_ways_of_planning_give_the_same_steps_cursors_and_digests(folder, kind):
    path, encoder = write(folder, kind)
    loader = open_loader(path, encoder)
    take(loader, 5)
    run, state = find_blend(loader), save_cursor(find_blend(loader))
    assert state == json.loads(json.dumps(state))  # nothing converts it, as that takes long
    if kind == "samples packed by their encoder":
        with pytest.raises(EncoderNeededError, match="packer 'select_samples_to_pack', which is"):
            planned_again(path, state)
        return
    again = planned_again(path, state)
    assert again.data_digest == run.data_digest
    assert drawn(again, 30) == drawn(find_blend(open_loader(path, encoder)), 30)
    assert drawn(fork_at(again, state), 20) == drawn(fork_at(run, state), 20)


def test_a_packer_and_a_cost_of_a_user_are_known_by_the_names_they_are_registered_under(folder):
    KINDS["own"] = (
        ["a", "b"],
        packed(packing=Fullest(SEQ_LEN), balance="attention", cost=Squares()),
        "blend",
    )
    path, encoder = write(folder, "own")
    loader = open_loader(path, encoder)
    KINDS.pop("own")
    run, state = find_blend(loader), save_cursor(find_blend(loader))
    assert state["spec"]["cost"] == {"name": "tests.plan.test_spec.Squares"}
    with pytest.raises(EncoderNeededError, match="packer 'fullest', which is not registered here"):
        planned_again(path, state)
    PACKERS["fullest"] = Fullest
    try:
        assert planned_again(path, state).options.cost is None  # nobody registered it
        COSTS["squares"] = Squares
        registered = save_cursor(find_blend(open_loader(path, encoder)))
        assert registered["spec"]["cost"] == {"name": "squares"}
        again = planned_again(path, registered)
        assert (
            drawn(again, 20)
            == drawn(find_blend(open_loader(path, encoder)), 20)
            != drawn(planned_again(path, state), 20)
        )
    finally:
        PACKERS.pop("fullest"), COSTS.pop("squares", None)
    assert run.spec == Spec.from_json(state["spec"])


class Renamed(BestFitPacker):
    """A packer of a user's that keeps the name of another one."""


def attention(lengths):
    """A cost of a user's whose name is that of another one."""
    return lengths.astype(float)


def test_a_taken_name_is_refused(folder):
    with pytest.raises(ConfigError, match="a Renamed has the name 'bin' of BestFitPacker"):
        packed(packing=Renamed(SEQ_LEN))()
    for registry, added in ((PACKERS, Fullest), (COSTS, Squares)):
        with pytest.raises(ConfigError, match="the name is taken"):
            registry[next(iter(registry))] = added
    with pytest.raises(ConfigError, match="a subclass of Packer is needed"):
        PACKERS["mine"] = dict
    encoder = packed(balance="attention", cost=attention)()
    assert encoder.task().spec([], 0).cost == {"name": "tests.plan.test_spec.attention"}


def test_a_run_over_few_sources_packs_more_documents_together_than_it_did_over_many(folder):
    """The number of sources decides, so a plan counts those of its metadataset."""
    path, encoder = write(folder, "token files")
    state = save_cursor(find_blend(open_loader(path, encoder)))
    again = planned_again(path, state)
    assert state["spec"]["buffer_docs"] == 512
    assert {rows.options()["packing_buffer_docs"] for rows in again.rows} == {4096}


def test_a_run_that_reads_its_sources_once_is_planned_once(folder):
    path, _ = write(folder, "token files")
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        rows_per_step=ROWS,
        repeat=False,
        task_encoder=packed()(),
    )
    again = planned_again(path, save_cursor(dataset.run))
    steps = sum(1 for _ in dataset.run.fork().draw_steps())
    assert sum(1 for _ in again.fork().draw_steps()) == steps < 100


def test_token_files_that_the_run_cannot_read_are_refused(folder):
    for kind, words in (("samples", "reads only samples"), ("chats", "has no label weights")):
        path, encoder = write(folder, kind)
        state = save_cursor(find_blend(open_loader(path, encoder)))
        del state["spec"]["own"]["task_encoder"]
        state["spec"]["own"].pop("tokenizer", None)
        other, _ = write(folder, "token files")
        with pytest.raises(ConfigError, match=words):
            planned_again(other, state)


def test_a_splice_of_the_spec_must_be_for_a_source_of_the_metadataset(folder):
    path, encoder = write(folder, "spliced by the encoder")
    state = save_cursor(find_blend(open_loader(path, encoder)))
    state["spec"]["kinds"]["documents"]["splice"]["subflavors"] = {"part": 1}
    with pytest.raises(ConfigError, match="No source to splice among .*subflavors is {'part': 1}"):
        planned_again(path, state)


#: Runs commands, each given as JSON, where no tokenizer and no user's encoder can be imported.
ALONE = """
import json, sys
for name in ("transformers", "tokenizers", "sentencepiece", "tiktoken", "tests"):
    sys.modules[name] = None
from click.testing import CliRunner
from energon_ext.cli.main import main
for arguments in json.loads(sys.argv[1]):
    found = CliRunner().invoke(main, arguments)
    print(json.dumps([found.exit_code, found.stdout, found.stderr]))
"""


class OwnTokenizer(ByteTokenizer):
    """A tokenizer that exists in the launch script only."""

    def fingerprint(self):
        return {"kind": "of the launch script", "version": 3}


def test_commands_plan_a_chat_run_of_an_own_tokenizer_without_any_tokenizer(folder, tmp_path):
    KINDS["own"] = ANSWERED, lambda: SFTTaskEncoder(OwnTokenizer(), SEQ_LEN), "blend"
    path, encoder = write(folder, "own")
    KINDS.pop("own")
    loader = open_loader(path, encoder)
    take(loader, 6)
    save_state(tmp_path / "run", 3, loader.state_dict())
    (expected,) = take(find_blend(open_loader(path, encoder)).draw_steps(), 1)
    first = expected.row(0)

    run = tmp_path / "run"
    commands = [
        ("trace", run, path, "--step", 0, "--json"),
        ("checkpoint", "show", run),
        ("checkpoint", "diff", run, path),
        ("checkpoint", "forecast", run, path, "--steps", 9, "--json"),
        ("plan", path),
    ]
    given = json.dumps([list(map(str, each)) for each in commands])
    done = subprocess.run(
        (sys.executable, "-c", ALONE, given), capture_output=True, text=True, timeout=300
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, *_ in found] == [0] * 5, (found, done.stderr[-2000:])
    traced, shown, diff, forecast, plan = (text for _, text, _ in found)
    rows = [json.loads(line) for line in traced.splitlines()]
    assert [tuple(piece) for piece in rows[0]["contents"]] == first[0].contents(first[1])
    assert "tokenizer={'kind': 'of the launch script'" in shown and "kept" in diff
    assert json.loads(forecast.splitlines()[0]) and "100.00%" in plan


@pytest.mark.parametrize(
    "damage",
    [
        {"row_tokens": -1},
        {"row_tokens": 2**40},
        {"kinds": {"documents": {"packer": None}}},
        {"seed": "0"},
        {"pads": 1},
        {"more": 1},
        {"cost": {"name": "attention", "linear": 1, "cubic": 2}},
        {"cost": {"name": "attention", "linear": "1"}},
        {"cost": {}},
        {"kinds": {}},
        {"buffer_docs": 0},
        {"loss": {}},
    ],
)
def test_a_damaged_spec_is_refused(folder, damage):
    path, encoder = write(folder, "token files")
    state = save_cursor(find_blend(open_loader(path, encoder)))
    with pytest.raises(EnergonExtError, match="the state is damaged|a number"):
        planned_again(path, {**state, "spec": {**state["spec"], **damage}})
