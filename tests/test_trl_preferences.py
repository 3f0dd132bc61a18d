# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A hundred pairs have the loss and the gradient that TRL's DPOTrainer computes for them."""

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from energon_ext import PreferenceTaskEncoder, get_train_dataset, load_tokenizer
from energon_ext.encoders.reference import write_reference
from energon_ext.losses import dpo_loss
from tests.chats.tokenizers import WORDS, byte_bpe
from tests.rl.prompts import write_prompts
from tests.support import config, loader_for

pytestmark = pytest.mark.nightly

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS, BETA = 100, 0.3
FORMS = ("text", "whole text", "whole text of a template", "messages", "whole conversation")


def records(kind):
    """Return pairs of random words: texts or messages, without the prompt or with it."""
    rng, found = random.Random(0), []
    for _ in range(PAIRS):
        prompt, chosen, rejected = (
            " ".join(rng.choices(WORDS, k=rng.randint(1, 9))).strip() for _ in range(3)
        )
        if kind == "text":
            found.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
            continue
        if kind == "whole text":
            # Answers may begin with the same words, or within a word.
            head = f"\n\nHuman: {prompt}\n\nAssistant: {rng.choice(['', 'I say ', 'un', '1'])}"
            texts = (head + text for text in (chosen, rejected))
            found.append(dict(zip(("chosen", "rejected"), texts)))
            continue
        if kind == "whole text of a template":
            # Answers may follow a special token, which no token of them may tear, or end with one.
            head = f"<|im_start|>user\n{prompt}<|im_end|>{rng.choice(['', ' ', '<|im_start|>'])}"
            begins = rng.choices(['"', "|>", " ", "(", ""], k=2)
            ends = rng.choices(["<|im_end|>", ""], k=2)
            texts = (head + a + b + c for a, b, c in zip(begins, (chosen, rejected), ends))
            found.append(dict(zip(("chosen", "rejected"), texts)))
            continue
        question = [{"role": "user", "content": prompt}]
        answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        if kind == "whole conversation":
            found.append(dict(zip(("chosen", "rejected"), [question + each for each in answers])))
        else:
            found.append({"prompt": question, "chosen": answers[0], "rejected": answers[1]})
    return found


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    """Install TRL and what it imports into a folder of its own."""
    folder = tmp_path_factory.mktemp("trl")
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
    done = subprocess.run([*map(str, command), "trl", "accelerate"], capture_output=True)
    if done.returncode:
        pytest.skip("the packages trl and accelerate cannot be installed")
    return folder


def models(folder, vocabulary):
    """Save two small models; return them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    found = []
    for seed, name in enumerate(("policy", "ref")):
        torch.manual_seed(seed)
        found.append(LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **heads)))
        found[-1].save_pretrained(folder / name)
    return found


def log_probs_of(model, batches):
    """Return the log-probabilities of the labels, segment by segment."""
    found = []
    for batch in batches:
        ends, parts = batch.cu_seqlens.tolist(), []
        for begin, end in zip(ends, ends[1:]):
            logits = model(batch.tokens[None, begin:end]).logits[0]
            labels = batch.labels[begin:end, None]
            parts.append(torch.log_softmax(logits, -1).gather(1, labels)[:, 0])
        found.append(torch.cat(parts))
    return found


def pairs_of(batches):
    """Return the tokens of the chosen and the rejected answer of each pair, with the prompt."""
    answers = []
    for batch in batches:
        ends, tokens = batch.cu_seqlens.tolist(), batch.tokens.tolist()
        spans = zip(ends, ends[1:], batch.pair_ids.tolist())
        answers += [tokens[begin:end] for begin, end, number in spans if number >= 0]
    return [[*pair] for pair in zip(answers[::2], answers[1::2])]


@pytest.mark.parametrize(
    ("form", "bos"), [*((form, None) for form in FORMS), *((form, "<s>") for form in FORMS[:3])]
)
def test_tokens_loss_and_gradient_of_a_hundred_pairs_equal_those_of_trl(form, bos, trl, tmp_path):
    library = byte_bpe(["<|im_start|>", "<|im_end|>", "<|pad|>", *([bos] if bos else [])])
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|pad|>", bos_token=bos
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "records.json").write_text(json.dumps(records(form)))
    policy, reference = models(tmp_path, len(tokenizer))
    environment = {**os.environ, "PYTHONPATH": str(trl)}
    script = Path(__file__).with_name("trl_losses.py")
    command = [sys.executable, str(script), str(tmp_path), str(BETA)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads(done.stdout.splitlines()[-1])

    path = write_prompts(tmp_path / "pairs.jsonl", records(form))
    encoder = PreferenceTaskEncoder(
        load_tokenizer(str(tmp_path / "tokenizer")), 256, reference="ref"
    )
    with torch.no_grad():
        write_reference(path, encoder, functools.partial(log_probs_of, reference))
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=1, task_encoder=encoder, repeat=False
    )
    batches = list(loader_for(dataset))
    for kind, (loss, norm, tokens) in expected.items():
        assert sorted(pairs_of(batches)) == sorted(tokens)
        policy.zero_grad()
        losses = torch.cat(
            [
                dpo_loss(batch, log_probs, BETA, kind=kind)[batch.pair_starts() > 0]
                for batch, log_probs in zip(batches, log_probs_of(policy, batches))
            ]
        )
        assert len(losses) == PAIRS
        losses.mean().backward()
        found = torch.cat([p.grad.double().flatten() for p in policy.parameters()]).norm().item()
        assert losses.mean().item() == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert found == pytest.approx(norm, rel=1e-4)
