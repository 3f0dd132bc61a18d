# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The cache of text: token files of sources that are text, made once and found by their name.

The name is a digest of all that the tokens depend on. A folder of that name is complete: it is made
beside, under another name, and renamed. Several processes may ask for it at once, on several
machines; one of them makes it and the others wait. No collective is used.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from energon_ext.documents.file_set import TokenFiles, open_token_files
from energon_ext.errors import ConfigError
from energon_ext.prepare.claim import ClaimedError
from energon_ext.prepare.job import Job
from energon_ext.prepare.samples import SampleSource, sample_units
from energon_ext.prepare.units import left_out, run_units

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ENERGON_EXT_CACHE"
DEFAULT_NAME = ".energon_ext_cache"

#: The one split of a cache folder: one document for each sample, in their order.
SPLIT = "tokens"

#: What one core tokenizes in a second, about, and how much is tokenized without being asked for.
BYTES_PER_SECOND = 2_500_000
MOST_SECONDS = 60.0

#: How long a process waits for one that is at work; collectives of NCCL end after 600 s.
WAIT_SECONDS = 480.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CachedText:
    """The token files of one source.

    Attributes:
        name: of the source, for messages.
        folder: where they are, or will be.
        num_bytes: of its files; None where that is not known.
    """

    name: str
    folder: Path
    source: SampleSource
    job: Job
    num_bytes: int | None

    @property
    def is_there(self) -> bool:
        """Whether they are made."""
        try:  # a listing is newer than what a network file system remembers of a missing file
            return self.folder.name in os.listdir(self.folder.parent)
        except OSError:
            return False

    def open(self) -> TokenFiles:
        """The token files, which are made."""
        try:
            files = open_token_files(self.folder / SPLIT) if self.source.count else TokenFiles([])
        except ConfigError as error:
            raise ConfigError(f"{error} Remove {self.folder}, and it is made again.") from error
        if len(files) != self.source.count:
            raise ConfigError(
                f"{self.folder}: holds {len(files)} documents of the {self.source.count} samples "
                f"of {self.name}. Remove it, and it is made again."
            )
        return files


def cache_root(beside: Path) -> Path:
    """The folder of all caches: what the environment names, else one beside a metadataset."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else beside / DEFAULT_NAME


def cache_folder(root: Path, name: str, digest: str) -> Path:
    """Where the token files of a source lie; its name is in it for people."""
    words = re.sub(r"[^\w.-]+", "-", name)[-60:].strip("-.")
    return root / f"{words}-{digest[:24]}"


def ensure_made(texts: Sequence[CachedText], command: Callable[[], str]) -> None:
    """Make what is missing, where that is soon done.

    Args:
        command: the one that makes it where it takes longer.

    Raises:
        ConfigError: it takes longer, cannot be written, or the process that makes it does not end.
    """
    missing = [text for text in texts if not text.is_there]
    if not missing:
        return
    known = [text.num_bytes for text in missing if text.num_bytes is not None]
    seconds = sum(known) / BYTES_PER_SECOND
    if seconds > MOST_SECONDS or len(known) < len(missing):
        names = missing[0].name + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        size = f"some {sum(known):,} bytes, {seconds:,.0f} s of work" if known else "not local"
        raise ConfigError(
            f"{names}: text that is not tokenized yet ({size}). Run `{command()}` first; "
            f"{CACHE_VARIABLE} names the folder where the tokens are kept."
        )
    for text in missing:
        make(text)


def make(text: CachedText, jobs: int = 1, wait_seconds: float = WAIT_SECONDS) -> None:
    """Make the token files of a source, or wait until another process has made them."""
    deadline = time.monotonic() + wait_seconds
    while not text.is_there:
        try:
            _write(text, jobs)
        except OSError as error:
            raise ConfigError(
                f"{text.name}: its tokens cannot be written to {text.folder.parent} "
                f"({error.strerror or error}); set {CACHE_VARIABLE} to a folder that can be "
                f"written and has room."
            ) from error
        except ClaimedError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{text.name}: {error} It has not ended in {wait_seconds:.0f} s; wait for it, "
                    f"or end it, and start again."
                ) from error
            time.sleep(_LOOK_SECONDS)


def _write(text: CachedText, jobs: int) -> None:
    what = f"tokenizing {text.name}"
    prepared, _ = run_units(text.job, sample_units(text.source), text.folder, jobs=jobs, what=what)
    count, first = left_out(prepared, "refused")
    if count:
        logger.warning(
            "%s: %d of %d samples have no tokens, the first: %s",
            *(text.name, count, text.source.count, first),
        )
