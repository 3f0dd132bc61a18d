# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations: from a record to tokens and weights.

1. ``records`` recognizes the format of a record and converts it to messages; ``fields`` decides
   which of its other fields are refused and which are ignored.
2. ``messages`` validates the messages.
3. ``templates`` renders them as text; ``template_names`` finds a template by name. ``written``
   checks that the template leaves nothing out.
4. ``answers`` finds the answers in the text; ``reasoning`` handles prompts that open a block of
   reasoning.
5. ``tokenization`` converts the text to tokens with one weight each.

``encoding`` runs these steps.
"""
