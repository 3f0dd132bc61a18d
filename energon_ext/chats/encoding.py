# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations to samples: the one way from a record to tokens and weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from energon_ext.arguments import check_choice
from energon_ext.chats.answers import ALL, ANSWERS, EACH, EMPTY, find_answers
from energon_ext.chats.ends import AnswerEnds
from energon_ext.chats.messages import check_answers, check_messages, check_question
from energon_ext.chats.records import Conversation
from energon_ext.chats.rendered import RenderedConversation
from energon_ext.chats.templates import RESERVED, ChatTemplate
from energon_ext.chats.thinking_parts import write_thinking_parts
from energon_ext.chats.tokenization import (
    AddedTokens,
    AnsweredText,
    AnsweredTokens,
    Span,
    tokenize_answers,
)
from energon_ext.chats.tool_texts import find_lost
from energon_ext.chats.written import WrittenFields
from energon_ext.errors import ConfigError, SampleError
from energon_ext.tokenizers.protocol import Tokenizer

#: What to do with an answer after which the template leaves no token: add the tokenizer's
#: end-of-text token, or allow it.
EOS, ALLOW = "eos", "allow"
ANSWER_ENDS = (EOS, ALLOW)

#: Changes when the same conversation becomes other samples, so that cached ones are made again.
RULES = 4


@dataclass(frozen=True)
class EncodedConversation:
    """The samples of a conversation.

    Attributes:
        samples: (tokens int64 [n], weights float32 [n]) of each; more than one if the answers of
            the conversation are not in one text.
        notes: what a summary should say, with counts.
    """

    samples: list[tuple[np.ndarray, np.ndarray]]
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Rendered:
    texts: list[AnsweredText]
    adds_special_tokens: bool  # the tokenizer's, around each text
    adds_eos: bool  # after each text, whatever the tokenizer does
    notes: Counter[str]


