# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A split model trains on the answers of a server: one rank asks, and all have the same batches."""

import functools

import pytest
import torch
import torch.distributed as dist

from energon_ext import ConfigError
from energon_ext.errors import EnergonExtError, SamplerError
from energon_ext.megatron import create_replica_group, data_parallel_worker_config, forward_step
from energon_ext.rl import OpenAISampler, RLDataset
from tests.megatron.small_gpt import model_parallel, small_config
from tests.megatron.small_training import SGD, run_ranks, run_schedule, trainable
from tests.rl.inference_server import Server
from tests.rl.prompts import prompt_dataset, write_prompts
from tests.support import batch_hash

TENSORS = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}


def reward_by_rank(prompt, responses):
    """Reward differently on each rank, as a judge that is not deterministic would."""
    return [float(dist.get_rank() * 10 + n) for n in range(len(responses))]


def build(url, path, group, **options):
    sampler = OpenAISampler(
        url, reward_by_rank, group_size=3, max_new_tokens=3, max_retries=0, outage_seconds=0
    )
    sizes = {"seq_len": 32, "rows": 2, "groups_per_batch": 2}
    worker = data_parallel_worker_config(num_workers=0)
    loader = prompt_dataset(path, rank=worker.rank, world_size=worker.world_size)
    return RLDataset(loader, sampler, replica_group=group, **sizes, **options)


def train_on_a_server(url, path, sizes):
    """Train two steps; return hashes of the batches, steps of the synchronization and rewards."""
    with model_parallel(**sizes):
        group = create_replica_group()
        synchronized = []

        def sync_weights(step):
            gathered = torch.ones(1)
            dist.all_reduce(gathered, group=group)  # as an export of split weights does
            synchronized.append((step, int(gathered)))

        dataset = build(url, path, group, sync_weights=sync_weights)
        model, optimizer = trainable(small_config(**sizes), vocabulary=260, **SGD)
        hashes, rewards = [], []
        for _ in range(2):
            batch = next(dataset).validate()
            hashes.append(batch_hash(batch))
            rewards.append(batch.rewards.tolist())
            step_func = functools.partial(forward_step, denominator="tokens")
            run_schedule(model, [batch], step_func)
            optimizer.step()
        return {"hashes": hashes, "synchronized": synchronized, "rewards": rewards}


def failures(url, path):
    """Return the errors on this rank, and that a later call succeeds."""
    with model_parallel(**TENSORS):
        group = create_replica_group()
        rank = dist.get_rank()
        messages = []

        def fails_on_the_last_rank(step):
            if rank == 1 and not messages:
                raise OSError("disk full")

        dataset = build(url, path, group, sync_weights=fails_on_the_last_rank)
        with pytest.raises((EnergonExtError, OSError)) as error:
            next(dataset)
        messages.append(str(error.value))
        dataset.sampler.api = "sglang"  # the server forbids its path
        with pytest.raises(SamplerError) as error:
            next(dataset)
        messages.append(str(error.value))
        dataset.sampler.api = "vllm"
        messages.append(batch_hash(next(dataset)))
        other = build(url, path, group, seed=rank)
        with pytest.raises(SamplerError) as error:
            next(other)
        messages.append(str(error.value))
        return messages


def two_ranks(url, path):
    return {
        "tensors": train_on_a_server(url, path, TENSORS),
        "stages": train_on_a_server(url, path, STAGES),
        "replicas": train_on_a_server(url, path, {}),
        "failures": failures(url, path),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of both ranks, and the prompts that the server was asked for."""
    folder = tmp_path_factory.mktemp("replica")
    path = write_prompts(folder / "prompts.jsonl", [{"prompt": f"{n}?"} for n in range(40)])
    server = Server()
    server.forbidden_path = "/generate"
    ranks = run_ranks(2, functools.partial(two_ranks, server.url, path), folder)
    server.stop()
    return ranks, server


@pytest.mark.parametrize("layout", ["tensors", "stages"])
def test_ranks_of_a_model_have_the_answers_that_the_first_one_asked_for(found, layout):
    (first, second), _ = found
    assert first[layout] == second[layout]
    assert first[layout]["synchronized"] == [[0, 2], [1, 2]]
    assert max(map(max, first[layout]["rewards"])) == 2  # those of rank 0


def test_replicas_ask_for_themselves(found):
    (first, second), _ = found
    assert first["replicas"]["hashes"] != second["replicas"]["hashes"]
    assert first["replicas"]["synchronized"] == [[0, 1], [1, 1]]


def test_each_prompt_is_asked_once_for_a_replica(found):
    """Two steps of each layout: two prompts a call, one call a step."""
    (first, _), server = found
    asked = [tuple(body["prompt"]) for _, _, body in server.requests if "prompt" in body]
    assert len(asked) == 4 + 4 + 2 * 4 + 2


def test_a_failure_on_one_rank_ends_the_call_on_all(found):
    (first, second), _ = found
    assert first["failures"][0] == "On rank 1: OSError: disk full"
    assert second["failures"][0] == "disk full"
    assert "answered status 403" in first["failures"][1]
    assert second["failures"][1].startswith("On rank 0: Prompt ")
    assert first["failures"][2] == second["failures"][2]
    for messages in (first["failures"], second["failures"]):
        assert "ranks of a replica_group ask for different prompts" in messages[3]


def test_a_sampler_whose_ranks_sample_together_needs_no_group(tmp_path):
    class Together:
        def sample_and_score_batch(self, prompts, seeds):
            return []

        def agree(self, status):
            return status

    path = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    sizes = {"seq_len": 32, "rows": 2, "groups_per_batch": 2}
    with pytest.raises(ConfigError, match="replica_group: the ranks of a Together sample togeth"):
        RLDataset(prompt_dataset(path), Together(), replica_group=object(), **sizes)
