"""Literals of Python as a model writes them, read by a grammar of their own: nothing is ever evaluated.

JSON is read as JSON has it, so a model may write that as well: an engine is held to JSON. Each literal becomes JSON
text. A number that is JSON already stays as it is, since no type of Python holds all of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from actors.text.formats.arguments import encoded
from actors.text.formats.json_text import LEVELS_MAX, SPACE
from actors.text.formats.json_text import NUMBER as JSON_NUMBER
from actors.text.formats.source import NoCall, Reading, Source

NAME_END = " \t\n\r()[]{}=,:'\"<>"  # no character of a name
AS_PYTHON = {"true": "True", "false": "False", "null": "None"}
WORDS = {python: word for word, python in AS_PYTHON.items()} | {word: word for word in AS_PYTHON}
NUMBER_CHARACTERS = "0123456789+-.eE_"
NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?")
DIGITS_MAX = 1000  # of a number that is no JSON; Python itself has a limit, too
QUOTES = ("'", '"', "'''", '"""')
PLAIN = re.compile(r"[^'\"\\]*")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "0": "\0"}
ESCAPES |= {each: each for each in "\\'\""}
HEXADECIMAL = "0123456789abcdefABCDEF"
HEXADECIMAL_ESCAPES = {"x": 2, "u": 4, "U": 8}


def python_literal(source: Source, levels: int = LEVELS_MAX) -> Reading[str]:
    """Take one literal, and white space before it, and return it as JSON; raises `NoCall` if it is none."""
    yield from source.run(SPACE)
    first = yield from source.peek()
    if first in {"'", '"'} and first:
        return encoded((yield from _strings(source)))
    if first and first in "[({":
        if not levels:
            raise NoCall
        source.take(1)
        if first == "{":
            return (yield from _entries(source, levels - 1))
        return (yield from _items(source, {"[": "]", "(": ")"}[first], levels - 1))
    if first and first in "+-.0123456789":
        return _number((yield from source.run(NUMBER_CHARACTERS)))
    return WORDS[(yield from source.expect(*WORDS))]


def json_object_of(members: Mapping[str, str]) -> str:
    """Return the JSON object of members that are JSON themselves."""
    return f"{{{', '.join(f'{encoded(key)}: {value}' for key, value in members.items())}}}"


def _items(source: Source, end: str, levels: int) -> Reading[str]:
    """Take the items of a list or a tuple; one item between parentheses is no tuple."""
    items = list[str]()
    yield from source.run(SPACE)
    while (yield from source.accept(end)) is None:
        items.append((yield from python_literal(source, levels)))
        yield from source.run(SPACE)
        if (yield from source.accept(",")) is None:
            yield from source.expect(end)
            return items[0] if end == ")" and len(items) == 1 else f"[{', '.join(items)}]"
        yield from source.run(SPACE)
    return f"[{', '.join(items)}]"


def _entries(source: Source, levels: int) -> Reading[str]:
    """Take the entries of a dictionary, whose keys are strings."""
    entries = dict[str, str]()
    yield from source.run(SPACE)
    while (yield from source.accept("}")) is None:
        if (yield from source.starts_with(*QUOTES)) is None:
            raise NoCall
        key = yield from _strings(source)
        yield from source.run(SPACE)
        yield from source.expect(":")
        entries[key] = yield from python_literal(source, levels)
        yield from source.run(SPACE)
        if (yield from source.accept(",")) is None:
            yield from source.expect("}")
            break
        yield from source.run(SPACE)
    return json_object_of(entries)


def _strings(source: Source) -> Reading[str]:
    """Take one string after the other, and join them as Python does."""
    parts = list[str]()
    while (quote := (yield from source.accept(*QUOTES))) is not None:
        # Two quotation marks are an empty string, unless a third one follows.
        parts.append((yield from _string(source, quote)))
        yield from source.run(SPACE)
    return "".join(parts)


def _string(source: Source, quote: str) -> Reading[str]:
    """Take the rest of a string behind its quotation mark, also over line breaks."""
    parts = list[str]()
    while True:
        if not (yield from source.peek()):
            raise NoCall
        parts.append(source.take(source.size_of(PLAIN)))
        if (mark := (yield from source.accept(quote, "'", '"', "\\"))) == quote:
            return "".join(parts)
        parts.append((yield from _escape(source, quote)) if mark == "\\" else mark or "")


def _escape(source: Source, quote: str) -> Reading[str]:
    """Take an escape behind its backslash, and return what it stands for; unknown ones stand for themselves."""
    if not (yield from source.peek()):
        raise NoCall
    kind = source.take(1)
    # JSON has this escape, and Python does not.
    if kind == "/" and quote == '"':
        return kind
    if (size := HEXADECIMAL_ESCAPES.get(kind)) is None:
        return ESCAPES.get(kind, f"\\{kind}")
    digits = yield from source.run(HEXADECIMAL, size)
    if len(digits) < size or int(digits, 16) > 0x10FFFF:
        raise NoCall
    return chr(int(digits, 16))


def _number(text: str) -> str:
    """Return a number as JSON."""
    if JSON_NUMBER.fullmatch(text) is not None:
        return text
    if len(text) > DIGITS_MAX or NUMBER.fullmatch(text) is None:
        raise NoCall
    try:
        value = int(text) if text.lstrip("+-").replace("_", "").isdigit() else float(text)
    except ValueError:
        raise NoCall from None
    if value in {float("inf"), float("-inf")}:
        raise NoCall
    return encoded(value)
