# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Three ranks under gloo whose data, settings, states or packages differ: all raise one error.

Rank 0 is on one node, ranks 1 and 2 are on another one with a copy of the data.
"""

import datetime
import json
import time

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.energon import DefaultTaskEncoder

import energon_ext
from energon_ext import (
    DynamicBlendMixin,
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
)
from energon_ext.compat import default_store
from energon_ext.errors import EnergonExtError
from energon_ext.megatron import MegatronEnergonLoader, data_parallel_worker_config
from energon_ext.rl import RLDataset
from energon_ext.state.rendezvous import board_of, open_board
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.rl.prompts import Dice, prompt_dataset, write_sums
from tests.support import config, loader_for, write_dataset, write_mix, write_tokens

RANKS = 3
PATIENCE = 120.0  # of ranks that come
NODES = ("a", "b")


def write_pairs(folder, count, changed=None):
    """Write pairs of five documents; ``changed`` has its documents in another order."""
    for number in range(count):
        documents = [[number + 1] * (3 + length) for length in range(5)]
        write_tokens(folder / f"part-{number:03d}", documents[:: -1 if number == changed else 1])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Write the data of two nodes, which differ by one pair in each source but `same`."""
    root = tmp_path_factory.mktemp("nodes")
    for node in NODES:
        folder, is_other = root / node, node == "b"
        write_pairs(folder / "same", 3)
        write_pairs(folder / "few", 3, changed=1 if is_other else None)
        write_pairs(folder / "many", 66, changed=60 if is_other else None)
        write_pairs(folder / "missing", 2 if is_other else 3)
        write_dataset(folder / "text", [f"text {n}" for n in range(39 if is_other else 40)])
        (folder / "sums").mkdir()
        write_sums(folder / "sums")
        for name in ("same", "few", "many", "missing", "text"):
            write_mix(folder / f"{name}.yaml", [(name, 1)])
        write_mix(
            folder / "weights.yaml", [("same", 1), ("missing/part-001", 2 if is_other else 1)]
        )
        write_mix(folder / "two.yaml", [("same", 1), ("few", 1)])
        write_mix(folder / "sources.yaml", [("same", 1), *([("many", 1)] if is_other else [])])
    return root


# Scenarios: functions of the folder of this rank's node and the rank --------------------------


def open_loader(folder, rank, mix, seed=0, workers=0, rows=None, patience=PATIENCE, **options):
    worker = config(workers, rank, RANKS, seed)
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=4)
    dataset = get_train_dataset(
        folder / f"{mix}.yaml",
        worker_config=worker,
        batch_size=1,
        task_encoder=encoder,
        rows_per_step=rows,
    )
    return ExactDataLoader(dataset, timeout=4 * patience, **options)


def draw(loader, count=2):
    try:
        batches = [batch for _, batch in zip(range(count), loader)]
        return f"{len(batches)} batches"
    finally:
        loader.close()


def of_mix(mix, **options):
    def scenario(folder, rank):
        return draw(open_loader(folder, rank, mix, **options))

    return scenario


def of_options(**of_one):
    """Rank 2 has other options than the others."""

    def scenario(folder, rank):
        return draw(open_loader(folder, rank, "same", **(of_one if rank == 2 else {})))

    return scenario


def other_version(folder, rank):
    energon_ext.__version__, before = f"0.9.{int(rank == 2)}", energon_ext.__version__
    try:
        return draw(open_loader(folder, rank, "same"))
    finally:
        energon_ext.__version__ = before


def other_state(folder, rank):
    """Rank 1 does not restore the state of the others."""
    first = open_loader(folder, rank, "same", compare_ranks=False)
    draw(first, 4)
    loader = open_loader(folder, rank, "same")
    if rank != 1:
        loader.load_state_dict(first.state_dict())
    return draw(loader)


def same_state(folder, rank):
    first = open_loader(folder, rank, "same")
    draw(first, 4)
    loader = open_loader(folder, rank, "same")
    loader.load_state_dict(first.state_dict())
    return draw(loader)


