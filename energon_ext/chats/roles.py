# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names of those who say a message."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: Names of roles in ShareGPT data.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    **{name: name for name in ("system", "developer")},
}
#: A ShareGPT role whose value is a tool call as JSON.
SHAREGPT_CALL = "function_call"