class ConversationEncoder:
    """Encodes conversations for training and prompts for sampling, in the same format.

    An answer must end with a token, or a model would not learn to stop. Where the template leaves
    none after the last answer of a sample, the tokenizer's end-of-text token is added and counted.

    Args:
        answers: ``all`` answers of a conversation in one sample, the ``last`` one, or ``each`` in a
            sample of its own; None for one sample where the template permits it, else ``each``.
        answer_end: ``eos``, the default, puts each answer in a sample of its own where one before
            the last has no end, and so ends it with the end-of-text token; ``allow`` accepts any
            answer without an end.

    Raises:
        ConfigError: an option is unknown, or the tokenizer has no end-of-text token for ``eos``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        answers: str | None = None,
        answer_end: str | None = None,
    ):
        if answers is not None:
            check_choice("answers", answers, ANSWERS)
        if answer_end is not None:
            check_choice("answer_end", answer_end, ANSWER_ENDS)
        if answer_end == EOS and tokenizer.eos_id is None:
            raise ConfigError(
                "answer_end: 'eos' found, but the tokenizer has no end-of-text token."
            )
        self.tokenizer, self.template = tokenizer, template
        self.answers, self.answer_end = answers, answer_end
        self._written, self._ends = WrittenFields(template), AnswerEnds(template)
        self._added = AddedTokens(tokenizer)
        self._unused: dict[tuple[str, ...], list[str]] = {}
        self._leaves_token: dict[str, bool] = {}

    def options(self) -> dict[str, Any]:
        """Return JSON values that change whenever the samples of any conversation change."""
        return {
            "chat_template": self.template.fingerprint(),
            "answers": self.answers,
            "answer_end": self.answer_end,
        }

    def encode(
        self, conversations: Sequence[Conversation]
    ) -> list[EncodedConversation | SampleError]:
        """Return the samples of each conversation, or the error that refuses it."""
        rendered = [self._render_or_refuse(conversation) for conversation in conversations]
        texts = [t for each in rendered if isinstance(each, _Rendered) for t in each.texts]
        encoded = iter(tokenize_answers(self.tokenizer, self._added, texts))
        return [
            each
            if isinstance(each, SampleError)
            else self._finish(each, [next(encoded) for _ in each.texts])
            for each in rendered
        ]

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the tokens of a conversation that ends with a question, int64 [n]."""
        checked = check_messages(conversation.messages)
        check_question(checked)
        context = self._written.with_tools(_context(conversation))
        checked = write_thinking_parts(self.template, checked, context)
        messages = self._written.messages_for(checked, context)
        text = self.template.render(messages, add_generation_prompt=True, **context)
        return self.encode_text(text, self.template.writes_special_tokens)

    def encode_text(self, text: str, has_bos: bool = False) -> np.ndarray:
        """Return the tokens of a prompt as text, int64 [n]."""
        _check_unicode(text)
        (tokens,) = self.tokenizer.encode_bare([text])
        if has_bos or not self.tokenizer.add_bos:
            return tokens
        return np.concatenate([[self.tokenizer.bos_id], tokens])

    def _render_or_refuse(self, conversation: Conversation) -> _Rendered | SampleError:
        try:
            rendered = self._render(conversation)
            for text in rendered.texts:
                _check_unicode(text.text)
            return rendered
        except SampleError as error:
            return error

    def _render(self, conversation: Conversation) -> _Rendered:
        if conversation.is_pair:
            prompt, response = (message["content"] for message in conversation.messages)
            end = len(prompt) + len(response)
            span = Span(len(prompt), end, 1.0)
            text = AnsweredText(prompt + response, [span], conversation.is_whole)
            notes = Counter(conversation.notes)
            if not response:
                notes[EMPTY] += 1
            if " " in prompt.strip() and response.startswith(prompt):
                notes["responses that begin with their prompt, which the text has twice"] += 1
            adds_eos = not self.tokenizer.add_eos and self.answer_end != ALLOW
            if adds_eos and self.tokenizer.eos_id is None:
                raise SampleError("no token ends the response; use answer_end='allow' to accept it")
            return _Rendered([text], True, adds_eos, notes)
        checked = check_messages(conversation.messages)
        check_answers(checked)
        context = self._written.with_tools(_context(conversation))
        checked = write_thinking_parts(self.template, checked, context)
        messages = self._written.messages_for(checked, context)
        notes = Counter(conversation.notes)
        notes.update(checked.notes)
        for name in self._unused_variables(conversation.template_kwargs):
            notes[f"chat_template_kwargs that the template does not read: {name}"] += 1
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        if dropped := len(messages) - 1 - last:
            notes["messages after the last answer, left out"] += dropped
        found = RenderedConversation(self.template, messages, checked.weights, context)
        self._ends.check_end(messages[: found.last_question + 1], context)
        texts = find_answers(found, self.answers, notes)
        if lost := find_lost(conversation.tools or (), texts[-1].text):
            notes[f"conversations with {lost} in `tools` that the template does not write"] += 1
        texts, adds_eos = self._with_ends(found, texts, notes)
        return _Rendered(texts, not self.template.writes_special_tokens, adds_eos, notes)

    def _with_ends(
        self, found: RenderedConversation, texts: list[AnsweredText], notes: Counter[str]
    ) -> tuple[list[AnsweredText], bool]:
        """Make sure that answers end; return whether texts need the end-of-text token for it."""
        if self.answer_end == ALLOW:
            return texts, False
        unended = self._find_unended(found, texts)
        if not unended:
            return texts, False
        if self.tokenizer.eos_id is None:
            raise SampleError(
                "the template does not end an answer with a token that is trained, and the "
                "tokenizer has no end-of-text token, so a model would not learn to stop; use "
                "answer_end='allow' (--answer-end allow) to accept it"
            )
        if not all(unended):
            if self.answers == ALL:
                raise SampleError(
                    "the template does not end an answer before the last, so a model would not "
                    "learn to stop; use answers='each' (--answers each), or answer_end='allow'"
                )
            notes[
                "conversations with one sample per answer, since earlier answers have no end"
            ] += 1
            texts = find_answers(found, EACH, notes)
            unended = self._find_unended(found, texts)
        return texts, True

    def _find_unended(
        self, conversation: RenderedConversation, texts: Sequence[AnsweredText]
    ) -> list[bool]:
        """Return, for each answer without an end, whether it is the last in its text."""
        head = conversation.messages[: conversation.answers[0]]
        end = self._ends.find_end(head, conversation.context)
        if end is None:
            return []
        ends_text = self.tokenizer.add_eos and not self.template.writes_special_tokens
        return [
            is_last
            for text in texts
            for span in text.answers
            for is_last in [span.stop == len(text.text)]
            if not (is_last and ends_text) and not self._is_ended(text.text, span.stop, end)
        ]

    def _is_ended(self, text: str, stop: int, end: str) -> bool:
        """Return True if what the template writes after a content is part of an answer's tokens."""
        if not text.endswith(end, 0, stop) and text.startswith(end, stop):
            raise SampleError(
                f"the template ends an answer with {end!r:.40}, but its generation tags exclude "
                f"that, so a model would not learn to stop; use tags that include it, or "
                f"answer_end='allow' (--answer-end allow)"
            )
        if end not in self._leaves_token:
            contents = ["x", "x."]
            ended = self.tokenizer.encode_bare([content + end for content in contents])
            bare = self.tokenizer.encode_bare(contents)
            pairs = zip(ended, bare)
            self._leaves_token[end] = not any(np.array_equal(*pair) for pair in pairs)
        return self._leaves_token[end]

    def _unused_variables(self, variables: Mapping[str, Any]) -> list[str]:
        key = tuple(sorted(variables))
        if key not in self._unused:
            self._unused[key] = self._written.find_unused(variables) if key else []
        return self._unused[key]

    def _finish(
        self, rendered: _Rendered, encoded: Sequence[AnsweredTokens]
    ) -> EncodedConversation | SampleError:
        """Add the special tokens around each text, which may have the one at the end already."""
        tokenizer, surrounds = self.tokenizer, rendered.adds_special_tokens
        samples = []
        for text, found in zip(rendered.texts, encoded):
            tokens, weights = found.tokens, found.weights
            if surrounds and tokenizer.add_bos:
                tokens = np.concatenate([[tokenizer.bos_id], tokens])
                weights = np.concatenate([np.zeros(1, np.float32), weights])
            if rendered.adds_eos or (surrounds and tokenizer.add_eos):
                answer = text.answers[-1]
                is_last = answer.stop == len(text.text)  # otherwise one of weight 0 is
                last = np.float32(answer.weight if is_last else 0)
                if not (len(tokens) and tokens[-1] == tokenizer.eos_id and weights[-1] == last):
                    tokens = np.concatenate([tokens, [tokenizer.eos_id]])
                    weights = np.concatenate([weights, [last]])
                    rendered.notes.update([_ENDED] * rendered.adds_eos)
            if not weights[1:].any():  # nothing predicts the first token of a document
                return SampleError("the answers have no tokens, so there is nothing to train on")
            samples.append((tokens, weights))
        cuts = sum(found.cuts for found in encoded)
        if cuts:
            rendered.notes[_CUTS] += cuts
        return EncodedConversation(samples, rendered.notes)


_ENDED = "answers ended with the end-of-text token, since nothing else ends them"
_CUTS = "borders of answers that a token would cross, cut there"


def _check_unicode(text: str) -> None:
    """Raise SampleError for a text that no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"the text contains a lone surrogate ({text[error.start]!r}); fix or remove it"
        ) from None


def _context(conversation: Conversation) -> dict[str, Any]:
    """Return the variables of the template for one conversation."""
    if reserved := RESERVED.intersection(conversation.template_kwargs):
        raise SampleError(
            f"chat_template_kwargs: {min(reserved)} is not a variable of a template; remove it"
        )
    tools = {"tools": conversation.tools} if conversation.tools else {}
    return {**conversation.template_kwargs, **tools}
