# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exceptions of the package.

Every user error (YAML, arguments, data, checkpoints) is one of these types, is raised as early as
it can be detected, and says in one line where the problem is, what was found, what is allowed and
what to do. An ``assert`` in this package guards an invariant of the package itself.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

#: Control characters, line separators, marks of text direction and characters without a form, that
#: a terminal obeys or omits instead of showing, and lone surrogates, which cannot be written to
#: a file. Not the joiners U+200C and U+200D, without which some scripts and emoji are misspelt.
CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
MAX_TEXT = 20_000  # characters of a text shown to people
_LOGIN = re.compile(r"(?<!dss)(:/{1,2})[^/\s]*@")  # dss://name@version is not a login


def without_logins(text: str) -> str:
    """Replace the login in each URL of a text with ``***``."""
    return _LOGIN.sub(r"\1***@", text)


def printable(text: str, most: int = MAX_TEXT) -> str:
    r"""Make a text safe for a terminal: escape control characters, hide logins, limit the length.

    A text of more than ``most`` characters keeps its two ends.

    Example:
        >>> printable("s3://me:secret@bucket/\x1b[31mred")
        's3://***@bucket/\\x1b[31mred'
    """
    text = CONTROL.sub(lambda match: ascii(match[0])[1:-1], without_logins(text))
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def one_line(error: BaseException) -> str:
    """Return an error's message as one line without a full stop; its type if there is none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop; its type if there is none.

    For errors of libraries, whose further lines are lists and tracebacks.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class _PrintableLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # not generic in Python 3.10
    """A logger that makes its lines printable, since they contain names from files."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            text = printable(str(msg) % args if args else str(msg))
            self.logger.log(level, "%s", text, stacklevel=2, **kwargs)


def log_of(module: str) -> _PrintableLog:
    """Return the logger of a module; its lines are printable."""
    return _PrintableLog(logging.getLogger(module), {})


class EnergonExtError(Exception):
    """Base of all errors that energon_ext raises deliberately; their messages are printable."""

    def __init__(self, *args: object):
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(EnergonExtError, ValueError):
    """A YAML file, an argument or a dataset folder is invalid."""


class ZeroWeightsError(ConfigError):
    """Every weight is 0 where something must be drawn."""


class EncoderNeededError(ConfigError):
    """A question about a saved run needs the run's encoder, which its state does not contain."""


class SampleError(EnergonExtError, ValueError):
    """One sample (document, row, prompt) cannot be used."""


class WrongCodeError(EnergonExtError, RuntimeError):
    """An encoder or a cooker raises an error for every sample; its cause is that error."""


class DataExhaustedError(EnergonExtError):
    """Every source of a run has reached its ``max_epochs``: there is nothing left to train on."""


class WorkerError(EnergonExtError, RuntimeError):
    """A data worker died, failed to start or failed to deliver a batch."""


class RankError(EnergonExtError, RuntimeError):
    """Ranks of a run would read different data, or one of them does not answer."""


class StoreError(EnergonExtError, RuntimeError):
    """An object store does not respond, or its content differs from what was planned."""


class SamplerError(EnergonExtError, RuntimeError):
    """A sampler of answers failed, or its answers give no training signal.

    Args:
        reason: what happened.
        key: key of the prompt.
        counts: groups sampled so far, by outcome.
    """

    def __init__(self, reason: str, *, key: str = "", counts: "dict[str, int] | None" = None):
        self.reason = printable(reason)
        self.key = key
        self.counts = dict(counts or {})
        where = f"Prompt {key}: " if key else ""
        so_far = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        # An error from another process is rebuilt from its message, which already ends in a dot.
        reason = reason.removesuffix(".")
        super().__init__(f"{where}{reason}." + (f" So far: {so_far}." if so_far else ""))


class StateFormatError(EnergonExtError, ValueError):
    """A checkpoint or state is damaged, incomplete or has an unknown format version."""


class StateMismatchError(EnergonExtError, ValueError):
    """A state belongs to another configuration.

    Args:
        differences: ``{field: (saved value, current value)}``, every field that differs.
        advice: what the user can do.
    """

    def __init__(self, differences: "Mapping[str, tuple[object, object]] | str", advice: str = ""):
        # Exceptions from a worker process are rebuilt from their message alone.
        if isinstance(differences, str):
            self.differences: dict[str, tuple[object, object]] = {}
            super().__init__(differences)
            return
        self.differences = dict(differences)
        listed = "; ".join(
            f"{field}: saved {saved!r}, now {current!r}"
            for field, (saved, current) in sorted(self.differences.items())
        )
        message = f"The state belongs to another configuration ({listed})."
        super().__init__(f"{message} {advice}".rstrip())
