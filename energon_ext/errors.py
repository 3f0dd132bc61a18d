# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exceptions of the package.

Every error of a user (YAML, arguments, data, checkpoints) is one of these types, is raised as
early as it can be known, and says in one line where it was found, what was found, what is allowed
and what to do. An ``assert`` in this package guards an invariant of the package itself.
"""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

#: What a terminal obeys instead of showing it, control characters, line ends, turns of direction;
#: and halves of characters, which no file can hold.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_TEXT = 20_000  # characters of a text that people are shown
_LOGIN = re.compile(r"(?<!dss)(:/{1,2})[^/\s]*@")  # dss://name@version is no login


def without_logins(text: str) -> str:
    """Text with ``***`` in place of the names and passwords in its URLs."""
    return _LOGIN.sub(r"\1***@", text)


def printable(text: str, most: int = MAX_TEXT) -> str:
    r"""Text as a terminal may have it: no control characters, line breaks or logins, not too long.

    Of a text of more than ``most`` characters the two ends are left.

    Example:
        >>> printable("s3://me:secret@bucket/\x1b[31mred")
        's3://***@bucket/\\x1b[31mred'
    """
    text = CONTROL.sub(lambda found: ascii(found[0])[1:-1], without_logins(text))
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


class _PrintableLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # no generic in Python 3.10
    """A log in which names come from files."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            text = printable(str(msg) % args if args else str(msg))
            self.logger.log(level, "%s", text, stacklevel=2, **kwargs)


def log_of(module: str) -> _PrintableLog:
    """The log of a module; what it says is printable."""
    return _PrintableLog(logging.getLogger(module), {})


class EnergonExtError(Exception):
    """Base of every error that energon_ext raises on purpose; its message is printable."""

    def __init__(self, *args: object):
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(EnergonExtError, ValueError):
    """A YAML file, an argument or a dataset folder is not what it must be."""


class SampleError(EnergonExtError, ValueError):
    """One sample (document, row, prompt) cannot be used."""


#: A sample that is left out and counted; any other error shows a mistake of a program.
LEFT_OUT = (SampleError, json.JSONDecodeError, UnicodeDecodeError)


class DataExhaustedError(EnergonExtError):
    """Every source of a run has reached its ``max_epochs``: there is nothing left to train on."""


class WorkerError(EnergonExtError, RuntimeError):
    """A data worker died, or could not start or hand over a batch."""


class StoreError(EnergonExtError, RuntimeError):
    """An object store does not answer, or holds something else than was planned with."""


class SamplerError(EnergonExtError, RuntimeError):
    """A sampler of answers failed, or its answers teach nothing.

    Args:
        reason: what happened.
        key: of the prompt.
        counts: groups sampled so far, and what became of them.
    """

    def __init__(self, reason: str, *, key: str = "", counts: "dict[str, int] | None" = None):
        self.reason = printable(reason)
        self.key = key
        self.counts = dict(counts or {})
        where = f"Prompt {key}: " if key else ""
        so_far = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        # From another process an error comes as its message alone, which ends with a dot already.
        reason = reason.removesuffix(".")
        super().__init__(f"{where}{reason}." + (f" So far: {so_far}." if so_far else ""))


class StateFormatError(EnergonExtError, ValueError):
    """A checkpoint or a state is damaged, incomplete, or of an unknown format version."""


class StateMismatchError(EnergonExtError, ValueError):
    """A state belongs to another configuration.

    Args:
        differences: ``{field: (saved value, current value)}``, every field that differs.
        advice: what the user can do about it.
    """

    def __init__(self, differences: "Mapping[str, tuple[object, object]] | str", advice: str = ""):
        # One string argument must be enough: exceptions that cross a worker process are rebuilt
        # from their message alone.
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
