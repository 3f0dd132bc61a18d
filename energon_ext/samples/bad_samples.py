# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rule by which a sample is bad, for cookers, encoders, measuring, tokenizing and streams."""

import traceback
from dataclasses import dataclass
from typing import Any

from megatron.energon import SampleDecoder

from energon_ext.errors import EnergonExtError, SampleError, WrongCodeError, one_line, printable

#: Errors that wrong code raises for every sample, and data only for some. They end the run if each
#: of this many first samples raises one; a smaller number would let bad samples end a run.
_CODE_ERRORS, _FIRST_SAMPLES = (NameError, TypeError, AttributeError), 10

#: Characters of the text of an error; some of Energon's contain the whole sample.
_LONGEST = 1000


@dataclass
class BadSamples:
    """Decides what it means that a decoder, a cooker or an encoder raises an error for a sample.

    The sample is bad, whatever the error is, also SkipSample; it is skipped and counted. But an
    error of this package that is not about one sample, such as a ConfigError, is raised, and a
    NameError, TypeError or AttributeError for each of the first ten samples means wrong code.

    Attributes:
        source: name of the source, for messages.
        decoder: of the files of a sample, which may explain the errors of wrong code.
        tolerance: bad samples in a row that end a run.
        has_worked: whether the code is known to work for some sample.
    """

    source: str
    decoder: Any
    tolerance: int = _FIRST_SAMPLES
    has_worked: bool = False
    _failed: int = 0

    def judge(self, error: Exception, key: str) -> SampleError:
        """Return why a sample cannot be used.

        Raises:
            EnergonExtError: the sample is not to blame.
            WrongCodeError: neither are the samples before it.
        """
        prefix = f"Sample {key}: "
        if isinstance(error, SampleError):
            self.has_worked = True
            return SampleError(prefix + str(error).removeprefix(prefix))
        if isinstance(error, EnergonExtError):
            raise error
        self.has_worked |= not isinstance(error, _CODE_ERRORS)
        self._failed += 1
        if not self.has_worked and self._failed >= min(_FIRST_SAMPLES, self.tolerance):
            *_, frame = traceback.extract_tb(error.__traceback__)
            raise WrongCodeError(
                f"{self.source}: the first {self._failed} samples all fail: "
                f"{describe_decoder(self.decoder)}. {prefix}{_describe(error)}, raised at "
                f"{frame.filename}:{frame.lineno}."
            ) from error
        hint = f"; {describe_decoder(self.decoder)}" if isinstance(error, _CODE_ERRORS) else ""
        return SampleError(f"{prefix}{_describe(error)}{hint}.")


def _describe(error: Exception) -> str:
    """Return the type and the text of an error."""
    reason = one_line(error) if str(error).strip() else ""
    if not reason and error.__cause__ is not None:
        reason = one_line(error.__cause__)  # some of Energon's errors have a cause but no text
    return type(error).__name__ + (f" ({printable(reason, _LONGEST)})" if reason else "")


def describe_decoder(decoder: Any) -> str:
    """Say what the methods of an encoder get of the files of a sample, to explain their errors."""
    if decoder is None:
        return "the files of a sample are not decoded, as the encoder's `decoder` is None"
    name = type(decoder).__name__
    if isinstance(decoder, SampleDecoder):
        options = decoder.config()
        if "image_decode" in options:
            name += f"(image_decode={options['image_decode']!r})"
    return f"the files of a sample are decoded by {name}"
