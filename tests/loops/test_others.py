# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data interfaces of verl, NeMo-RL, slime and TRL.

``ENERGON_EXT_VERL``, ``ENERGON_EXT_NEMO_RL`` and ``ENERGON_EXT_SLIME`` are the folders of
checkouts; each needs the libraries that it imports. TRL is installed. Every run is stopped in the
middle, and continues with another number of ranks.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from energon_ext.loader.plan_sampler import PlanSampler
from tests.loops.records import ROWS, STEP, RecordRows, offline, write_sums

pytestmark = pytest.mark.nightly

TRL_RUN = Path(__file__).parent / "trl_run.py"


@pytest.fixture
def mix(tmp_path):
    return write_sums(tmp_path)


def checkout(variable, monkeypatch):
    if (folder := os.environ.get(variable)) is None:
        pytest.skip(f"{variable} is not set")
    monkeypatch.syspath_prepend(folder)


# verl -----------------------------------------------------------------------------------------


class VerlPrompts(torch.utils.data.Dataset):
    """What ``data.custom_cls`` names."""

    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        self.rows = RecordRows(data_files, rows=16 if config.get("validates") else ROWS)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        record = self.rows[number]
        messages = [{"role": "user", "content": record["prompt"]}]
        empty = torch.zeros(1, dtype=torch.uint8)
        return {"raw_prompt": messages, "index": number, "dummy_tensor": empty}

    def state_dict(self):
        return self.rows.state_dict()

    def load_state_dict(self, state):
        self.rows.load_state_dict(state)


