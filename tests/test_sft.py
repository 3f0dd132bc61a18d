# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From conversations to packed batches with loss on the answers, through Energon loaders."""

import json
from collections import Counter

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import (
    ConfigError,
    SFTTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.chats.records import Conversation
from energon_ext.encoders.sft import Dialogue, cook_dialogue
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer
from tests.support import (
    batch_hash,
    config,
    loader_for,
    take,
    write_mix,
    write_records,
    write_tokens,
    write_weights,
)

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "22"},
    {"role": "user", "content": "never answered"},
]
IDENTITY = {"__key__": "chats/7", "__restore_key__": (), "__subflavors__": None}


def pair(prompt, response):
    return cook_dialogue({**IDENTITY, "prompt": prompt, "response": response})


def dialogue(messages):
    return Dialogue(**IDENTITY, conversation=Conversation(messages))


def messages_from(*roles):
    return [{"role": role, "content": "x"} for role in roles]


def trained_text(document, tokenizer):
    return tokenizer.decode(document.tokens[document.label_weights > 0])


def prepare_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
    return path


def load(path, *, repeat=False, batch_size=1, seq_len=32, **options):
    encoder = SFTTaskEncoder(ByteTokenizer(), seq_len, packing_buffer_docs=4, **options)
    return get_train_dataset(
        path,
        worker_config=config(),
        batch_size=batch_size,
        shuffle_buffer_size=None,
        repeat=repeat,
        task_encoder=encoder,
    )


def answers_in(batches):
    """Return the decoded trained labels of each segment."""
    found = []
    for batch in batches:
        batch.validate()
        for start, end, source in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.source_ids):
            if source >= 0:
                trained = batch.token_weights[start:end] > 0
                found.append(ByteTokenizer().decode(batch.labels[start:end][trained]))
    return sorted(found)


@pytest.mark.parametrize("prepare", [prepare_jsonl, write_records])
def test_only_responses_are_trained_in_both_formats(tmp_path, prepare):
    records = [{"prompt": f"say {n}: ", "response": f"<{n}>"} for n in range(9)]
    records += [{"messages": TURNS[1:3]}, {"messages": TURNS[1:5]}]
    prepare(tmp_path / "pairs.jsonl", records)
    mix = write_mix(tmp_path / "mix.yaml", [("pairs.jsonl", 1)])
    batches = list(loader_for(load(mix, seq_len=64)))
    expected = [f"<{n}>" for n in range(9)] + [" 1\n", " 1\n 22\n"]
    assert answers_in(batches) == sorted(expected)


def test_a_prompt_of_three_tokens_masks_the_labels_within_it(tmp_path):
    # bos, "ab" | "c", eos: the prompt is 3 of 5 tokens
    prepare_jsonl(tmp_path / "one.jsonl", [{"prompt": "ab", "response": "c"}])
    (batch,) = loader_for(load(tmp_path / "one.jsonl", seq_len=5))
    assert batch.tokens.tolist() == [1, 101, 102, 103, 2]
    assert batch.labels.tolist()[:4] == [101, 102, 103, 2]
    assert batch.token_weights.tolist() == [0, 0, 1, 1, 0]


def test_every_answer_of_a_conversation_is_trained_and_nothing_else():
    tokenizer = ByteTokenizer()
    document = SFTTaskEncoder(tokenizer, 128).encode_document(dialogue(TURNS))
    text = "system: Be brief.\nuser: one\nassistant: 1\nuser: two\nassistant: 22\n"
    assert tokenizer.decode(document.tokens) == text
    assert trained_text(document, tokenizer) == " 1\n 22\n"
    assert document.tokens[[0, -1]].tolist() == [1, 2]
    assert document.label_weights[[0, -1]].tolist() == [0, 1]


def test_a_token_file_written_with_another_chat_template_is_refused(tmp_path):
    write_tokens(tmp_path / "chat", [[1, 101, 102, 2]] * 9)
    write_weights(tmp_path / "chat", [[0, 0, 1, 1]] * 9)
    path = tmp_path / "chat.meta.json"
    meta = json.loads(path.read_text())
    mix = write_mix(tmp_path / "mix.yaml", [("chat", 1)])
    load(mix)
    meta["chat_template"] = {"kind": "hf", "sha256": "5"}
    path.write_text(json.dumps(meta))
    message = (
        "chat: written with a different chat template, but plain is used to read it .kind hf, now"
    )
    with pytest.raises(ConfigError, match=message):
        load(mix)


def test_a_saved_run_is_planned_again_without_its_chat_template(hf_folder, tmp_path):
    tokenizer = HFTokenizer(hf_folder)
    encoder = SFTTaskEncoder(tokenizer, 256)
    records = [{"messages": TURNS[1:5]}] * 9
    write_conversations(tmp_path / "chat", records, encoder, meta=encoder.token_file_meta())
    mix = write_mix(tmp_path / "mix.yaml", [("chat", 1)])

    def dataset(task_encoder):
        return get_train_dataset(
            mix, worker_config=config(), batch_size=1, task_encoder=task_encoder
        )

    loader = loader_for(dataset(encoder))
    take(loader, 2)
    own = loader.state_dict()["spec"]["own"]
    assert own["chat_template"] == encoder.chat_template.fingerprint()
    assert own["tokenizer"] == tokenizer.fingerprint()


