# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small chat templates of the families that models ship, without tools or reasoning in them.

They keep what matters to training: where a prompt ends, what ends an answer, what is rewritten,
dropped or rejected. The words in them are our own.
"""

from tests.chats.jinja import refuses, template

_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_IM_PROMPT = "<|im_start|>assistant\n"
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_ALTERNATE = refuses("(m.role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate")


def tagged(before, inside, after=""):
    return f"{before}{{% generation %}}{inside}{{% endgeneration %}}{after}"


FAMILIES = {
    "ChatML": template(_IM, _IM, _IM_PROMPT, other=_IM),
    "Zephyr": template(
        "<|user|>\n{{ m.content }}{{ eos_token }}\n",
        "<|assistant|>\n{{ m.content }}{{ eos_token }}\n",
        "<|assistant|>\n",
        system="<|system|>\n{{ m.content }}{{ eos_token }}\n",
    ),
    "Llama 2": template(
        _ALTERNATE + "{{ bos_token }}[INST] {% if loop.first and rules %}<<SYS>>\n{{ rules }}\n"
        "<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]",
        _ALTERNATE + " {{ m.content.strip() }} {{ eos_token }}",
        None,
        begin="{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}",
        other=refuses("true", "only user and assistant"),
    ),
    "Llama 3": template(
        *["<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"]
        * 2,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        begin="{{ bos_token }}",
        other=_HEADER + "{{ m.content | trim }}<|eot_id|>",
    ),
    "Mistral v0.1": template(
        _ALTERNATE + "[INST] {{ m.content }} [/INST]",
        _ALTERNATE + "{{ m.content }}{{ eos_token }}",
        None,
        begin="{{ bos_token }}",
        other=refuses("true", "only user and assistant"),
    ),
    "Gemma": template(
        _ALTERNATE + "<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n",
        _ALTERNATE + "<start_of_turn>model\n{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        begin="{{ bos_token }}",
        system=refuses("true", "no system role"),
    ),
    "Phi 3": template(
        *["<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"] * 2,
        "<|assistant|>\n",
        system="{% if m.content %}<|system|>\n{{ m.content }}<|end|>\n{% endif %}",
        # Without a prompt, it ends with the end of the text: earlier answers are shown differently.
        end="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    ),
    "Phi 4": template(
        *["<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"] * 2,
        "<|im_start|>assistant<|im_sep|>",
        system="<|im_start|>system<|im_sep|>{{ m.content }}<|im_end|>",
    ),
    "OLMo": template(
        "<|user|>\n{{ m.content }}\n",
        "<|assistant|>\n{{ m.content }}{{ eos_token }}{% if not loop.last %}\n{% endif %}",
        "<|assistant|>\n",
        system="<|system|>\n{{ m.content }}\n",
        begin="{{ bos_token }}",
    ),
    "Falcon": template(
        "User: {{ m.content.strip() }}\n\n",
        "Falcon: {{ m.content.strip() }}\n\n",
        "Falcon:",
        system="{{ m.content.strip() }}\n\n",
    ),
    "Vicuna": template(
        "USER: {{ m.content }} ",
        "ASSISTANT: {{ m.content }}{{ eos_token }}",
        "ASSISTANT:",
        system="{{ m.content }} ",
    ),
    "Alpaca": template(
        "### Instruction:\n{{ m.content }}\n\n",
        "### Response:\n{{ m.content }}{{ eos_token }}\n\n",
        "### Response:\n",
        system="{{ m.content }}\n\n",
    ),
}

TAGS = {
    "tags at the prompt's end": template(
        _IM, tagged(_IM_PROMPT, "{{ m.content }}<|im_end|>", "\n"), _IM_PROMPT, other=_IM
    ),
    "tags with the header": template(
        _IM, tagged("", _IM_PROMPT + "{{ m.content }}<|im_end|>\n"), _IM_PROMPT, other=_IM
    ),
    "tags without the end": template(
        _IM, tagged(_IM_PROMPT, "{{ m.content }}", "<|im_end|>\n"), _IM_PROMPT, other=_IM
    ),
    "tags after white space": template(
        "USER: {{ m.content }}\n",
        tagged("BOT: ", "{{ m.content }}{{ eos_token }}", "\n"),
        "BOT:",
        system="{{ m.content }}\n",
    ),
    # Earlier answers are quoted, so their prompts begin the text, and only tags say where they end.
    "tags around rewritten answers": template(
        _IM,
        tagged(
            _IM_PROMPT,
            "{{ m.content if loop.last else m.content | tojson }}<|im_end|>",
            "\n",
        ),
        _IM_PROMPT,
        other=_IM,
    ),
}

#: What templates do wrong, or unusually.
ODD = {
    "no end": template(
        "Q: {{ m.content }}\n", "A: {{ m.content }}", "A: ", system="{{ m.content }}\n"
    ),
    "an end after the last answer only": template(
        "Q: {{ m.content }}\n",
        "A: {{ m.content }}{% if loop.last %}{{ eos_token }}{% else %}\n{% endif %}",
        "A: ",
        system="{{ m.content }}\n",
    ),
    "a newline as end": template(
        "Q: {{ m.content }}\n", "A: {{ m.content }}\n", "A:", system="{{ m.content }}\n"
    ),
    "drops a system message that is not first": template(
        _IM, _IM, _IM_PROMPT, system="{% if loop.first %}" + _IM + "{% endif %}"
    ),
    "ignores add_generation_prompt": template(_IM, _IM, None, other=_IM),
    "rejects two answers in a row": template(
        _IM,
        refuses("not loop.first and messages[loop.index0 - 1].role == 'assistant'", "two answers")
        + _IM,
        _IM_PROMPT,
        other=_IM,
    ),
    "trims": template(
        *["<|{{ m.role }}|>{{ m.content | trim }}<|end|>"] * 2,
        "<|assistant|>",
        system="<|system|>{{ m.content | trim }}<|end|>",
    ),
    "escapes": template(
        *["{{ {'role': m.role, 'text': m.content} | tojson }}\n"] * 2,
        '{"role": "assistant", "text": "',
        system="{{ {'role': m.role, 'text': m.content} | tojson }}\n",
    ),
}
