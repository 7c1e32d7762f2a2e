"""The English of the product's names and docstrings, as far as a program can count it.

docs/style.md has the rules; Trio's docstrings have two relative words or more in 2.7 % of their sentences.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.sources import FILES, nodes, refuse

PRODUCT = [path for path in FILES if path.parts[0] != "bench"]

# Two relative clauses in a sentence are the exception, and three are forbidden but for a few.
TWO_RELATIVES_PERCENT_MAX = 1.0
THREE_RELATIVES_MAX = 3

WORDS_MIN = 4  # of what counts as a sentence, so that a list of short terms does not lower the share
WORST = 30  # as many sentences are printed

SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
RELATIVE = re.compile(r"\b(?:that|which|what|those|whose)\b", re.IGNORECASE)
VAGUE = re.compile(r"\b(?:nobody|whoever|whatever)\b", re.IGNORECASE)
NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
SPEECH = {
    *("tell", "tells", "told", "say", "says", "said", "hear", "hears", "heard", "lie", "lies", "lied"),
    *("doubt", "doubts", "doubted", "know", "knows", "known", "nobody", "whoever", "whatever"),
}
ALLOWED: dict[str, str] = {}
"""Names that have such a part, each with its reason."""


def docstrings(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())


def sentences(path: Path) -> Iterator[str]:
    for docstring in docstrings(path):
        yield from (each for each in SENTENCE_END.split(docstring) if len(each.split()) >= WORDS_MIN)


def relatives(sentence: str) -> int:
    return len(RELATIVE.findall(sentence))


def names(path: Path) -> Iterator[str]:
    """Yield every name that a file gives to something."""
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_few_sentences_have_two_relative_words() -> None:
    found = [(relatives(sentence), str(path), sentence) for path in PRODUCT for sentence in sentences(path)]
    two = [row for row in found if row[0] >= 2]
    three = [row for row in two if row[0] >= 3]
    percent = 100 * len(two) / len(found)
    if percent <= TWO_RELATIVES_PERCENT_MAX and len(three) <= THREE_RELATIVES_MAX:
        return
    lines = [
        "Write one relative clause a sentence, and repeat the noun instead of a pronoun. Sentences with two or more of",
        f"that, which, what, those, whose: {percent:.2f} %, at most {TWO_RELATIVES_PERCENT_MAX} %.",
        f"With three or more: {len(three)}, at most {THREE_RELATIVES_MAX}. The worst files and sentences:",
        *(f"{count:4} {path}" for path, count in Counter(path for _, path, _ in two).most_common(10)),
        *(f"{path}: {sentence}" for _, path, sentence in sorted(two, reverse=True)[:WORST]),
    ]
    pytest.fail("\n".join(lines), pytrace=False)


def test_a_name_has_no_verb_of_speech() -> None:
    spoken = {
        f"{path}: {name}"
        for path in PRODUCT
        for name in names(path)
        if name not in ALLOWED and SPEECH & {part.lower() for part in NAME_PART.findall(name)}
    }
    refuse(f"{name}: code sends, returns, reports, logs, publishes, raises" for name in spoken)


def test_a_first_sentence_names_what_it_speaks_of() -> None:
    first = [
        (path, sentence)
        for path in PRODUCT
        for text in docstrings(path)
        if (sentence := re.split(r"(?<=[.!?])\s", text)[0])
    ]
    vague = [f"{path}: {sentence}" for path, sentence in first if VAGUE.search(sentence)]
    refuse(f"{line} (no nobody, whoever, whatever in a docstring's first sentence)" for line in vague)


def test_every_exception_is_used() -> None:
    assert ALLOWED.keys() <= {name for path in PRODUCT for name in names(path)}
