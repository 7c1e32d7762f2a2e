"""SGLang's hand-offs: rooms, hosts, ports and states as bytes, and bytes that are none of these."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.sglang.hand_off import (
    HAND_OFF,
    HOST_LENGTH_MAX,
    NO_PARTNER,
    ROOM_MAX,
    Rendezvous,
    address,
    check_hand_off,
    rendezvous,
    state,
)
from protocol.errors import HandOffFailed
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds

INFO = EngineInfo("sglang", "1", 100, 64, 128, 60, 4, 16, honours_seed=True, hand_off=HandOff.CONCURRENT)
PREFILL = evolve(INFO, hand_off_address=address("::1", 8998), data_parallel=3)


def asked(hand_off: bytes) -> Generate:
    return Generate("r", TokenIds.of([1, 2, 3]), Sampling(4), hand_off=hand_off)


@given(st.integers(0, ROOM_MAX), st.integers(1, 65535), st.sampled_from(["10.0.0.1", "::1", "p.example", NO_PARTNER]))
def test_a_rendezvous_is_read_as_it_was_written(room: int, port: int, host: str) -> None:
    meeting = Rendezvous(room, host, port)
    assert Rendezvous.decode(meeting.encode()) == meeting


@given(st.integers(0, ROOM_MAX - 40), st.integers(0, 2))
def test_the_remainder_of_a_room_is_the_rank_and_rooms_drawn_together_differ(first: int, rank: int) -> None:
    made = [rendezvous(PREFILL, rank=rank, number=number) for number in range(first, first + 40)]
    meetings = [Rendezvous.decode(each) for each in made]
    assert {(each.host, each.port, each.room % 3) for each in meetings} == {("::1", 8998, rank)}
    assert len({each.room for each in meetings}) == 40


def test_a_leg_without_a_partner_meets_nobody_in_a_room_of_its_rank() -> None:
    alone = Rendezvous.decode(HAND_OFF.without_partner(PREFILL, rank=2, number=7))
    assert (alone.has_partner, alone.host, alone.room % 3) == (False, NO_PARTNER, 2)


def test_a_prefill_meets_no_decode_elsewhere_and_a_decode_meets_any_prefill() -> None:
    other = rendezvous(evolve(PREFILL, hand_off_address=address("::1", 8999)), rank=0, number=1)
    with pytest.raises(HandOffFailed, match="the rendezvous is at another prefill"):
        check_hand_off(asked(other), PREFILL)
    check_hand_off(asked(other), INFO)
    check_hand_off(asked(rendezvous(PREFILL, rank=2, number=1)), PREFILL)
    check_hand_off(asked(HAND_OFF.without_partner(PREFILL, rank=2, number=7)), PREFILL)


def test_a_state_is_a_rendezvous_at_its_prefill_and_a_decode_takes_it_for_its_own_prompt_alone() -> None:
    prefill, decode = (evolve(info, hand_off=HandOff.SEQUENTIAL) for info in (PREFILL, INFO))
    found = state(prefill, evolve(asked(b""), rank=2), number=5)
    meeting = Rendezvous.decode(found)
    assert (meeting.host, meeting.port, meeting.room % 3) == ("::1", 8998, 2)
    check_hand_off(asked(b""), prefill)
    check_hand_off(asked(found), decode)
    with pytest.raises(HandOffFailed, match="no state of this prompt"):
        check_hand_off(evolve(asked(found), tokens=TokenIds.of([1, 2])), decode)
    with pytest.raises(HandOffFailed, match="no state of this prompt"):
        check_hand_off(asked(rendezvous(prefill, rank=0, number=1)), decode)


def test_a_leg_of_a_sequential_pair_is_asked_alone_without_a_state() -> None:
    prefill, decode = (evolve(info, hand_off=HandOff.SEQUENTIAL) for info in (PREFILL, INFO))
    assert HAND_OFF.without_partner(prefill, rank=0, number=7) == b""
    check_hand_off(asked(HAND_OFF.without_partner(decode, rank=0, number=7)), decode)


@pytest.mark.parametrize(
    ("hand_off", "why"),
    [
        (b"", "of 0 bytes"),
        (b"7 bytes", "of 7 bytes"),
        (bytes(8), "cannot be read"),
        (b"\xff" * 8 + address("h", 1), "from 0 to"),
        (Rendezvous(1, "h", 0).encode(), "at port 0"),
        (Rendezvous(1, "", 1).encode(), "port 1 of ''"),
        (Rendezvous(1, "h\n", 1).encode(), "no bootstrap server"),
        (Rendezvous(1, "h" * (HOST_LENGTH_MAX + 1), 1).encode(), "no bootstrap server"),
        (bytes(9) + b"\x01\xff", "cannot be read"),
        (Rendezvous(1, "h", 1).encode() + b"\0", "has 16 bytes, got 0"),
    ],
)
def test_bytes_that_are_no_rendezvous_are_refused_by_name(hand_off: bytes, why: str) -> None:
    with pytest.raises(HandOffFailed, match=why):
        Rendezvous.decode(hand_off)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_rendezvous_or_refused(hand_off: bytes) -> None:
    try:
        meeting = Rendezvous.decode(hand_off)
    except HandOffFailed:
        return
    assert meeting.encode() == hand_off


@pytest.mark.parametrize("announced", [None, b"", b"\x00", address(NO_PARTNER, 1)])
def test_a_prefill_with_another_address_than_a_bootstrap_server_is_not_met(announced: bytes | None) -> None:
    with pytest.raises(HandOffFailed):
        rendezvous(evolve(PREFILL, hand_off_address=announced), rank=0, number=1)


@pytest.mark.parametrize(
    ("host", "shown"), [("10.0.0.1", "10.0.0.1"), ("prefill-0", "prefill-0"), ("fd00::1", "[fd00::1]")]
)
def test_an_ipv6_address_is_in_brackets_where_a_port_follows(host: str, shown: str) -> None:
    assert Rendezvous.decode(Rendezvous(1, host, 8998).encode()).url_host == shown
