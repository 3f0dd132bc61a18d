# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tuning on chats: packed in Megatron and one by one in Hugging Face, the same loss."""

import json

import pytest
import torch

from energon_ext import ExactDataLoader, SFTTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import HFTokenizer
from tests.megatron.small_gpt import run_packed, small_config, small_model
from tests.support import config, write_mix

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def records():
    """Two hundred conversations: one to three turns, tools, and weights of messages."""
    found = []
    for n in range(200):
        messages, record = [], {}
        for turn in range(n % 3 + 1):
            messages.append({"role": "user", "content": f"What is {n} plus {turn}?"})
            if n % 5 == 0:
                call = {"name": "add", "arguments": json.dumps({"a": n, "b": turn})}
                calls = [{"id": "1", "type": "function", "function": call}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages.append({"role": "tool", "content": str(n + turn)})
                record["tools"] = TOOLS
            messages.append({"role": "assistant", "content": f"It is {n + turn}."})
        messages[-1]["weight"] = (1, 0.5)[n % 2]
        if n % 3 == 1:
            messages[1]["weight"] = 0
        found.append({"messages": messages, **record})
    return found


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


def hugging_face_twin(model, vocabulary):
    """Return the Llama with the weights of a small GPTModel."""
    config = model.config
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            rms_norm_eps=config.layernorm_epsilon,
            rope_theta=10_000.0,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).to(torch.float64)
    ours = {name: value for name, value in model.state_dict().items() if value is not None}
    theirs = twin.state_dict()

    def copy(name, value):
        theirs[name].copy_(value)

    copy("model.embed_tokens.weight", ours["embedding.word_embeddings.weight"])
    copy("lm_head.weight", ours["output_layer.weight"])
    copy("model.norm.weight", ours["decoder.final_layernorm.weight"])
    heads, groups = config.num_attention_heads, config.num_query_groups
    size = config.hidden_size // heads
    for number in range(config.num_layers):
        layer, prefix = f"decoder.layers.{number}", f"model.layers.{number}"
        attention = f"{layer}.self_attention"
        # Each group has its queries, then one key and one value.
        qkv = ours[f"{attention}.linear_qkv.weight"]
        qkv = qkv.view(groups, heads // groups + 2, size, -1)
        parts = {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
        for letter, part in parts.items():
            copy(f"{prefix}.self_attn.{letter}_proj.weight", part.reshape(-1, config.hidden_size))
        copy(
            f"{prefix}.self_attn.o_proj.weight", ours[f"{layer}.self_attention.linear_proj.weight"]
        )
        gate, up = ours[f"{layer}.mlp.linear_fc1.weight"].chunk(2)
        copy(f"{prefix}.mlp.gate_proj.weight", gate)
        copy(f"{prefix}.mlp.up_proj.weight", up)
        copy(f"{prefix}.mlp.down_proj.weight", ours[f"{layer}.mlp.linear_fc2.weight"])
        copy(f"{prefix}.input_layernorm.weight", ours[f"{layer}.input_layernorm.weight"])
        copy(f"{prefix}.post_attention_layernorm.weight", ours[f"{layer}.pre_mlp_layernorm.weight"])
    return twin.eval()


def unpacked_loss(twin, folder):
    """Return the weighted mean loss of transformers' own tokens, one conversation at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total = weight_sum = 0.0
    for record in records():
        messages = [{k: v for k, v in m.items() if k != "weight"} for m in record["messages"]]
        for message in messages:
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                call["function"] = {**call["function"], "arguments": arguments}
        context = {"tools": record.get("tools"), "return_dict": False}
        ids = tokenizer.apply_chat_template(messages, **context)
        weights = torch.zeros(len(ids), dtype=torch.float64)
        for index, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    messages[:index], add_generation_prompt=True, **context
                )
                answered = tokenizer.apply_chat_template(messages[: index + 1], **context)
                weights[len(prompt) : len(answered)] = message.get("weight", 1)
        with torch.no_grad():
            logits = twin(torch.tensor([ids])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += float((losses * weights[1:]).sum())
        weight_sum += float(weights[1:].sum())
    return total / weight_sum


def test_the_packed_loss_in_megatron_equals_the_unpacked_loss_in_hugging_face(
    tokenizer_folder, tmp_path
):
    lines = "".join(json.dumps(record) + "\n" for record in records())
    (tmp_path / "chats.jsonl").write_text(lines)
    tokenizer = HFTokenizer(tokenizer_folder)
    dataset = get_train_dataset(
        write_mix(tmp_path / "mix.yaml", [("chats.jsonl", 1)]),
        worker_config=config(),
        batch_size=4,
        repeat=False,
        task_encoder=SFTTaskEncoder(tokenizer, 1024),
    )
    model = small_model(small_config(layernorm_epsilon=1e-5), vocabulary=tokenizer.vocab_size)
    model = model.to(torch.float64)
    total = weight_sum = 0.0
    for batch in ExactDataLoader(dataset):
        with torch.no_grad():
            losses = run_packed(model, batch, labels=batch.labels[None])
        total += float((losses * batch.token_weights).sum())
        weight_sum += float(batch.token_weights.sum())
    twin = hugging_face_twin(model, tokenizer.vocab_size)
    assert total / weight_sum == pytest.approx(unpacked_loss(twin, tokenizer_folder), abs=1e-6)
