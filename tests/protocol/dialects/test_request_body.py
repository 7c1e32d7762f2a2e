"""Limits of the body of a request: the event loop is blocked while one is read."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.kit.offload import OFFLOAD_SIZE_MIN
from protocol.dialects import chat, completions, request_body, responses
from protocol.dialects.request_body import (
    BYTES_A_CHARACTER,
    CHARACTERS_A_CONTAINER,
    CONTAINERS_MAX,
    COUNTED_MAX,
    decode,
    reading_work,
)
from protocol.errors import BadRequest
from protocol.strict.mistakes import Mistakes
from protocol.strict.structure import structure
from supervisor.config.keyfile import KeySection
from supervisor.gateway.keys.token_bucket import TokenBucket
from tests.rig.dialects import check_refused

TOO_MANY = "holds more than 32768 lists, objects and keys"
PART = '{"type":"text","text":""}'
PARTS = '{"role":"user","content":[' + ",".join([PART] * 16_000) + "]}"


def counted(raw: bytes) -> int:
    """Count lists, objects and keys of whole JSON, more slowly."""
    return len(re.findall(rb"[\[{:]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", raw)))


@pytest.mark.parametrize(
    "text",
    [
        '{"model":"m","messages":[' + ",".join([PARTS] * 10) + "]}",
        '{"x":[' + ",".join(["[]"] * 1_350_000) + "]}",
        "{" + ",".join(f'"{i:06x}":1' for i in range(350_000)) + "}",
        '{"x":' * 800_000,
    ],
    ids=["parts", "lists", "keys", "depth"],
)
def test_four_megabytes_of_small_containers_are_refused_unread(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msgspec.json.decode", None)  # which would take half a second and more
    with pytest.raises(BadRequest, match=TOO_MANY):
        chat.parse(text.encode())


def length(text: str) -> int:
    """Return the length of the value of the key `a`."""
    value = decode(text)["a"]
    assert isinstance(value, list | str)
    return len(value)


def test_the_limit_of_containers_is_exact_and_ignores_strings() -> None:
    most = '{"a":[' + ",".join(["[]"] * (CONTAINERS_MAX - 3)) + "]}"
    assert length(most) == CONTAINERS_MAX - 3
    with pytest.raises(BadRequest, match=TOO_MANY):
        decode(most.replace("[[]", "[[],[]", 1))
    assert length('{"a":"' + '[{:\\"' * 600_000 + '"}') == 2_400_000


@pytest.mark.parametrize("end", ["", "\\", '"'])
def test_an_unterminated_string_of_escapes_is_scanned_once(end: str) -> None:
    begun = time.process_time()
    with pytest.raises(BadRequest, match="not JSON"):
        decode('{"a":"' + ':\\"' * 1_300_000 + end)
    assert time.process_time() - begun < 10  # some 20 ms; scanning it from each escape takes hours


JSON = st.recursive(
    st.text('"\\[{:a') | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[:'), inner)
)


@given(JSON, st.integers(1, 9))
def test_containers_are_counted_exactly_however_windows_cut_strings_and_escapes(value: object, window: int) -> None:
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "WINDOW_BYTES", window)
        for limit in {0, max(0, counted(raw) - 1), counted(raw)}:
            assert request_body.has_more_containers(raw, limit) == (counted(raw) > limit)


def test_long_prompts_and_conversations_are_accepted() -> None:
    ids = list(range(100_000))
    assert completions.parse(json.dumps({"model": "m", "prompt": [ids] * 8}).encode()).prompt is not None
    messages = [{"role": "user", "content": "at 10:30, [sic]"}] * 10_000
    assert len(chat.parse(json.dumps({"model": "m", "messages": messages}).encode()).messages) == 10_000


def test_a_message_without_parts_is_refused() -> None:
    empty = [{"role": "user", "content": []}]
    check_refused(chat.parse, {"model": "m", "messages": empty}, BadRequest, "messages[0].content")
    check_refused(responses.parse_http, {"model": "m", "input": empty}, BadRequest, "input[0].content")


@pytest.mark.parametrize(("fields", "priority"), [({}, None), ({"priority": 0}, 0), ({"priority": -3}, -3)])
def test_a_priority_of_zero_is_not_the_same_as_none(fields: dict[str, int], priority: int | None) -> None:
    request = chat.parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())
    assert chat.to_respond(request, request_id="r").priority == priority


def test_the_slowest_rate_has_a_finite_wait() -> None:
    digest = "0" * 64
    with pytest.raises(Mistakes, match="rate_per_s"):
        structure({"sha256": digest, "rate_per_s": 1e-310}, KeySection)
    rate = structure({"sha256": digest, "rate_per_s": 1e-6}, KeySection).rate_per_s
    assert rate is not None
    bucket = TokenBucket.full(rate, 1, 0.0)
    bucket.take(0.0)
    assert bucket.take(0.0) == pytest.approx(1e6)


# The time that a body takes ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"a":[1,2,{}]}', b'{"a":[1,2,{}]}', "{}" + "é" * 1000, b"", ""])
def test_a_short_body_is_counted_as_a_whole(text: str | bytes) -> None:
    raw = text.encode() if isinstance(text, str) else text
    containers = raw.count(b"[") + raw.count(b"{") + raw.count(b":")
    assert reading_work(text) == len(raw) // BYTES_A_CHARACTER + CHARACTERS_A_CONTAINER * containers


@pytest.mark.parametrize("piece", ["A", "é", "{", '{"a":1},'])
def test_a_long_body_is_estimated_by_its_beginning(piece: str) -> None:
    text = piece * (10 * COUNTED_MAX // len(piece))
    assert reading_work(text) == pytest.approx(10 * reading_work(text[:COUNTED_MAX]), rel=0.01)
    assert reading_work(text.encode()) == pytest.approx(reading_work(text), rel=0.01)


@pytest.mark.parametrize("data", ["A", "é", "{", ":", "\\n"])
def test_the_event_loop_hardly_looks_at_megabytes_of_an_image(data: str) -> None:
    text = '{"messages":[{"content":[{"image_url":{"url":"data:image/png;base64,' + data * 4_000_000 + '"}}]}]}'
    for body in (text, text.encode()):
        start = time.thread_time()
        assert reading_work(body) > OFFLOAD_SIZE_MIN
        assert time.thread_time() - start < 0.005
