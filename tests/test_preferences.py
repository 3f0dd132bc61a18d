# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Preferences as planned sources: batches, chains of topologies, refusals and the reference."""

import json
import logging
import os
from collections import Counter

import numpy as np
import pytest
import torch
from megatron.energon import stateless

from energon_ext import (
    ConfigError,
    PreferenceTaskEncoder,
    SFTTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.chats.templates import PlainChatTemplate
from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.encoders import pair_task
from energon_ext.encoders.preferences import cook_preference
from energon_ext.encoders.reference import write_reference
from energon_ext.encoders.sft import cook_dialogue
from energon_ext.errors import SampleError
from energon_ext.samples.context import encoder_context
from energon_ext.storage.claim import Part
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.rl.prompts import write_prompts
from tests.support import config, loader_for, take, write_mix, write_records

SEQ_LEN, ROWS = 96, 4
TOKENIZER = ByteTokenizer()


def pair(n):
    return {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}{'!' * (n % 7)}"}


def talk(n):
    question = [{"role": "user", "content": f"say {n}"}]
    chosen, rejected = ({"role": "assistant", "content": text} for text in (f"{n}", f"no {n}"))
    return {"chosen": [*question, chosen], "rejected": [*question, rejected]}


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Lines and a webdataset in a scheduled blend."""
    folder = tmp_path_factory.mktemp("pairs")
    write_prompts(folder / "sums.jsonl", [pair(n) for n in range(50)])
    write_records(folder / "talks", [talk(n) for n in range(40)])
    return write_mix(folder / "mix.yaml", [("sums.jsonl", {"linear": {0: 3, 8: 1}}), ("talks", 1)])


def alone(folder, records):
    write_prompts(folder / "pairs.jsonl", records)
    return write_mix(folder / "alone.yaml", [("pairs.jsonl", 1)])


def encoder(reference=None):
    return PreferenceTaskEncoder(TOKENIZER, SEQ_LEN, reference=reference)


def dataset_of(path, *, ranks=1, rank=0, workers=0, task_encoder=None, **options):
    return get_train_dataset(
        path,
        worker_config=config(workers, rank, ranks),
        batch_size=ROWS // ranks,
        rows_per_step=ROWS,
        task_encoder=task_encoder or encoder(),
        **options,
    )


def run(path, steps, ranks=1, workers=0, state=None, **options):
    """Return the pairs of each row of each step in planned order, and the state."""
    read, states = [[] for _ in range(steps)], []
    for rank in range(ranks):
        dataset = dataset_of(path, ranks=ranks, rank=rank, workers=workers, **options)
        loader = loader_for(dataset)
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in zip(read, take(loader, steps)):
            step += rows_of(batch.validate())
        states.append(loader.state_dict())
        loader.close()
    assert all(each == states[0] for each in states)
    return read, states[0]


def rows_of(batch):
    """Return the (source, chosen text, rejected text, reference) of each pair of each row."""
    rows = [[] for _ in range(batch.num_tokens // SEQ_LEN)]
    for pair_id in range(int(batch.pair_ids.max()) + 1):
        (first, second) = (batch.pair_ids == pair_id).nonzero().flatten().tolist()
        begin, end = batch.cu_seqlens[first], batch.cu_seqlens[second + 1]
        assert begin // SEQ_LEN == (end - 1) // SEQ_LEN  # never in two rows
        texts = []
        for segment, sign in ((first, 1), (second, -1)):
            part = slice(int(batch.cu_seqlens[segment]), int(batch.cu_seqlens[segment + 1]))
            weights = batch.token_weights[part]
            assert weights.unique().tolist() == sorted([0, sign])
            texts.append(TOKENIZER.decode(batch.labels[part][weights != 0]))
        column = batch.columns.get("ref_log_probs", batch.token_weights)[begin:end]
        source = batch.sources[batch.source_ids[first]]
        rows[begin // SEQ_LEN].append((source, *texts, column.tolist()))
    return rows


def test_both_answers_of_a_pair_are_trained_with_the_tokens_of_fine_tuning(tmp_path):
    records = [pair(5), talk(6)]
    dataset = dataset_of(alone(tmp_path, records * 4))
    batch = take(loader_for(dataset), 1)[0].validate()
    sft, expected = SFTTaskEncoder(TOKENIZER, SEQ_LEN), Counter()
    keys = {"__key__": "0", "__restore_key__": (), "__subflavors__": None}
    for record in (
        {"prompt": "5 + 1 =", "response": " 6"},
        {"prompt": "5 + 1 =", "response": " 5!!!!!"},
        {"messages": talk(6)["chosen"]},
        {"messages": talk(6)["rejected"]},
    ):
        document = sft.encode_document(cook_dialogue({**keys, **record}))
        expected[tuple(document.tokens.tolist()), tuple(document.label_weights.tolist())] += 1
    found = Counter()
    ends = batch.cu_seqlens.tolist()
    for begin, end, number in zip(ends, ends[1:], batch.pair_ids.tolist()):
        if number < 0:
            continue
        weights = [0.0, *batch.token_weights[begin : end - 1].abs().tolist()]
        found[tuple(batch.tokens[begin:end].tolist()), tuple(weights)] += 1
    assert {*found} == {*expected} and len(expected) == 4
    assert batch.documents_per_source() == {"pairs.jsonl": sum(found.values()) // 2}


@pytest.mark.parametrize("reference", [None, "a model"])
def test_rows_and_states_are_the_same_over_topologies_changed_in_mid_epoch(mix, reference):
    if reference is not None:
        write_reference(mix, encoder(reference), by_labels)
    options = {"task_encoder": encoder(reference)}
    expected, end = run(mix, 9, **options)
    assert len({text for step in expected for row in step for _, text, *_ in row}) > 60
    read, state = [], None
    for steps, ranks, workers in ((2, 4, 0), (3, 1, 2), (1, 2, 1), (3, 1, 0)):
        found, state = run(mix, steps, ranks, workers, state, **options)
        read += found
    assert read == expected
    assert state == end


def test_every_pair_is_read_once_an_epoch(tmp_path):
    path = alone(tmp_path, [pair(n) for n in range(60)])
    content = json.loads(path.read_text())
    content["splits"]["train"]["blend"][0]["max_epochs"] = 2
    path.write_text(json.dumps(content))
    steps = [rows_of(batch) for batch in loader_for(dataset_of(path))]
    found = Counter(text for step in steps for row in step for _, text, *_ in row)
    # Padding completes the last step, so that every pair is read.
    assert len(found) == 60 and set(found.values()) == {2}


def by_labels(batches):
    """A reference that says something else of each label and position."""
    return [-(batch.labels + batch.position_ids / 64).float() for batch in batches]


def test_the_reference_of_each_label_is_in_the_column(mix):
    task_encoder = encoder("by labels")
    write_reference(mix, task_encoder, by_labels)
    for batch in take(loader_for(dataset_of(mix, task_encoder=task_encoder)), 5):
        trained = batch.token_weights != 0
        (wanted,) = by_labels([batch])
        assert torch.equal(batch.columns["ref_log_probs"], torch.where(trained, wanted, 0.0))


class Swapping(PreferenceTaskEncoder):
    """Turns the answers of one source around before they are encoded."""

    @stateless
    def preencode_sample(self, sample):
        if self.source_key.startswith("pairs"):
            sample.conversations = sample.conversations[::-1]
        return sample


def test_the_reference_scores_what_a_run_trains(tmp_path):
    """Both answers have the same number of tokens, so counts would not tell."""
    path = alone(tmp_path, [{**pair(n), "rejected": f" {n + 2}"} for n in range(20, 40)])
    task_encoder = Swapping(TOKENIZER, SEQ_LEN, reference="by labels")
    write_reference(path, task_encoder, by_labels)
    (batch,) = take(loader_for(dataset_of(path, task_encoder=task_encoder)), 1)
    _, chosen, rejected, _ = rows_of(batch)[0][0]
    assert int(chosen.split("<")[0]) == int(rejected.split("<")[0]) + 1
    trained = batch.token_weights != 0
    assert torch.equal(batch.columns["ref_log_probs"][trained], by_labels([batch])[0][trained])


def test_a_reference_is_computed_once_in_parts_and_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(pair_task, "UNIT_PAIRS", 8)
    path = alone(tmp_path, [pair(n) for n in range(40)])
    seen = []

    def log_probs_of(batches):
        seen.append(sum(int(batch.pair_ids.max()) + 1 for batch in batches))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return by_labels(batches)

    with pytest.raises(KeyboardInterrupt):
        write_reference(path, encoder("m"), log_probs_of)
    write_reference(path, encoder("m"), log_probs_of, part=Part(0, 2))
    write_reference(path, encoder("m"), log_probs_of, part=Part(1, 2))
    assert seen == [8] * 6  # five units, of which the third was begun twice
    write_reference(path, encoder("m"), log_probs_of)
    assert len(seen) == 6
    (batch,) = take(loader_for(dataset_of(path, task_encoder=encoder("m"))), 1)
    trained = batch.token_weights != 0
    assert torch.equal(batch.columns["ref_log_probs"][trained], by_labels([batch])[0][trained])


def test_another_reference_row_length_or_file_needs_another_pass(tmp_path):
    path = alone(tmp_path, [pair(n) for n in range(9)])
    write_reference(path, encoder("m"), by_labels)
    dataset_of(path, task_encoder=encoder("m"))
    message = "pairs.jsonl: has no log-probabilities of the reference 'other'; call write_reference"
    with pytest.raises(ConfigError, match=message):
        dataset_of(path, task_encoder=encoder("other"))
    with pytest.raises(ConfigError, match="has no log-probabilities of the reference 'm'"):
        dataset_of(path, task_encoder=PreferenceTaskEncoder(TOKENIZER, 128, reference="m"))
    (tmp_path / "pairs.jsonl.idx").unlink()
    write_prompts(tmp_path / "pairs.jsonl", [pair(n) for n in range(10)])
    with pytest.raises(ConfigError, match="has no log-probabilities of the reference 'm'"):
        dataset_of(path, task_encoder=encoder("m"))


def test_a_run_continues_only_with_its_reference(mix):
    for name in ("first", "second"):
        write_reference(mix, encoder(name), by_labels)
    _, state = run(mix, 1, task_encoder=encoder("first"))
    with pytest.raises(StateMismatchError, match="reference.*first.*second"):
        run(mix, 1, state=state, task_encoder=encoder("second"))


@pytest.mark.parametrize("damage", ["cut", "zeros", "ends", "gone"])
def test_a_damaged_reference_is_refused_and_written_again(tmp_path, damage):
    path = alone(tmp_path, [pair(n) for n in range(9)])
    write_reference(path, encoder("m"), by_labels)
    (file,) = (tmp_path / DEFAULT_CACHE).glob("*/tokens/*.ref_log_probs.npy")
    whole = file.read_bytes()
    if damage == "ends":
        file = file.with_name(file.name.replace(".ref_log_probs", ".ends"))
        whole = file.read_bytes()
        np.save(file, np.load(file) + 1)
    elif damage == "cut":
        os.truncate(file, 8)
    elif damage == "zeros":
        file.write_bytes(whole[:128] + bytes(len(whole) - 128))
    else:
        file.unlink()
    message = {
        "cut": "ref_log_probs.npy: has 8 bytes; .*1 of the files in .* have been removed",
        "zeros": "under 'm' are damaged.* 1 of the files in .* damaged and have been removed",
        "ends": "under 'm' are damaged.* 1 of the files in .* damaged and have been removed",
        "gone": "no log-probabilities of the reference 'm'; call write_reference",
    }
    with pytest.raises(ConfigError, match=message[damage]):
        take(loader_for(dataset_of(path, task_encoder=encoder("m"))), 3)
    write_reference(path, encoder("m"), by_labels)
    assert file.read_bytes() == whole


def test_unusable_pairs_are_counted_and_left_out(tmp_path, caplog):
    long = {**pair(3), "chosen": " " + "4" * 90}
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    empty = {"prompt": "a", "chosen": "b", "rejected": ""}
    good = [pair(n) for n in range(20)]
    path = alone(tmp_path, [long, *good, equal, empty, {"text": "hello"}])
    with caplog.at_level(logging.INFO):
        write_reference(path, encoder("m"), by_labels)
        steps, _ = run(path, 6, task_encoder=encoder("m"))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "24 samples cannot be measured: 1, the first: Sample 21: `chosen` and `rejected`" in said
    assert "1 of 24 samples are longer than a row of 96 tokens and are skipped" in said
    found = {text for step in steps for row in step for _, text, *_ in row}
    assert len(found) == 20 and not any("444" in text for text in found)


def test_many_long_pairs_in_a_row_do_not_end_the_pass(tmp_path):
    long = [{**pair(n), "chosen": " " + "4" * 90} for n in range(120)]
    path = alone(tmp_path, [*long, pair(0)])
    write_reference(path, encoder("m"), by_labels)
    (batch,) = take(loader_for(dataset_of(path, task_encoder=encoder("m"))), 1)
    trained = batch.token_weights != 0
    assert torch.equal(batch.columns["ref_log_probs"][trained], by_labels([batch])[0][trained])


class Thinking(PlainChatTemplate):
    """Opens a block of reasoning before every answer, and drops that of earlier answers."""

    def render(self, messages, add_generation_prompt=False, enable_thinking=True, **context):
        text, last = "", len(messages) - 1
        for place, message in enumerate(messages):
            reasoning = message.get("reasoning_content", "")
            block = f"<think>\n{reasoning}\n</think>\n\n" if reasoning and place == last else ""
            text += f"{message['role']}: {block}{message['content']}\n"
        opened = "<think>\n" if enable_thinking else "<think>\n\n</think>\n\n"
        return text + (f"assistant: {opened}" if add_generation_prompt else "")

    def variables(self):
        return frozenset(["enable_thinking"])

    def fingerprint(self):
        return {"kind": "thinking"}


def encode(record, **options):
    task_encoder = PreferenceTaskEncoder(TOKENIZER, SEQ_LEN, **options)
    keys = {"__key__": "7", "__restore_key__": ("Webdataset", 7), "__subflavors__": None}
    found = task_encoder.encode_sample(cook_preference({**keys, **record}))
    return found, task_encoder.length_of(found)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [{"content": "4", "reasoning_content": "2+2"}, {"content": "5"}],
            "the prompts of `chosen` and `rejected` have different tokens; does the chat template",
        ),
        ([{"content": "4"}, {"content": [{"type": "text", "text": "4"}]}], "have the same tokens"),
    ],
)
def test_answers_that_cannot_be_compared_are_refused(answers, message):
    chosen, rejected = ([{"role": "assistant", **each}] for each in answers)
    record = {"prompt": talk(1)["chosen"][:1], "chosen": chosen, "rejected": rejected}
    with pytest.raises(SampleError, match=f"Sample 7: .*{message}"):
        encode(record, chat_template=Thinking())


def test_answers_in_several_texts_are_refused():
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    turns = [thought, {"role": "user", "content": "And 1 more?"}, thought]
    record = {"prompt": talk(1)["chosen"][:1], "chosen": turns, "rejected": [thought]}
    message = "Sample 7: `chosen`: has 2 answers that the chat template does not write into one"
    with pytest.raises(SampleError, match=message):
        encode(record, chat_template=Thinking())


def test_aligned_answers_take_whole_multiples():
    record = {"prompt": "2+2=", "chosen": "4", "rejected": "555"}
    found, length = encode(record)
    assert length == sum(map(len, found.tokens)) == 7 + 9
    found, length = encode(record, alignment=8)
    assert length == 8 + 16
    batch = aligned_batch(found)
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 24, 96]
    assert batch.pair_ids.tolist() == [0, -1, 0, -1]


def aligned_batch(found):
    task_encoder = PreferenceTaskEncoder(TOKENIZER, SEQ_LEN, alignment=8)
    with encoder_context(source_key="web", source_keys=("web",)):
        return task_encoder.batch([task_encoder.pack_selected_samples([found])]).validate()


def test_what_is_ignored_in_a_record_is_counted(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dataset_of(alone(tmp_path, [{**pair(n), "score_chosen": 0.5} for n in range(9)]))
    said = [record.getMessage() for record in caplog.records]
    for side in ("chosen", "rejected"):
        assert f"pairs.jsonl: {side}: ignored field: score_chosen: 9." in [
            message.rpartition("/")[2] for message in said
        ]


def test_a_reference_that_is_not_finite_is_refused(tmp_path):
    path = alone(tmp_path, [pair(n) for n in range(9)])
    with pytest.raises(ConfigError, match="reference 'm' has a log-probability of -inf; is the"):
        write_reference(
            path,
            encoder("m"),
            lambda batches: [torch.full((batch.num_tokens,), -torch.inf) for batch in batches],
        )


def test_pairs_that_cannot_be_planned_are_refused(tmp_path):
    path = alone(tmp_path, [pair(n) for n in range(9)])
    task_encoder = encoder()
    task_encoder.plan_samples = False
    with pytest.raises(ConfigError, match="pairs are planned by number, but plan_samples is False"):
        dataset_of(path, task_encoder=task_encoder)


def test_validation_reads_every_pair_once_and_pads_the_last_batches(tmp_path):
    write_reference(alone(tmp_path, [pair(n) for n in range(30)]), encoder("m"), by_labels)
    found = Counter()
    for rank in range(2):
        ((dataset, _),) = get_val_datasets(
            tmp_path / "pairs.jsonl",
            worker_config=config(0, rank, 2),
            batch_size=4,
            split_part="train",
            task_encoder=encoder("m"),
        )
        batches = list(loader_for(dataset))
        assert len(batches) == 2
        for batch in batches:
            assert {*batch.validate().columns} == {"ref_log_probs"}
            found.update(text for row in rows_of(batch) for _, text, *_ in row)
    assert sum(found.values()) == 30


def test_peek_shows_both_answers(mix):
    result = energon_ext(
        *("peek", mix, "--task", "preferences", "--seq-length", SEQ_LEN, "--rows", 1),
        *("--source", "talks", "--text"),
    )
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    (chosen, text), (rejected, other) = (
        (lines[n], lines[n + 1]) for n, line in enumerate(lines) if "pair 0, " in line
    )
    assert "pair 0, chosen: " in chosen and "pair 0, rejected: " in rejected
    prompt, _, answer = text.strip().partition("»")
    assert prompt.startswith("«<bos>user: say ")
    assert other.strip() == f"{prompt}» no{answer}"
    assert "batch:" not in result.stdout
    refused = energon_ext("peek", mix, "--task", "preferences", "--answers", "all")
    assert error_line(refused) == "--answers: is for chat, not for preferences."