def verl_trainer(mix, folder, workers, sampler=None):
    """Return a RayPPOTrainer with its loaders, whose models keep nothing."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = object.__new__(RayPPOTrainer)
    data = {
        "custom_cls": {"path": __file__, "name": "VerlPrompts"},
        "sampler": None,
        "shuffle": False,
        "train_files": str(mix),
        "val_files": str(mix),
        "train_batch_size": STEP,
        "val_batch_size": STEP,
        "dataloader_num_workers": workers,
    }
    saves = {"default_local_dir": str(folder), "default_hdfs_dir": None, "resume_mode": "auto"}
    options = {"total_epochs": 1, "total_training_steps": None, "del_local_ckpt_after_load": False}
    trainer.config = OmegaConf.create(
        {
            "data": data,
            "trainer": {**saves, **options, "esi_redundant_time": 0},
            "actor_rollout_ref": {"actor": {"checkpoint": {}}},
        }
    )
    trainer.tokenizer = trainer.processor = None
    trainer.use_critic, trainer.global_steps = False, 0
    nothing = SimpleNamespace(load_checkpoint=ignore, save_checkpoint=ignore)
    trainer.actor_rollout_wg = nothing
    trainer._create_dataloader(None, None, None, sampler)
    return trainer


def ignore(*arguments, **options):
    pass


def verl_steps(trainer, ranks, count=None):
    """Return the prompts of some steps, each divided among data-parallel ranks and put together."""
    from verl import DataProto

    read = []
    for number, batch in enumerate(trainer.train_dataloader, 1):
        parts = DataProto.from_single_dict(batch).chunk(ranks)
        assert [len(part) for part in parts] == [STEP // ranks] * ranks
        for part in parts:
            read += [messages[0]["content"] for messages in part.non_tensor_batch["raw_prompt"]]
        trainer.global_steps += 1
        if number == count:
            break
    return read


@pytest.mark.parametrize("workers", [0, 2])
def test_verls_trainer_reads_the_plan_over_a_resume_on_other_ranks(
    mix, tmp_path, monkeypatch, workers
):
    checkout("ENERGON_EXT_VERL", monkeypatch)
    first = verl_trainer(mix, tmp_path / "saved", workers)
    assert len(first.train_dataloader) == first.total_training_steps == ROWS // STEP
    read = verl_steps(first, ranks=2, count=3)
    first._save_checkpoint()

    second = verl_trainer(mix, tmp_path / "saved", workers)
    second._load_checkpoint()
    assert second.global_steps == 3
    assert read + verl_steps(second, ranks=4) == offline(mix)


def test_verls_own_dataset_is_read_in_the_order_of_a_sampler(mix, tmp_path, monkeypatch):
    """The sampler is named in the configuration, over the records of verl's RLHFDataset."""
    checkout("ENERGON_EXT_VERL", monkeypatch)
    import datasets
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.main_ppo import create_rl_sampler
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    names = ["math"] * 9 + ["code"] * 5
    rows = [
        {"prompt": [{"role": "user", "content": str(n)}], "data_source": name}
        for n, name in enumerate(names)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    own = {"class_path": f"{os.path.dirname(__file__)}/verl_sampler.py", "class_name": "Planned"}
    options = OmegaConf.create(
        {
            "sampler": own,
            "shuffle": True,
            "dataloader_num_workers": 0,
            "train_batch_size": 2,
            "filter_overlong_prompts": False,
            "cache_dir": str(tmp_path / "cache"),
        }
    )

    def new_loader():
        dataset = RLHFDataset(str(tmp_path / "train.parquet"), None, options)
        sampler = create_rl_sampler(options, dataset)
        return StatefulDataLoader(
            dataset, 2, sampler=sampler, drop_last=True, collate_fn=collate_fn
        )

    def read(loader, count=None):
        batches = [batch for _, batch in zip(range(count or 7), loader)]
        return [int(m[0]["content"]) for batch in batches for m in batch["raw_prompt"]]

    loader = new_loader()
    begin = read(loader, 3)
    state = loader.state_dict()
    again = new_loader()
    again.load_state_dict(state)
    rest = read(again, 4)
    expected = PlanSampler(names, {"math": 1, "code": 3}, rows_per_step=2)
    assert begin + rest == list(expected)
    assert read(again) == list(expected)  # the next epoch goes on


# NeMo-RL --------------------------------------------------------------------------------------


class NemoPrompts(RecordRows):
    """Gives what NeMo-RL calls a DatumSpec."""

    def __getitem__(self, number):
        record = super().__getitem__(number)
        tokens = torch.tensor([*record["prompt"].encode()])
        message = {"role": "user", "content": record["prompt"], "token_ids": tokens}
        return {
            "message_log": [message],
            "length": len(tokens),
            "extra_env_info": {"answer": record["answer"]},
            "loss_multiplier": 1.0,
            "idx": number,
            "task_name": "sums",
        }


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_nemo_rls_loader_reads_the_plan_over_a_resume_on_other_ranks(
    mix, tmp_path, monkeypatch, workers
):
    checkout("ENERGON_EXT_NEMO_RL", monkeypatch)
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.data.utils import load_dataloader_state
    from torchdata.stateful_dataloader import StatefulDataLoader

    def new_loader():
        return StatefulDataLoader(
            NemoPrompts(mix),
            batch_size=STEP,
            shuffle=False,
            collate_fn=rl_collate_fn,
            drop_last=True,
            num_workers=workers,
        )

    def read(loader, ranks, count=ROWS):
        prompts = []
        for number, batch in enumerate(loader, 1):
            parts = batch.shard_by_batch_size(ranks, batch_size=STEP)
            assert [part.size for part in parts] == [STEP // ranks] * ranks
            prompts += [log[0]["content"] for part in parts for log in part["message_log"]]
            if number == count:
                break
        return prompts

    loader = new_loader()
    assert len(loader) == ROWS // STEP
    begin = read(loader, 4, 3)
    torch.save(loader.state_dict(), tmp_path / "train_dataloader.pt")
    again = new_loader()
    load_dataloader_state(again, str(tmp_path), {"train": {"dataset_name": "sums"}})
    assert begin + read(again, 2) == offline(mix)


# slime ----------------------------------------------------------------------------------------


def test_slimes_data_source_reads_the_plan_over_a_resume(mix, tmp_path, monkeypatch):
    """The state is saved after five prompts, inside a step; then other numbers are asked for."""
    checkout("ENERGON_EXT_SLIME", monkeypatch)
    from slime.utils.misc import load_function
    from slime.utils.types import Sample

    source_class = load_function("tests.loops.slime_source.PlannedSource")
    args = SimpleNamespace(
        prompt_data=str(mix),
        rollout_shuffle=False,
        rollout_global_dataset=True,
        n_samples_per_prompt=2,
        save=str(tmp_path / "saved"),
        load=str(tmp_path / "saved"),
        buffer_filter_path=None,
    )
    source = source_class(args)
    groups = source.get_samples(2) + source.get_samples(3)
    assert all(isinstance(sample, Sample) for group in groups for sample in group)
    source.save(7)
    again = source_class(args)
    again.load(7)
    later = again.get_samples(8) + again.get_samples(27)
    assert [group[0].prompt for group in groups + later] == offline(mix)
    assert [group[0].index for group in groups + later] == [*range(0, 2 * ROWS, 2)]
    assert [sample.group_index for sample in later[0]] == [5, 5]
    assert len(again) == ROWS


# TRL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "answers"), [("sft", 1), ("grpo", 2)])
def test_trls_trainers_read_the_plan_over_a_resume_on_other_ranks(tmp_path, kind, answers):
    pytest.importorskip("trl")
    from tests.loops.trl_run import STEP, new_sampler

    def train(ranks, *arguments):
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *start, TRL_RUN, kind, tmp_path, *map(str, arguments)]
        subprocess.run(command, check=True, timeout=600, cwd=tmp_path)
        read = [
            (tmp_path / f"read_{ranks}_{rank}.txt").read_text().split() for rank in range(ranks)
        ]
        each = STEP * answers // ranks  # of a rank in a step
        steps = range(0, len(read[0]), each)
        return [int(n) for first in steps for own in read for n in own[first : first + each]]

    begin = train(1, 3)
    rest = train(2, 8, "resume")
    expected = [n for n in new_sampler() for _ in range(answers)]
    assert begin + rest == expected
