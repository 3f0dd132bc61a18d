# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations: from a record to tokens and weights.

1. ``records`` recognises the format of a record and makes messages of it; ``fields`` says which
   other fields may be ignored;
2. ``messages`` checks the messages;
3. ``templates`` renders them as text (``template_names`` finds a template by its name), and
   ``written`` makes sure that nothing is left out;
4. ``answers`` finds the answers in that text, ``reasoning`` those to a prompt that opens a block of
   reasoning;
5. ``tokenization`` turns the text into tokens, with a weight for each.

``encoding`` does all of it.
"""
