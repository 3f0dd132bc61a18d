# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small chat templates of the families whose models call tools or reason."""

from tests.chats.jinja import (
    CALL,
    LAST_QUESTION,
    REASONING,
    TAGGED_CALLS,
    calls,
    refuses,
    template,
    tools,
)

_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_IM_PROMPT = "<|im_start|>assistant\n"
_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
#: The system message of the Qwen family, with the tools.
_IM_SYSTEM = (
    "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}\n# Functions"
    + tools("\n{{ t | tojson }}")
    + "{% endif %}<|im_end|>\n{% endif %}"
)
#: The reasoning of an answer is shown only after the last question.
_RECENT = (
    REASONING + _IM_PROMPT + "{% if loop.index0 > found.asked and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\\n') }}\n</think>\n\n{% endif %}{{ said.lstrip('\\n') }}"
)
_INST = "[INST]{% if loop.last and rules %}{{ rules }}\n\n{% endif %}{{ m.content }}[/INST]"
_RULES = (
    "{{ bos_token }}{% set rules = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if rules %}{% set messages = messages[1:] %}{% endif %}"
)
_MISTRAL_CALLS = (
    "{% if m.tool_calls %}[TOOL_CALLS][" + calls(CALL, ", ") + "]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
)

TOOLS = {
    "Llama 3.1": template(
        "<|start_header_id|>user<|end_header_id|>\n\n{% if tools and first.unused %}"
        "{% set first.unused = false %}Call one of:"
        + tools("\n{{ t | tojson }}")
        + "\n\n{% endif %}"
        "{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% if 'tool_calls' in m %}"
        + refuses("m.tool_calls | length != 1", "one call at once")
        + calls('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}')
        + "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        begin="{{ bos_token }}{% set first = namespace(unused=true) %}",
        system="<|start_header_id|>system<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
        tool="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
    ),
    "Mistral v0.3": template(
        refuses("loop.index0 > 0 and messages[loop.index0 - 1].role == 'user'", "must alternate")
        + "{% if tools and loop.index0 == found.asked %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}" + _INST.replace("loop.last", "loop.index0 == found.asked"),
        _MISTRAL_CALLS,
        None,
        begin=_RULES + LAST_QUESTION,
        tool='[TOOL_RESULTS]{"content": {{ m.content | tojson }}}[/TOOL_RESULTS]',
        other=refuses("true", "unknown role"),
    ),
    "Mistral Nemo": template(
        "[INST]{{ m.content }}[/INST]",
        _MISTRAL_CALLS,
        None,
        begin="{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}",
        system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
    ),
    "Qwen 2.5": template(
        _IM,
        "<|im_start|>assistant{% if m.content %}\n{{ m.content }}{% elif not m.tool_calls %}\n"
        "{% endif %}" + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT,
        begin=_IM_SYSTEM,
        system="{% if not loop.first %}" + _IM + "{% endif %}",
        tool=_RESULT,
    ),
    "Qwen 3 Coder": template(
        _IM,
        _IM_PROMPT
        + "{{ m.content or '' }}"
        + calls(
            "\n<tool_call>\n<function={{ c.name }}>{% for k, v in c.arguments | items %}"
            "\n<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>"
            "{% endfor %}"
            "\n</function>\n</tool_call>"
        )
        + "<|im_end|>\n",
        _IM_PROMPT,
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "Hermes": template(
        _IM,
        _IM_PROMPT + "{{ m.content }}" + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT,
        begin="{% if tools %}<|im_start|>system\nFunctions: <tools>"
        + tools("{{ t | tojson }}")
        + "</tools><|im_end|>\n{% endif %}",
        system=_IM,
        tool="<|im_start|>tool\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
    ),
    "Functionary": template(
        *["<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"][:1],
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% if m.content %}>>>all\n{{ m.content }}"
        "{% endif %}" + calls(">>>{{ c.name }}\n{{ c.arguments }}") + "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        begin="{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
        + tools("{{ t | tojson }}\n")
        + "<|eot_id|>{% endif %}",
        system="<|start_header_id|>system<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
        tool="<|start_header_id|>tool<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
    ),
    "Command R": template(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}"
        "{% if m.content %}Plan: {{ m.content }}\n{% endif %}Action: ["
        + calls('{"tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', ",\n")
        + "]{% else %}{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        begin="{{ bos_token }}{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
        + tools("{{ t | tojson }}\n")
        + "<|END_OF_TURN_TOKEN|>{% endif %}",
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
        tool="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Result: {{ m.content }}<|END_OF_TURN_TOKEN|>",
    ),
    "Granite": template(
        "<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call|>[" + calls(CALL, ", ") + "]{% endif %}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        begin="{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=1) }}"
        "<|end_of_text|>\n{% endif %}",
        system="<|start_of_role|>system<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        tool="<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
    ),
    "drops tools": template(
        _IM, _IM_PROMPT + "{{ m.content }}" + TAGGED_CALLS + "<|im_end|>\n", _IM_PROMPT, other=_IM
    ),
    "drops calls": template(_IM, _IM, _IM_PROMPT, other=_IM, begin=_IM_SYSTEM, system=""),
    "writes Python's dict": template(
        _IM,
        _IM_PROMPT
        + "{{ m.content }}"
        + calls("<tool_call>{{ c.name }} {{ c.arguments }}</tool_call>")
        + "<|im_end|>\n",
        _IM_PROMPT,
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "prints None": template(
        _IM,
        _IM_PROMPT + "{{ m.get('content') }}" + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT,
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "writes the first call only": template(
        _IM,
        _IM_PROMPT
        + "{{ m.content }}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
        + CALL
        + "{% endif %}<|im_end|>\n",
        _IM_PROMPT,
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
}

_V3_CALLS = calls(
    "<｜tool▁call▁begin｜>{{ c.name }}\n```json\n{{ '' + c.arguments }}\n```<｜tool▁call▁end｜>"
)


def _deepseek(assistant, prompt, **parts):
    return template(
        "<｜User｜>{{ m.content }}",
        f"{assistant}{{% if m.tool_calls %}}{_V3_CALLS}{{% endif %}}<｜end▁of▁sentence｜>",
        prompt,
        begin="{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}"
        "{% endfor %}{% if tools %}\n## Tools" + tools("\n{{ t | tojson }}") + "{% endif %}",
        system="",
        tool="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        **parts,
    )


REASONS = {
    "Qwen 3": template(
        _IM,
        _RECENT + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT + "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}",
        begin=_IM_SYSTEM + LAST_QUESTION,
        system="",
        tool=_RESULT,
    ),
    "Qwen 3.5": template(
        _IM,
        _RECENT + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT + "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}",
        begin=LAST_QUESTION + refuses("found.asked < 0", "no question") + _IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "QwQ": template(
        _IM,
        REASONING + _IM_PROMPT + "{{ said }}" + TAGGED_CALLS + "<|im_end|>\n",
        _IM_PROMPT + "<think>\n",
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "DeepSeek R1": _deepseek(REASONING + "<｜Assistant｜>{{ said }}", "<｜Assistant｜><think>\n"),
    "DeepSeek V3": _deepseek("<｜Assistant｜>{{ m.content or '' }}", "<｜Assistant｜>"),
    "DeepSeek V3.1": _deepseek(
        REASONING + "<｜Assistant｜></think>{{ said }}",
        "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "gpt-oss": template(
        "<|start|>user<|message|>{{ m.content }}<|end|>",
        "{% set final = namespace(follows=false) %}{% for n in messages[loop.index :] %}"
        "{% if n.role == 'assistant' and not n.tool_calls %}{% set final.follows = true %}"
        "{% endif %}{% endfor %}{% if m.thinking and not final.follows %}<|start|>"
        "assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% if m.tool_calls %}"
        + calls(
            "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary<|message|>"
            "{{ c.arguments | tojson }}<|call|>"
        )
        + "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endif %}",
        "<|start|>assistant",
        begin="<|start|>system<|message|>Today is fixed.<|end|>"
        "{% if tools or messages[0].role in ('system', 'developer') %}<|start|>developer<|message|>"
        "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% endif %}"
        "{% if tools %}"
        + tools(
            "\n// {{ t.function.description }}\ntype {{ t.function.name }} = "
            "{% for k in t.function.parameters.properties %}{{ k }} {% endfor %}"
        )
        + "{% endif %}<|end|>{% endif %}",
        tool="<|start|>functions to=assistant<|message|>{{ m.content }}<|end|>",
    ),
    "GLM": template(
        "<|user|>\n{{ m.content }}",
        REASONING + "<|assistant|>{% if thought and loop.index0 > found.asked %}\n<think>"
        "{{ thought }}</think>{% else %}\n<think></think>{% endif %}{% if said.strip() %}\n"
        "{{ said.strip() }}{% endif %}"
        + calls(
            "\n<tool_call>{{ c.name }}{% for k, v in c.arguments | items %}\n<arg_key>{{ k }}"
            "</arg_key>\n<arg_value>{{ v | tojson }}</arg_value>{% endfor %}\n</tool_call>"
        ),
        "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>"
        "{% endif %}",
        begin="[gMASK]<sop>"
        + LAST_QUESTION
        + "{% if tools %}<|system|>\n"
        + tools("{{ t | tojson }}\n")
        + "{% endif %}",
        system="<|system|>\n{{ m.content }}",
        tool="<|observation|>\n{{ m.content }}",
    ),
    "Nemotron": template(
        "<|im_start|>user\n{{ m.content }}<|im_end|>\n",
        REASONING + _IM_PROMPT + "{% if thought and loop.index0 > found.asked %}<think>\n"
        "{{ thought }}\n</think>\n{% else %}<think></think>{% endif %}{{ said.strip() }}"
        + TAGGED_CALLS
        + "<|im_end|>\n",
        _IM_PROMPT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
        "{% else %}<think>\n{% endif %}",
        begin=_IM_SYSTEM + LAST_QUESTION,
        system="",
        tool=_RESULT,
    ),
    "SmolLM3": template(
        _IM,
        _IM_PROMPT
        + "{% if m.content is string %}{{ m.content }}{% endif %}"
        + TAGGED_CALLS
        + "<|im_end|>\n",
        _IM_PROMPT + "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n{% endif %}",
        begin=_IM_SYSTEM,
        system="",
        tool=_RESULT,
    ),
    "Magistral": template(
        "[INST]{{ m.content }}[/INST]",
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
        "{{ m.content }}{% if m.tool_calls %}"
        + calls("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}")
        + "{% endif %}{{ eos_token }}",
        None,
        begin="{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}",
        system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
    ),
}
