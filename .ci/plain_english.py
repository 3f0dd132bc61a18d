# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Find English that sounds translated in pages, docstrings, comments and messages.

    python .ci/plain_english.py [FILE ...]

Prints one line per finding: place, words, advice. ``make lint`` fails if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "metadatasets/*", "docs/**/*.md")
CODE = ("energon_ext/**/*.py", "examples/**/*.py", "docs/*.py")

UNITS = "row|rank|step|worker|source|sample|document|line|second|batch|token|process|node|core"
COUNTED = "tokens|rows|bytes|documents|samples|batches|files|images|requests|numbers|[mµ]?s"

#: Patterns to find, and what to write instead.
PATTERNS = {
    r"another (?:\w+ )?than": "different from, or a plain 'not'",
    r"of now": "current",
    r"so many": "the number, or 'this many'",
    r"is said": "name who reports it, or drop it",
    r"dear(?:er|est)?": "expensive",
    rf"(?<!which )(?<!many )(?:\d|{COUNTED}) an? (?:{UNITS})": "per",
    rf"(?:one|a) (?:file|line|state|message|row|number) an? (?:{UNITS})": "per",
    r"stands? (?:in|at|beside|before|behind|there|here|on)": "is, or belongs",
    r"(?:what|that|which|who|it) (?:stands|speaks)": "is, or says",
    r"speaks? of": "describes, or names",
    r"nobody knows": "unknown",
    r"(?:file|state|batch|model|step|entry|node|plan|row|table|index|class|store) knows": "has",
    r"says nothing": "does not matter, or is missing",
    r"without a word": "silently",
    r"for one(?=[.;:,)])": "for example",
    r"of one's own": "your own",
    r"whoever": "name it",
    r"at hand": "current, or available",
    r"be told": "be given",
    r"anew": "again",
    r"where there (?:is|are)": "if there is",
    r"go(?:es)? on (?:with|from|where)": "continues",
    r"beside (?:it|them|the|a|each)": "next to, or in addition to",
    r"are to be|is to be": "must be, or a plain verb",
    r"in vain": "without success",
    r"(?:is|are|was|were) those? of then": "earlier",
}

#: Docstrings are verb or noun phrases, not questions.
QUESTION = re.compile(r"(?:What|Which|Whether|Who|Where)\b")

#: Allowed words by file; None exempts a file, such as one generated from the code.
EXCEPTIONS = {
    "docs/reference/messages.md": None,
}


def texts_of(path):
    """Yield the prose of a file as (line, text, is_docstring)."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from ((number, line, False) for number, line in enumerate(content.splitlines(), 1))
        return
    docstrings = set()
    for node in ast.walk(ast.parse(content)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add(node.body[0].lineno)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("STRING", "COMMENT", "FSTRING_MIDDLE"):
            line = token.start[0]
            yield line, token.string, kind == "STRING" and line in docstrings


def findings(path):
    """Yield one line per finding in a file."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    allowed = EXCEPTIONS.get(name, ())
    if allowed is None:
        return
    for line, text, is_docstring in texts_of(path):
        if is_docstring and QUESTION.match(text.lstrip('rRbBuUfF"').lstrip()):
            yield f"{name}:{line}: a docstring that begins with a question word"
        joined = " ".join(text.split())
        for pattern, advice in PATTERNS.items():
            for match in re.finditer(rf"\b(?:{pattern})(?!\w)", joined, re.IGNORECASE):
                if match[0] not in allowed:
                    yield f"{name}:{line}: {match[0]!r}: {advice}"


def main(arguments):
    files = [Path(argument).resolve() for argument in arguments]
    for pattern in () if files else PAGES + CODE:
        files += sorted(path for path in ROOT.glob(pattern) if "_build" not in path.parts)
    lines = [line for path in files for line in findings(path)]
    print("\n".join(lines) or "Plain English: nothing found.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