@pytest.mark.parametrize("over_long", ["cut", "error"])
def test_a_sample_is_encoded_whole_whatever_the_row_length(over_long):
    encoder = SFTTaskEncoder(ByteTokenizer(), 8, over_long=over_long)
    document = encoder.encode_document(pair("abc", "d" * 50))
    assert document.tokens.tolist() == [1, 101, 102, 103] + [104] * 50 + [2]
    assert document.label_weights.tolist() == [0, 0, 0, 0] + [1] * 51


def test_over_long_samples_are_cut_in_rows_and_keep_a_trained_label(tmp_path, caplog):
    # BOS and 7 prompt tokens leave one place of nine for the first token of the response.
    pairs = [("abc", "d" * 50), ("a" * 7, "dd"), ("a" * 8, "dd"), ("ab", "ef")]
    path = tmp_path / "chats.jsonl"
    prepare_jsonl(path, [{"prompt": prompt, "response": response} for prompt, response in pairs])
    answers = answers_in(loader_for(load(path, seq_len=8)))
    assert sorted(answers) == sorted(["d" * 5, "d", "ef"])
    assert "1 of 4 documents have no trained label in their first 9 tokens" in caplog.text
    # The cached tokens are independent of row length and trained labels.
    answers = answers_in(loader_for(load(path, seq_len=64, train_on_eos=False)))
    assert sorted(answers) == sorted(response for _, response in pairs)
    assert len([*(tmp_path / ".energon_ext_cache").iterdir()]) == 1


@pytest.mark.parametrize("over_long", ["drop", "error"])
def test_over_long_samples_are_left_out_and_counted(over_long, tmp_path, caplog):
    records = [{"prompt": "abc", "response": answer} for answer in ("defg", "defgh", "d")]
    prepare_jsonl(tmp_path / "chats.jsonl", records)
    answers = answers_in(loader_for(load(tmp_path / "chats.jsonl", seq_len=8, over_long=over_long)))
    assert answers == ["d", "defg"]
    assert "1 of 3 documents have more than the 9 tokens of a row and are left out" in caplog.text
    assert "the first is chats.jsonl:1" in caplog.text
    assert len(answers_in(loader_for(load(tmp_path / "chats.jsonl", over_long=over_long)))) == 3


def test_a_hundred_over_long_samples_in_a_row_stop_a_run_on_request(tmp_path):
    lengths = [3, *[9] * 99, 3, *[9] * 100]
    records = [{"prompt": "", "response": "x" * length} for length in lengths]
    prepare_jsonl(tmp_path / "chats.jsonl", records[:150])
    assert answers_in(loader_for(load(tmp_path / "chats.jsonl", seq_len=8, over_long="error")))
    prepare_jsonl(tmp_path / "chats.jsonl", records)
    with pytest.raises(ConfigError, match="100 documents in a row, up to document 200, have more"):
        load(tmp_path / "chats.jsonl", seq_len=8, over_long="error")
    assert answers_in(loader_for(load(tmp_path / "chats.jsonl", seq_len=8, over_long="drop")))


def test_a_sample_without_trained_labels_is_skipped(tmp_path, caplog):
    records = [{"prompt": "abc", "response": answer} for answer in ("", "d")]
    prepare_jsonl(tmp_path / "chats.jsonl", records)
    assert answers_in(loader_for(load(tmp_path / "chats.jsonl", train_on_eos=False))) == ["d"]
    assert "1 of 2 documents have no trained label" in caplog.text
    with pytest.raises(SampleError, match="the answers have no tokens"):
        bare = ByteTokenizer(add_bos=False, add_eos=False)
        SFTTaskEncoder(bare, 8, answer_end="allow").encode_document(pair("", "d"))


def test_bad_samples_are_reported_by_name_and_skipped(tmp_path, capsys, caplog):
    """The log names the first bad sample, at DEBUG all of them; nothing is printed."""
    caplog.set_level("DEBUG", "energon_ext")
    bad = [
        {"prompt": "no answer"},
        {"messages": messages_from("user")},
        {"prompt": 3, "response": "x"},
    ]
    good = [{"prompt": f"{n}?", "response": f"{n}!"} for n in range(5)]
    prepare_jsonl(tmp_path / "mixed.jsonl", [*good, *bad])
    assert answers_in(loader_for(load(tmp_path / "mixed.jsonl"))) == [f"{n}!" for n in range(5)]
    assert capsys.readouterr().out == ""
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert (
        "mixed.jsonl: 3 of 8 samples cannot be tokenized: 1, the first: Sample 5: needs" in warning
    )
    reported = caplog.text
    assert "has ['prompt']" in reported
    assert "Sample 6: no assistant message" in reported
    assert "Sample 7: `prompt` must be text or a list of messages" in reported


