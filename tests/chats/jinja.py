# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts that chat templates share. In all of them ``m`` is the message that is written."""


def template(user, assistant, prompt, *, system=None, tool=None, other=None, begin="", end=""):
    """Return a template that writes each message by its role.

    A message whose role has no text here is left out, as many templates do.
    """
    roles = {"user": user, "assistant": assistant, "system": system, "tool": tool}
    branches = "".join(
        f"{{% {'elif' if number else 'if'} m.role == '{role}' %}}{text}"
        for number, (role, text) in enumerate((r, t) for r, t in roles.items() if t is not None)
    )
    otherwise = f"{{% else %}}{other}" if other is not None else ""
    last = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    loop = f"{{% for m in messages %}}{branches}{otherwise}{{% endif %}}{{% endfor %}}"
    # Jinja would remove a newline after a block.
    return (begin + loop + end + last).replace("%}\n", "%}{{ '\\n' }}")


def refuses(condition, reason):
    """Raise an exception under a condition, as templates do."""
    return f"{{% if {condition} %}}{{{{ raise_exception('{reason}') }}}}{{% endif %}}"


def calls(text, between=""):
    """Write ``text`` for each tool call ``c`` of ``m``."""
    function = "{% set c = c.function if c.function is defined else c %}"
    separator = f"{{% if not loop.first %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls or [] %}}{function}{separator}{text}{{% endfor %}}"


def tools(text):
    """Write ``text`` for each tool ``t``."""
    return f"{{% for t in tools %}}{text}{{% endfor %}}"


#: A tool call as JSON.
CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
TAGGED_CALLS = calls(f"\n<tool_call>\n{CALL}\n</tool_call>")

#: Sets ``asked`` to the number of the last message of the user.
LAST_QUESTION = (
    "{% set found = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set found.asked = loop.index0 %}{% endif %}{% endfor %}"
)

#: Sets ``thought`` and ``said`` to the reasoning of an answer and the rest of it.
REASONING = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