def absent(*ranks, has_begun=False):
    """Some ranks fail before their first batch, or in it, but their processes go on."""

    def scenario(folder, rank):
        store = default_store()
        if rank in ranks:
            if has_begun:
                open_board(board_of(range(RANKS)), 1.0).post("outline", {})
            store.wait(["raised"], datetime.timedelta(seconds=PATIENCE))
            return "absent"
        try:
            return draw(open_loader(folder, rank, "same", patience=0.5))
        finally:
            if store.add("waiting", 1) == RANKS - len(ranks):
                store.set("raised", "")

    return scenario


def on_some_ranks(folder, rank):
    loader = open_loader(folder, rank, "same", compare_ranks=False)
    return draw(loader) if rank == 0 else "no loader"


def unknown_group(folder, rank):
    """The group of torch.distributed has more ranks than there are data-parallel ones."""
    dataset = get_train_dataset(
        folder / "same.yaml",
        worker_config=config(0, 0, 2),
        batch_size=1,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32),
    )
    return draw(ExactDataLoader(dataset)) if rank == 0 else "no loader"


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False


def streamed(folder, rank):
    dataset = get_train_dataset(
        folder / "text.yaml",
        worker_config=config(0, rank, RANKS),
        batch_size=1,
        task_encoder=Streamed(),
    )
    return draw(loader_for(dataset))


def model_parallel(mix, **sizes):
    """Megatron's loader on tensor-parallel rank 0 of each pipeline stage; stages draw in turn."""

    def scenario(folder, rank):
        parallel_state.initialize_model_parallel(**sizes)
        try:
            if parallel_state.get_tensor_model_parallel_rank() > 0:
                return "no loader"
            stage = parallel_state.get_pipeline_model_parallel_rank()
            store = default_store()
            if stage:  # as it gets the activations of the stage before
                store.wait([f"{stage - 1}"], datetime.timedelta(seconds=PATIENCE))
            dataset = get_train_dataset(
                folder / f"{mix}.yaml",
                worker_config=data_parallel_worker_config(0),
                batch_size=1,
                task_encoder=PackedTaskEncoder(ByteTokenizer(), 32),
            )
            loader = MegatronEnergonLoader(dataset, timeout=4 * PATIENCE)
            try:
                return draw(loader)
            finally:
                store.set(f"{stage}", "")
        finally:
            parallel_state.destroy_model_parallel()

    return scenario


def answers(folder, rank, **options):
    path = folder / "sums" / "mix.yaml"
    prompts = prompt_dataset(path, rank=rank, world_size=RANKS)
    dataset = RLDataset(prompts, Dice(), seq_len=64, rows=1, groups_per_batch=1, **options)
    for _ in range(2):
        next(dataset)
    return "2 batches"


def other_answers(folder, rank):
    return answers(folder, rank, advantages="rloo" if rank == 1 else "grpo")


SCENARIOS = {
    "healthy": of_mix("same"),
    "healthy, with workers": of_mix("same", workers=1),
    "healthy, restored": same_state,
    "healthy stages": model_parallel("same", pipeline_model_parallel_size=3),
    "healthy answers": answers,
    "few pairs": of_mix("few"),
    "many pairs": of_mix("many"),
    "missing pair": of_mix("missing"),
    "with workers": of_mix("two", workers=1),
    "streamed": streamed,
    "context parallel": model_parallel("few", context_parallel_size=3),
    "stages": model_parallel("few", pipeline_model_parallel_size=3),
    "tensor parallel": model_parallel("few", tensor_model_parallel_size=3),
    "weights": of_mix("weights"),
    "sources": of_mix("sources"),
    "seed": of_options(seed=1),
    "rows per step": of_options(rows=6),
    "answers": other_answers,
    "version": other_version,
    "state": other_state,
    "absent": absent(1, 2),
    "first absent": absent(0),
    "first ended": absent(0, has_begun=True),
    "some ranks": on_some_ranks,
    "unknown group": unknown_group,
}


def run_rank(rank, root, port, names):
    found = {}
    limit = datetime.timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, limit)
    options = {"rank": rank, "world_size": RANKS, "timeout": limit}
    for name in names:
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), **options)
        try:
            found[name] = SCENARIOS[name](root / NODES[min(rank, 1)], rank)
        except EnergonExtError as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
        dist.destroy_process_group()
    (root / f"rank{rank}.json").write_text(json.dumps(found))
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < RANKS:  # it holds the store
        time.sleep(0.01)