# From token files ---------------------------------------------------------------------------------

RECORDS = [{"prompt": f"say {n}: ", "response": f"<{n}>" * (n % 5 + 1)} for n in range(60)] + [
    {"messages": [{**turn, "content": f"{turn['content']} {n}"} for turn in TURNS[1:5]]}
    for n in range(30)
]


def write_conversations(prefix, records, encoder, scale=1.0, meta=None):
    """Write the files that `energon-ext prepare --chat` would write for the records."""
    samples = [cook_dialogue({**IDENTITY, "json": record}) for record in records]
    documents = [encoder.encode_document(sample) for sample in samples]
    write_tokens(prefix, [document.tokens.tolist() for document in documents])
    weights = [document.label_weights * scale for document in documents]
    write_weights(prefix, weights, "uint8" if scale == 1 else "float32")
    if meta is not None:
        path = prefix.with_name(f"{prefix.name}.meta.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **meta}))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """The same conversations as text and as a token file."""
    folder = tmp_path_factory.mktemp("conversations")
    prepare_jsonl(folder / "text.jsonl", RECORDS)
    write_conversations(folder / "tokens", RECORDS, SFTTaskEncoder(ByteTokenizer(), 64))
    return folder


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_token_file_trains_the_same_as_the_text_of_its_conversations(conversations, ranks):
    def segments(path):
        """Count the tokens, labels and weights of each conversation.

        The last position of a conversation is not trained, and missing in a full row.
        """
        found = Counter()
        mix = write_mix(conversations / "train.yaml", [(path, 1)])
        for rank in range(ranks):
            dataset = get_train_dataset(
                mix,
                worker_config=config(0, rank, ranks),
                batch_size=2,
                repeat=False,
                task_encoder=SFTTaskEncoder(ByteTokenizer(), 64, packing_buffer_docs=8),
            )
            for batch in loader_for(dataset):
                for start, end, source in zip(
                    batch.cu_seqlens, batch.cu_seqlens[1:], batch.source_ids
                ):
                    end = int(end) - int(batch.token_weights[end - 1] == 0)
                    fields = (batch.tokens, batch.labels, batch.token_weights)
                    parts = tuple(tuple(field[start:end].tolist()) for field in fields)
                    found[parts] += int(source >= 0)
        return +found

    expected = segments("text.jsonl")
    assert expected.total() == len(RECORDS)
    assert segments("tokens") == expected


def test_token_files_written_with_other_answers_than_asked_for_are_refused(tmp_path):
    written = SFTTaskEncoder(ByteTokenizer(), 64, answers="last")
    write_conversations(tmp_path / "chat", RECORDS[:9], written, meta=written.token_file_meta())
    mix = write_mix(tmp_path / "mix.yaml", [("chat", 1)])
    assert load(mix) and load(mix, answers="last")
    with pytest.raises(ConfigError, match="answers: 'all' found, but .* was written with 'last'"):
        load(mix, answers="all")


def test_a_token_file_without_weights_is_refused(tmp_path, conversations):
    write_tokens(tmp_path / "plain", [[1, 101, 102, 2]] * 9)
    message = "plain has no label weights, .* write it with `energon-ext prepare --chat`, or use a"
    for names in (["plain"], [conversations / "tokens", "plain"]):
        mix = write_mix(tmp_path / "mix.yaml", [(name, 1) for name in names])
        with pytest.raises(ConfigError, match=message):
            load(mix)
        with pytest.raises(ConfigError, match=message):
            get_val_datasets(
                write_mix(tmp_path / "val.yaml", [(name, 1) for name in names], split="val"),
                worker_config=config(),
                batch_size=1,
                task_encoder=SFTTaskEncoder(ByteTokenizer(), 32),
            )


def test_weights_between_0_and_1_reach_the_loss(tmp_path):
    write_conversations(
        tmp_path / "halves", RECORDS, SFTTaskEncoder(ByteTokenizer(), 64), scale=0.25
    )
    mix = write_mix(tmp_path / "mix.yaml", [("halves", 1)])
    trained = [weight for b in loader_for(load(mix, seq_len=64)) for weight in b.token_weights]
    assert {float(weight) for weight in trained} == {0.0, 0.25}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_weighted_token_file_resumes_exactly(conversations, num_workers):
    mix = write_mix(conversations / "resume.yaml", [("tokens", 1)])

    def loader(num_workers=num_workers):
        encoder = SFTTaskEncoder(ByteTokenizer(), 64)
        return loader_for(
            get_train_dataset(
                mix, worker_config=config(num_workers), batch_size=2, task_encoder=encoder
            )
        )

    reference = [batch_hash(batch) for batch in take(loader(num_workers=0), 40)]
    for done in (1, 17, 30) if num_workers == 0 else (17,):
        first = loader()
        take(first, done)
        second = loader()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [batch_hash(batch) for batch in take(second, 40 - done)] == reference[done:]


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="over_long: 'keep' found, one of cut, drop, error"):
        SFTTaskEncoder(ByteTokenizer(), 8, over_long="keep")
