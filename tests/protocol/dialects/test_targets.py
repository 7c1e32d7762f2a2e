"""The headers by which load tools state how fast they want their answers."""

from __future__ import annotations

import pytest

from protocol.dialects.targets import HEADERS, NO_TARGETS, Targets, targets_of
from protocol.errors import BadRequest


@pytest.mark.parametrize(
    ("headers", "ttft_ms", "itl_ms"),
    [
        ({}, None, None),
        ({b"x-request-id": b"1", b"x-slo": b"5"}, None, None),
        ({b"x-slo-ttft-ms": b"500"}, 500, None),
        ({b"x-slo-tpot-ms": b"12.5"}, None, 12.5),
        ({b"x-slo-ttft-ms": b"0", b"x-slo-tpot-ms": b"0.0"}, 0, 0),  # a target as any other
        ({b"x-llm-d-slo-ttft-ms": b"200", b"x-llm-d-slo-tpot-ms": b"50"}, 200, 50),
        ({b"x-sgl-ttft-slo-ms": b"1000", b"x-sgl-tps-slo": b"40"}, 1000, 25),
        ({b"x-sgl-tps-slo": b"0.5"}, None, 2000),
        ({b"x-slo-ttft-ms": b"3600000"}, 3_600_000, None),
        ({b"x-sgl-ttft-slo-ms": b"1", b"x-llm-d-slo-ttft-ms": b"2", b"x-slo-ttft-ms": b"3"}, 3, None),
        ({b"x-sgl-tps-slo": b"1", b"x-llm-d-slo-tpot-ms": b"2"}, None, 2),
    ],
)
def test_each_header_is_read_in_its_unit(
    headers: dict[bytes, bytes], ttft_ms: float | None, itl_ms: float | None
) -> None:
    assert targets_of(headers) == Targets(ttft_ms, itl_ms)


WRONG = [b"", b"-1", b"+1", b"nan", b"inf", b"1e3", b"0x10", b"1.", b".5", b"1,5", b"500, 500", b"500ms", b"1_000"]


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", [*WRONG, b"\xc2\xb2", b"9" * 400, b"3600000.1"])
def test_a_value_that_is_no_number_in_its_range_is_refused_by_name(name: bytes, value: bytes) -> None:
    if (name, value) == (b"x-sgl-tps-slo", b"3600000.1"):
        assert targets_of({name: value}) == Targets(None, 1000 / 3_600_000.1)
        return
    with pytest.raises(BadRequest, match=f"the header {name.decode()} must be a number") as caught:
        targets_of({name: value})
    assert caught.value.param == name.decode()


@pytest.mark.parametrize("rate", [b"0", b"0.0", b"0.0001"])
def test_no_tokens_in_an_hour_are_no_target(rate: bytes) -> None:
    with pytest.raises(BadRequest, match="tokens a second above"):
        targets_of({b"x-sgl-tps-slo": rate})


def test_targets_fall_back_one_by_one_and_0_is_a_target() -> None:
    assert Targets(0, None).or_else(Targets(5, 7)) == Targets(0, 7)
    assert NO_TARGETS.or_else(Targets(5, 0)) == Targets(5, 0)
    assert Targets(1, 2).or_else(NO_TARGETS) == Targets(1, 2)
