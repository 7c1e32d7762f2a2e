"""W3C Trace Context in headers and messages, and the spans of a request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from protocol.link import codec
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from protocol.trace import STATE_CHARACTERS_MAX, Trace, as_headers, child_span, from_headers, log_fields

ID, SPAN, DRAWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "0123456789abcdef" * 2
PARENT = f"00-{ID}-{SPAN}-01"
ASKER = Trace(ID, SPAN)


def headers(parent: str, *states: str) -> list[Any]:
    return [(b"traceparent", parent.encode("latin-1")), *((b"tracestate", state.encode("latin-1")) for state in states)]


# Headers of a client -----------------------------------------------------------------------


def test_a_traceparent_names_the_span_of_the_caller() -> None:
    assert from_headers(headers(PARENT)) == ASKER
    assert from_headers(headers(PARENT[:-1] + "0")) == evolve(ASKER, sampled=False)
    assert from_headers([(b"host", b"oak"), *headers(PARENT)]) == ASKER
    assert from_headers([(b"host", b"oak")]) is None


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-will-be-like", "-é\x01"])
@pytest.mark.parametrize("version", ["01", "cc", "fe"])
def test_of_a_later_version_the_shared_part_is_read_and_version_0_is_sent(version: str, more: str) -> None:
    trace = from_headers(headers(f"{version}-{ID}-{SPAN}-01{more}"))
    assert trace == ASKER
    assert as_headers(trace) == {"traceparent": PARENT}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT[:-1],
        f"{PARENT}-",
        f"{PARENT}-what",
        f"{PARENT}\n",
        f"{PARENT},{PARENT}",
        PARENT.upper(),
        PARENT.replace(ID, "0" * 32),
        PARENT.replace(SPAN, "0" * 16),
        PARENT.replace(SPAN, f"{SPAN}0"),
        PARENT.replace(SPAN, "٣" * 8),
        f"ff{PARENT[2:]}",
        f"cc{PARENT[2:]}.what",
        PARENT[:-2] + ".0",
        "00-" * 10_000,
    ],
)
def test_an_invalid_traceparent_is_ignored(parent: str) -> None:
    assert from_headers([(b"traceparent", parent.encode()), (b"tracestate", b"a=b")]) is None


@given(st.binary(max_size=80))
def test_any_bytes_in_headers_give_a_valid_trace_or_none(data: bytes) -> None:
    from_headers([(b"traceparent", data), (b"tracestate", data)])
    trace = from_headers([*headers(PARENT), (b"tracestate", data)])
    assert trace is not None
    assert (trace.id, trace.span) == (ID, SPAN)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans(), st.sampled_from(["", "a=b,c@d=e f"]))
def test_headers_are_read_as_they_were_written(number: int, span: int, sampled: bool, state: str) -> None:
    trace = Trace(f"{number:032x}", f"{span:016x}", sampled=sampled, state=state)
    assert from_headers([(name.encode(), value.encode()) for name, value in as_headers(trace).items()]) == trace


# State of other tracing systems -----------------------------------------------------


@pytest.mark.parametrize(
    ("states", "carried"),
    [
        (["foo=1,bar=2"], "foo=1,bar=2"),
        (["foo=1", "bar=2"], "foo=1,bar=2"),
        (["foo=1 \t , \tbar=2, ,", ""], "foo=1,bar=2"),
        (["fw529a3039@dt=FfAxeA,0_-*/@a= !~"], "fw529a3039@dt=FfAxeA,0_-*/@a= !~"),
        ([",".join(f"k{n}=v" for n in range(32))], ",".join(f"k{n}=v" for n in range(32))),
        ([",".join(f"k{n}=v" for n in range(33))], ""),
        (["foo=1,foo=2"], ""),
        (["Foo=1"], ""),
        (["foo="], ""),
        (["foo=é"], ""),
        (["foo=1;bar=2\x00"], ""),
        (["x" * 257 + "=1"], ""),
        (["foo=" + "x" * 257], ""),
    ],
)
def test_a_tracestate_is_kept_whole_or_ignored(states: list[str], carried: str) -> None:
    assert from_headers(headers(PARENT, *states)) == evolve(ASKER, state=carried)


def state_of(members: list[str]) -> str:
    trace = from_headers(headers(PARENT, ",".join(members)))
    assert trace is not None
    return trace.state


def test_a_tracestate_that_is_too_long_loses_its_longest_members_then_its_last() -> None:
    long, short = "l=" + "x" * 200, [f"k{n}=" + "x" * 97 for n in range(6)]
    assert state_of([long, *short[:2]]) == ",".join([long, *short[:2]])
    assert state_of([long, *short[:4]]) == ",".join(short[:4])
    kept = state_of([long, *short])
    assert kept == ",".join(short[:5])
    assert len(kept) <= STATE_CHARACTERS_MAX


# Spans ------------------------------------------------------------------------------------


def test_a_child_span_is_in_the_same_trace_and_names_its_parent() -> None:
    asker = evolve(ASKER, state="a=b", sampled=False)
    assert child_span(asker, DRAWN) == Trace(ID, DRAWN[16:], SPAN, sampled=False, state="a=b")
    assert child_span(None, DRAWN) == Trace(DRAWN, DRAWN[16:])


def test_only_a_sampled_trace_with_a_parent_is_followed() -> None:
    assert child_span(ASKER, DRAWN).followed
    assert not child_span(evolve(ASKER, sampled=False), DRAWN).followed
    assert not child_span(None, DRAWN).followed


def test_the_log_fields_are_the_trace_the_span_and_the_parent() -> None:
    assert log_fields(None) == {}
    assert log_fields(child_span(None, DRAWN)) == {"trace": DRAWN, "span": DRAWN[16:]}
    assert log_fields(child_span(ASKER, DRAWN)) == {"trace": ID, "span": DRAWN[16:], "parent": SPAN}


# Over a link ------------------------------------------------------------------------------


def test_a_request_without_a_trace_is_decoded() -> None:
    request = Generate("a" * 32, TokenIds.of([1]), Sampling(1))
    fields = asdict(request)
    del fields["trace"]
    assert codec.decode(codec.encode(request)[:1] + msgspec.msgpack.encode(fields)) == request