@pytest.fixture(scope="module")
def found(nodes):
    """Run all scenarios; return what each rank got, by the name of the scenario."""
    port = processes.free_port()
    arguments = [(rank, nodes, port, [*SCENARIOS]) for rank in range(RANKS)]
    started = [processes.start(run_rank, each, nodes / f"err{each[0]}") for each in arguments]
    codes = processes.finish(started)
    assert codes == [0] * RANKS, (nodes / "err0").read_text()[-3000:]
    of_ranks = [json.loads((nodes / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [rank[name] for rank in of_ranks] for name in SCENARIOS}


DRAWN = "2 batches"


def check_error(found, start, *parts):
    """Check that all ranks have raised the same error."""
    assert found == found[:1] * RANKS
    assert found[0].startswith(f"RankError: {start}"), found[0]
    for part in parts:
        assert part in found[0], found[0]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("healthy")])
def test_ranks_that_see_the_same_draw(name, found):
    assert found[name] == [DRAWN] * RANKS


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("few pairs", "few/part-001"),
        ("many pairs", "many/part-060"),
        ("with workers", "few/part-001"),
        ("context parallel", "few/part-001"),
    ],
)
def test_a_pair_of_equal_size_with_another_order_is_named(name, pair, found, nodes):
    check_error(
        found[name],
        "Ranks 1, 2 would read other rows than rank 0, which differs in data: ",
        f"data: {pair.split('/')[0]}: {nodes}/a/{pair} has 5 documents, 25 tokens, index ",
        "Every rank plans the whole run, so copy the data again, so that all nodes see the same",
    )


def test_a_pair_that_one_node_lacks_is_named_with_the_rank_that_has_it(found, nodes):
    path = f"{nodes}/a/missing/part-002 is only on rank 0 ("
    check_error(found["missing pair"], "Ranks 1, 2 would", f"differs in data: missing: {path}")


def test_streamed_sources_are_compared(found):
    fields = "differs in data: text:train: documents 40 on rank 0", ", 39 on rank 1"
    check_error(found["streamed"], "Ranks 1, 2 would", *fields)


def test_a_later_pipeline_stage_compares_itself_with_the_first_which_does_not_wait(found):
    first, *later = found["stages"]
    assert first == DRAWN
    for rank, error in enumerate(later, 1):
        assert error == (
            f"RankError: Rank {rank} would read other rows than rank 0, which differs in data. "
            "Every rank plans the whole run, so copy the data again, so that all nodes see the "
            "same files."
        )


def test_ranks_that_do_not_load_data_are_not_waited_for(found):
    assert found["tensor parallel"] == [DRAWN, "no loader", "no loader"]


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("weights", "Ranks 1, 2", "mix: weights of the sources. "),
        ("sources", "Ranks 1, 2", "mix: source many is only on rank 1 ("),
        ("seed", "Rank 2", "settings: seed 0 on rank 0 ("),
        ("rows per step", "Rank 2", "settings: rows_per_step 3 on rank 0 ("),
        ("answers", "Rank 1", "settings: fingerprint.advantages None on rank 0 ("),
        ("version", "Rank 2", "versions: energon_ext '0.9.0' on rank 0, '0.9.1' on rank 2. "),
        ("state", "Rank 1", "cursor: step 4 on rank 0 ("),
    ],
)
def test_other_differences_are_named_with_both_values(name, ranks, text, found):
    start = f"{ranks} would read other rows than rank 0, which differs in {text}"
    check_error(found[name], start)


def test_ranks_that_do_not_come_are_named_after_a_bounded_wait(found):
    error, *_ = found["absent"]
    assert error == (
        "RankError: Ranks 1, 2 did not draw a batch within 0.5 s of rank 0, so they cannot be "
        "compared; see their own errors. If only some of the ranks draw from this loader, create "
        "it with compare_ranks=False."
    )
    for rank, error in enumerate(found["first absent"][1:], 1):
        assert f"RankError: Rank 0 did not draw a batch within 0.5 s of rank {rank}, so" in error
    for error in found["first ended"][1:]:
        assert error == "RankError: Rank 0 has ended before it compared the ranks."


def test_some_ranks_draw_alone_if_nothing_is_compared(found):
    assert found["some ranks"] == [DRAWN, "no loader", "no loader"]


def test_ranks_of_an_unknown_group_are_not_compared(found):
    assert found["unknown group"] == [DRAWN, "no loader", "no loader"]
