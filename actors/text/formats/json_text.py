"""JSON as a model writes it: a value is read by JSON's own syntax (RFC 8259), which alone decides where it ends."""

from __future__ import annotations

import re

from actors.text.formats.source import NoCall, Reading, Source

SPACE = " \t\n\r"
LEVELS_MAX = 64  # of nesting; Python's own parser has a limit, too
ESCAPED = '"\\/bfnrt'
HEXADECIMAL = "0123456789abcdefABCDEF"
NUMBER_CHARACTERS = "0123456789+-.eE"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
WORDS = ("true", "false", "null")
ENDS = {"{": "}", "[": "]"}
# Of a string: what is not its end, not an escape, and no control character.
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


def json_value(source: Source) -> Reading[str]:
    """Take one JSON value, white space before it included, and return its text; raises `NoCall` if it is none."""
    yield from source.run(SPACE)
    parts = list[str]()
    ends = list[str]()  # of the objects and lists that are open
    while True:
        begin = yield from source.peek()
        if begin in ENDS:
            parts.append(source.take(1))
            ends.append(ENDS[begin])
            if len(ends) > LEVELS_MAX:
                raise NoCall
            parts.append((yield from source.run(SPACE)))
            if (end := (yield from source.accept(ends[-1]))) is None:
                if begin == "{":
                    yield from _key(source, parts)
                continue
            parts.append(end)
            ends.pop()
        else:
            parts.append((yield from json_scalar(source)))
        # A value is complete, and with it those around it that end here.
        while ends and (yield from _mark_behind(source, parts, ends[-1])) != ",":
            ends.pop()
        if not ends:
            return "".join(parts)
        if ends[-1] == "}":
            yield from _key(source, parts)


def json_scalar(source: Source) -> Reading[str]:
    """Take a string, a number, `true`, `false` or `null`, and return its text; raises `NoCall`."""
    first = yield from source.peek()
    if first == '"':
        return (yield from json_string(source))
    if not first or first not in "-0123456789":
        return (yield from source.expect(*WORDS))
    number = yield from source.run(NUMBER_CHARACTERS)
    if NUMBER.fullmatch(number) is None:
        raise NoCall
    return number


def json_string(source: Source) -> Reading[str]:
    """Take a JSON string and return its text with its quotes; raises `NoCall`."""
    parts = [(yield from source.expect('"'))]
    while True:
        if not (yield from source.peek()):
            raise NoCall
        parts.append(source.take(source.size_of(PLAIN)))
        if (mark := (yield from source.accept('"', "\\"))) is None:
            # A control character has no place in a string. Anything else is the next text, which has just come.
            if source.size_of(PLAIN) == 0:
                raise NoCall
            continue
        parts.append(mark)
        if mark == '"':
            return "".join(parts)
        parts.append(escape := (yield from source.expect(*ESCAPED, "u")))
        if escape == "u":
            parts.append(digits := (yield from source.run(HEXADECIMAL, 4)))
            if len(digits) < 4:
                raise NoCall


def _key(source: Source, parts: list[str]) -> Reading[None]:
    """Take a key of an object and its colon, with the white space around."""
    parts.append((yield from json_string(source)))
    parts.append((yield from source.run(SPACE)))
    parts.append((yield from source.expect(":")))
    parts.append((yield from source.run(SPACE)))


def _mark_behind(source: Source, parts: list[str], end: str) -> Reading[str]:
    """Take a comma, with the white space around it, or the `end` of an object or a list, and return that mark."""
    parts.append((yield from source.run(SPACE)))
    parts.append(mark := (yield from source.expect(",", end)))
    if mark == ",":
        parts.append((yield from source.run(SPACE)))
    return mark
