# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations into token files, compared with the text of the same conversations.

`prepare --chat` renders the prompt of each answer, finds the answers and writes a weight for each
token; without `--chat` it tokenizes the same rendered text. Both are measured in processor time of
one job, so the ratio is what chats cost beyond tokenizing.
"""

import contextlib
import io
import json
import os
import random
import tempfile
from pathlib import Path

from text_source import processor_seconds, texts_of
from timing import fresh_process, markdown
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from energon_ext.chats.templates import HFChatTemplate
from energon_ext.cli.prepare import prepare

#: (number of conversations, fewest and most turns of each)
INPUTS = {
    "2,000 conversations of 1 to 6 turns": (2000, 1, 6),
    "100 conversations of 50 turns": (100, 50, 50),
}
CHARACTERS = (30, 600)  # of a message
REPEATS = 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def run():
    rows = []
    with tempfile.TemporaryDirectory() as name:
        text = "".join(texts_of(16_000))
        tokenizer = write_tokenizer(Path(name) / "tokenizer", text)
        for what, (count, *turns) in INPUTS.items():
            folder = Path(name) / what.partition(" ")[0].replace(",", "")
            write_inputs(folder, tokenizer, conversations(text, count, turns))
            rows += compared(what, folder, tokenizer)
    header = ("what, input", "million tokens/s per core", "ratio")
    return markdown("Preparing chats", header, rows)


def write_tokenizer(folder, text):
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet
    )
    found.train_from_iterator([text[:1_000_000]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


def conversations(text, count, turns):
    draw = random.Random(0)

    def message(role):
        begin = draw.randrange(len(text) - CHARACTERS[1])
        content = text[begin : begin + draw.randint(*CHARACTERS)].strip()
        return {"role": role, "content": content}

    return [
        [message(role) for _ in range(draw.randint(*turns)) for role in ("user", "assistant")]
        for _ in range(count)
    ]


def write_inputs(folder, tokenizer, found):
    folder.mkdir()
    template = HFChatTemplate(tokenizer)
    lines = {
        "chats": [{"messages": messages} for messages in found],
        "text": [{"text": template.render(messages)} for messages in found],
    }
    for name, records in lines.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)


def compared(what, folder, tokenizer):
    best = {}
    for _ in range(REPEATS):
        for name in ("text", "chats"):
            found = fresh_process(timed, name, folder, tokenizer)
            best[name] = max(best.get(name, 0), found)
    return [
        (f"{name}, {what}", f"{rate:.2f}", f"{rate / best['text']:.2f}x")
        for name, rate in best.items()
    ]


def timed(name, folder, tokenizer):
    """Return million tokens per second of processor time."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    output = Path(tempfile.mkdtemp(dir=folder)) / "out"
    chat = ["--chat"] if name == "chats" else []
    options = ("--jsonl", folder / f"{name}.jsonl", "--tokenizer", tokenizer, "--val", 0)
    call = [str(each) for each in (output, *options, *chat)]
    begin = processor_seconds()
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.main(call, standalone_mode=False)
    seconds = processor_seconds() - begin
    tokens = sum(json.loads((output / "prepared.json").read_text())["tokens"].values())
    return tokens / seconds / 1e6
