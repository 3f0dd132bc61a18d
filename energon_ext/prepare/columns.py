# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes columns of documents that exist already, such as what a teacher says of each token."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer, check_kind
from energon_ext.batch.columns import NO_COLUMNS, Column, check_described, columns_to_json
from energon_ext.errors import ConfigError, SampleError
from energon_ext.prepare.documents import InputDocument, Unit
from energon_ext.prepare.job import Encoded, Job
from energon_ext.prepare.units import run_part, run_units
from energon_ext.storage.claim import Part
from energon_ext.tokens.column_files import ColumnWriter
from energon_ext.tokens.column_folder import DIGESTS, ENDS, OWN_FILES, PARTS, digest_of_tokens
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.formats import open_documents

#: Documents that are finished together: what an interrupted call repeats, and a part of its work.
UNIT_DOCUMENTS = 1024

#: Tokens of the documents in one call: values of each document, by column.
Produce = Callable[[Sequence[np.ndarray]], Mapping[str, Sequence[Any]]]


class ColumnsWriter:
    """Writes the columns of one part.

    Args:
        prefix: path without suffix.
        columns: by name.
        own: further ones, about the tokens; none if no values of tokens are looked up.
    """

    def __init__(
        self,
        prefix: str | Path,
        columns: Mapping[str, Column],
        own: Mapping[str, Column] = OWN_FILES,
    ):
        self._writers = {
            name: ColumnWriter(prefix, name, column) for name, column in {**columns, **own}.items()
        }
        self._own = own
        self.num_documents = self.num_tokens = 0

    def write(
        self,
        tokens: np.ndarray,
        weights: None,
        columns: Mapping[str, Any] = NO_COLUMNS,
        *,
        origin: str = "",
    ) -> None:
        """Append the values of a document; those it lacks are filled."""
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if self._own:
            own = {ENDS: self.num_tokens, DIGESTS: digest_of_tokens(tokens)}
            columns = {**columns, **own}
        for name, writer in self._writers.items():
            writer.write(columns.get(name), len(tokens), origin)

    def abandon(self) -> None:
        """Close the files without finishing them."""
        for writer in self._writers.values():
            writer.abandon()

    def close(self, meta: Mapping[str, Any] | None = None) -> None:
        """Finish the files."""
        for writer in self._writers.values():
            writer.close()


def write_columns(
    documents: Documents | str | Path,
    folder: str | Path,
    columns: Mapping[str, Column],
    produce: Produce,
    *,
    made_by: str = "",
    part: Part | None = None,
    unit_documents: int = UNIT_DOCUMENTS,
) -> None:
    """Write columns of documents into a folder, which an entry's ``columns`` then names.

    A call that is interrupted continues where it was; one on a complete folder does nothing.

    Args:
        documents: token files by their path, or documents of any store.
        folder: a new one, or one that an earlier call began.
        columns: by name.
        produce: gets the tokens of some documents, int64 [n] each, and returns the values of each
            by column: ``[n, *item]``, or ``[*item]`` of a column per document.
        made_by: what the values depend on, such as the name of a model; a folder that was begun
            with another one is refused.
        part: the part of the work that this process does, such as ``Part(0, 8)`` on one of eight
            processes that share a file system; None for all.
        unit_documents: documents that are finished together.

    Raises:
        ConfigError: the folder belongs to other documents or columns, or ``produce`` returns
            values of other documents, names, shapes or ranges.

    Example:
        >>> import tempfile
        >>> from energon_ext.prepare.token_writer import TokenWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> writer = TokenWriter(f"{folder.name}/web", vocab_size=300)
        >>> writer.write(np.array([5, 6, 7]))
        >>> writer.close()
        >>> columns = {"score": Column("float32", per="document")}
        >>> from energon_ext.tokens.column_folder import ColumnFolder
        >>> write_columns(
        ...     f"{folder.name}/web", f"{folder.name}/scores", columns,
        ...     lambda texts: {"score": [tokens.mean() for tokens in texts]})
        >>> values = ColumnFolder.open(f"{folder.name}/scores").read("score", [0], [0], [3])
        >>> [float(value) for value in values]
        [6.0]
    """
    check_described(columns, "write_columns")
    check_integer("unit_documents", unit_documents, 1)
    check_kind("made_by", made_by, str)
    found = documents if isinstance(documents, Documents) else open_documents(documents)
    belongs = found.fingerprint()
    units = []
    for begin in range(0, len(found), unit_documents):
        stop = min(begin + unit_documents, len(found))
        num_bytes = 4 * found.tokens_in(begin, stop)
        description = {"path": "the documents", "range": [begin, stop], "documents": belongs}
        read = functools.partial(_read, found, begin, stop)
        units.append(Unit(description, read, num_bytes))
    job = Job(
        encode=functools.partial(_produce, columns, produce),
        writer=functools.partial(ColumnsWriter, columns=columns),
        meta={},
        options={"documents": belongs, "made_by": made_by, **columns_to_json(columns)},
    )
    if part is None:
        run_units(job, units, Path(folder), title="columns")
    else:
        run_part(job, units, Path(folder), part, title="columns")


def _read(documents: Documents, begin: int, stop: int) -> Iterator[InputDocument]:
    for number in range(begin, stop):
        tokens = documents.document(number).astype(np.int64)
        yield InputDocument("", f"document {number}", 4 * len(tokens), tokens, PARTS)


def _produce(
    columns: Mapping[str, Column], produce: Produce, documents: Sequence[InputDocument]
) -> list[Encoded | SampleError]:
    """Return the values of each document; ConfigError if there are others than were asked for."""
    # Copies, as a function may write to them, and their checksums are those of the stored tokens.
    found = produce([document.sample.copy() for document in documents])
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"produce: returned a {type(found).__name__}, the values of {sorted(columns)} by "
            f"column are needed."
        )
    counts = {name: len(values) for name, values in found.items() if isinstance(values, Sized)}
    if counts != dict.fromkeys(columns, len(documents)):
        raise ConfigError(
            f"produce: returned {counts} values by column; {len(documents)} of each of "
            f"{sorted(columns)} are needed."
        )
    return [
        Encoded([(document.sample, None, {name: found[name][place] for name in columns})])
        for place, document in enumerate(documents)
    ]
