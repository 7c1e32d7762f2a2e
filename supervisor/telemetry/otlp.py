"""The messages of OTLP for spans, as bytes of protobuf.

They are written here field by field, since a span is encoded in the event loop: with the generated classes of
`opentelemetry-proto` its attributes take 5 µs each, here less than 1. A message is the sequence of its fields, so the
bytes of several spans, one behind the other, are the spans of one message.

    ExportTraceServiceRequest  1: ResourceSpans
    ResourceSpans              1: Resource (1: attribute)   2: ScopeSpans
    ScopeSpans                 1: scope (1: its name)       2: Span
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

from actors.kit.spans import Attribute, Span
from protocol.trace import SAMPLED

TEXT_CHARACTERS_MAX = 256  # of one text
ITEMS_MAX = 32  # of one list
KEYS_MAX = 256  # of attributes, whose bytes are kept
STATUS_ERROR = 2
_UNSIGNED = 2**64 - 1
_DOUBLE = struct.Struct("<d")
_TIMES = struct.Struct("<BQBQ")
_FLAGS = struct.Struct("<HI")
_FLAGS_TAG = 0x185  # of field 16, a number that takes two bytes


def span_bytes(span: Span, zero_s: float) -> bytes:
    """Return a span as the field of a `ScopeSpans`; `zero_s` is the time since 1970 when Trio's clock was zero."""
    trace = span.trace
    began_ns, ended_ns = int((zero_s + span.began_at) * 1e9), int((zero_s + max(span.began_at, span.ended_at)) * 1e9)
    fields = [
        _sized(1, bytes.fromhex(trace.id)),
        _sized(2, bytes.fromhex(trace.span)),
        _text(3, trace.state) if trace.state else b"",
        b"" if trace.parent is None else _sized(4, bytes.fromhex(trace.parent)),
        _text(5, span.name),
        bytes((6 << 3, span.kind)),
        _TIMES.pack(7 << 3 | 1, began_ns, 8 << 3 | 1, ended_ns),
        *(_sized(9, _attribute(key, value)) for key, value in span.attributes.items() if value is not None),
    ]
    if span.error:
        fields.append(_sized(9, _attribute("error.type", span.error)))
        fields.append(_sized(15, _text(2, span.error) + bytes((3 << 3, STATUS_ERROR))))
    fields.append(_FLAGS.pack(_FLAGS_TAG, SAMPLED))
    return _sized(2, b"".join(fields))


def request_bytes(resource: Mapping[str, str], scope: str, spans: bytes) -> bytes:
    """Return the request with some spans, each from `span_bytes`."""
    described = b"".join(_sized(1, _attribute(key, value)) for key, value in resource.items())
    return _sized(1, _sized(1, described) + _sized(2, _sized(1, _text(1, scope)) + spans))


def _attribute(key: str, value: Attribute) -> bytes:
    return _key(key) + _sized(2, _value(value))


@lru_cache(maxsize=KEYS_MAX)
def _key(key: str) -> bytes:
    return _text(1, key)


def _value(value: Attribute) -> bytes:
    match value:
        case str():
            return _text(1, value)
        case bool():
            return bytes((2 << 3, value))
        case int():
            return b"\x18" + _varint(value & _UNSIGNED)
        case float():
            return b"\x21" + _DOUBLE.pack(value)
        case _:
            return _sized(5, b"".join([_sized(1, _value(each)) for each in (value or ())[:ITEMS_MAX]]))


def _text(field: int, text: str) -> bytes:
    return _sized(field, text[:TEXT_CHARACTERS_MAX].encode(errors="replace"))


def _sized(field: int, data: bytes) -> bytes:
    """Return a field of bytes, a text or a message; its number is below 16."""
    size = len(data)
    return (bytes((field << 3 | 2, size)) if size < 128 else bytes((field << 3 | 2,)) + _varint(size)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
