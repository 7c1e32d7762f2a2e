"""The media actor prepares whole requests within its budgets, and a request that ends gives everything back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from attrs import Factory, define, evolve
from trio.testing import MockClock

from actors.kit.fair_budget import BudgetStatistics
from actors.media.content_memory import CONTENT_BYTES_MIN
from actors.media.jobs import ImageFacts
from actors.media.media import (
    Allowance,
    Inspected,
    MediaPorts,
    MediaStatistics,
    PreparationLimits,
    Preparations,
    Source,
    media,
)
from actors.media.planning import Plan
from protocol.errors import BadRequest, DeadlineExceeded, Overloaded, RequestError, TooLarge
from protocol.messages.media import Media, MediaForm, MediaItem, MediaPrepared, Modality, PrepareMedia
from protocol.tensors import Dtype, Tensor
from tests.rig.calls import AnyAddress, mailbox
from tests.rig.vision import LAYOUT

LIMITS = PreparationLimits(
    items_max=4,
    tokens_max=1_000,
    prepare_s=60.0,
    fetched_bytes_max=16 * CONTENT_BYTES_MIN,
    prepared_bytes_max=100_000,
    fetches_max=4,
    decodes_max=2,
    waiting_max=8,
)
SIZE = 56  # pixels of a side of each image: 4 tokens
PIXEL_BYTES = SIZE * SIZE * 3


@define(eq=False)
class FakeContent:
    name: str
    size_bytes: int = CONTENT_BYTES_MIN
    open: bool = True

    def close(self) -> None:
        self.open = False


@define(eq=False)
class Ports:
    """Does nothing for as long as a URL says, as `remote fetch=1 inspect=2 decode=3`, or fails in the part it names."""

    contents: list[FakeContent] = Factory(list)
    running: list[str] = Factory(list)
    begun: list[str] = Factory(list)
    released: list[Tensor] = Factory(list)
    most: dict[str, int] = Factory(dict)
    errors: dict[str, RequestError] = Factory(dict)
    bytes_max: list[int] = Factory(list)  # of the fetches
    size: int = SIZE

    def source(self, url: str) -> Source:
        if "forbidden" in url:
            raise BadRequest("this server does not fetch from there")
        return Source(int(self.number(url, "most", CONTENT_BYTES_MIN)), is_remote="remote" in url)

    async def fetch(self, url: str, allowance: Allowance) -> FakeContent:
        self.bytes_max.append(allowance.bytes_max)
        await self.part("fetch", url)
        content = FakeContent(url, int(self.number(url, "size", CONTENT_BYTES_MIN)))
        self.contents.append(content)
        return content

    async def inspect(self, content: FakeContent, modality: Modality) -> Inspected[FakeContent]:
        await self.part("inspect", content.name)
        size = int(self.number(content.name, "pixels", self.size))
        return Inspected(content, f"{len(content.name):064x}", ImageFacts(size, size))

    async def decode(self, content: FakeContent, step: Plan) -> Tensor:
        assert content.open
        await self.part("decode", content.name)
        return Tensor(step.dtype, step.shape, memoryview(content.name.encode()))

    async def part(self, part: str, url: str) -> None:
        name = f"{part} {url}"
        self.begun.append(name)
        self.running.append(name)
        count = sum(each.startswith(part) for each in self.running)
        self.most[part] = max(self.most.get(part, 0), count)
        try:
            await trio.sleep(self.number(url, part, 0.0))
            for word, error in self.errors.items():
                if name.startswith(word.partition(" ")[0]) and word.partition(" ")[2] in url:
                    raise error
        finally:
            self.running.remove(name)

    @staticmethod
    def number(url: str, name: str, default: float) -> float:
        values = [word.partition("=")[2] for word in url.split() if word.startswith(f"{name}=")]
        return float(values[0]) if values else default


NOTHING = BudgetStatistics(taken=0, waiting=0)


@define(eq=False)
class MediaRig:
    ports: Ports
    address: AnyAddress
    preparations: Preparations[FakeContent]
    outcomes: list[Any]

    @asynccontextmanager
    async def asked(self, *urls: str, owner: str = "alice") -> AsyncIterator[tuple[MediaItem, ...]]:
        items = tuple(Media(Modality.IMAGE, url, param=f"content[{place}]") for place, url in enumerate(urls))
        async with self.address.ask(PrepareMedia("1", "seeing", items, owner), 1) as answer:
            async for prepared in answer:
                assert isinstance(prepared, MediaPrepared)
                yield prepared.items
                return
            raise AssertionError("an answer without a reply")

    async def ask(self, *urls: str, owner: str = "alice", holds_s: float = 0.0) -> None:
        async with self.asked(*urls, owner=owner):
            await trio.sleep(holds_s)


@asynccontextmanager
async def running(limits: PreparationLimits = LIMITS, ports: Ports | None = None) -> AsyncIterator[MediaRig]:
    ports, outcomes = ports or Ports(), list[Any]()
    found = MediaPorts(ports.source, ports.fetch, ports.inspect, ports.decode, ports.released.append)
    preparations = Preparations({"seeing": LAYOUT}, found, limits, lambda *ended: outcomes.append(ended))
    address: AnyAddress
    address, inbox = mailbox(4)
    async with trio.open_nursery() as nursery:
        await nursery.start(media, inbox, preparations)
        yield MediaRig(ports, address, preparations, outcomes)
        await trio.testing.wait_all_tasks_blocked()
        assert preparations.statistics() == MediaStatistics(NOTHING, NOTHING, NOTHING, NOTHING)
        assert not any(content.open for content in ports.contents)
        assert ports.running == []
        nursery.cancel_scope.cancel()


async def test_the_items_are_in_the_order_of_the_request(autojump_clock: MockClock) -> None:
    async with running() as rig, rig.asked("a fetch=2", "b", "c decode=1") as items:
        assert [bytes(item.data.data) for item in items] == [b"a fetch=2", b"b", b"c decode=1"]
        assert items[0].data.shape == (1, SIZE, SIZE, 3)
        assert {(item.form, item.tokens, item.data.dtype) for item in items} == {(MediaForm.PIXELS, 4, Dtype.UINT8)}


async def test_the_call_is_the_lease_of_the_memory(autojump_clock: MockClock) -> None:
    async with running() as rig:
        async with rig.asked("a", "b"):
            held = rig.preparations.statistics()
            assert held.prepared_bytes.taken == 2 * PIXEL_BYTES
            assert held.fetched_bytes.taken == 0  # contents are gone already
            await trio.sleep(1_000)
            assert rig.ports.released == []
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.ports.released) == 2
        assert rig.outcomes == [("seeing", "prepared", pytest.approx(0))]


async def test_items_are_prepared_at_the_same_time_within_the_limits(autojump_clock: MockClock) -> None:
    async with running() as rig:
        began_at = trio.current_time()
        urls = [f"remote {name} fetch=1 inspect=1 decode=1" for name in "abcd"]
        async with rig.asked(*urls):
            assert trio.current_time() - began_at == pytest.approx(1 + 2 + 2)  # two decoders for four items
        assert (rig.ports.most["inspect"], rig.ports.most["decode"]) == (2, 2)
        assert rig.ports.most["fetch"] == 3  # one owner's part of four


@pytest.mark.parametrize("part", ["fetch", "inspect", "decode"])
async def test_leaving_ends_the_work_in_the_same_moment(part: str, autojump_clock: MockClock) -> None:
    async with running() as rig:
        with trio.move_on_after(5) as scope:
            await rig.ask(f"remote a {part}=100", f"remote b {part}=100")
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(5)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.ports.running == []
        assert rig.outcomes == [("seeing", "left", pytest.approx(5))]


@pytest.mark.parametrize("part", ["fetch", "inspect", "decode"])
async def test_an_item_that_fails_ends_the_others_and_is_named(part: str, autojump_clock: MockClock) -> None:
    ports = Ports(errors={f"{part} bad": BadRequest("it is truncated")})
    async with running(ports=ports) as rig:
        with pytest.raises(BadRequest, match="it is truncated") as caught:
            await rig.ask("good fetch=50", f"bad {part}=1", "other decode=50")
        assert caught.value.param == "content[1]"
        assert trio.current_time() < 52
        await trio.testing.wait_all_tasks_blocked()
        assert rig.ports.running == []
        assert [outcome for _, outcome, _ in rig.outcomes] == ["invalid_request"]


async def test_every_url_is_checked_before_any_is_opened(autojump_clock: MockClock) -> None:
    async with running() as rig:
        with pytest.raises(BadRequest, match="does not fetch from there") as caught:
            await rig.ask("a", "forbidden")
        assert caught.value.param == "content[1]"
        assert rig.ports.begun == []


# Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "error", "reason", "param"),
    [
        (["a"] * 5, BadRequest, "4 images and videos, and this one has 5", "content[4]"),
        (["a", "b pixels=420", "c pixels=28"], TooLarge, "75,000 of the 100,000 bytes", "content[1]"),
        (["a", "b size=99999999"], TooLarge, "bytes together", "content[1]"),
    ],
)
async def test_what_can_never_fit_is_refused(
    urls: list[str], error: type[RequestError], reason: str, param: str, autojump_clock: MockClock
) -> None:
    async with running() as rig:
        with pytest.raises(error, match=reason) as caught:
            await rig.ask(*urls)
        assert type(caught.value) is error
        assert caught.value.param == param


async def test_more_tokens_than_a_request_may_have_are_refused_before_they_are_decoded(
    autojump_clock: MockClock,
) -> None:
    async with running(evolve(LIMITS, tokens_max=9)) as rig:
        with pytest.raises(BadRequest, match="can make 9 tokens") as caught:
            await rig.ask("a", "b", "c")
        assert caught.value.param == "content[2]"
        assert not [name for name in rig.ports.begun if name.startswith("decode")]


async def test_what_does_not_fit_into_memory_waits_for_the_leases_of_others(autojump_clock: MockClock) -> None:
    async with running(evolve(LIMITS, prepared_bytes_max=4 * PIXEL_BYTES)) as rig, AsyncExitStack() as first:
        await first.enter_async_context(rig.asked("a", "b"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.ask, "c", "d")
            await trio.testing.wait_all_tasks_blocked()
            assert rig.preparations.statistics().prepared_bytes == BudgetStatistics(2 * PIXEL_BYTES, 1)
            assert not [name for name in rig.ports.begun if name == "decode c"]
            await first.aclose()
        assert "decode c" in rig.ports.begun


async def test_requests_never_wait_for_each_others_memory_in_a_circle(autojump_clock: MockClock) -> None:
    """Each takes what it needs once and whole: many that need most of a budget still all end."""
    limits = evolve(LIMITS, prepare_s=1_000.0, waiting_max=100, prepared_bytes_max=6 * PIXEL_BYTES)
    limits = evolve(limits, fetched_bytes_max=6 * CONTENT_BYTES_MIN)
    async with running(limits) as rig, trio.open_nursery() as nursery:
        for number in range(30):
            names = [f"remote {number}.{place} fetch=1 inspect=1 decode=1" for place in range(1 + number % 4)]
            nursery.start_soon(partial(rig.ask, *names, owner=f"{number % 3}", holds_s=2.0))
    assert len(rig.outcomes) == 30
    assert {outcome for _, outcome, _ in rig.outcomes} == {"prepared"}


async def test_a_request_that_waits_too_long_ends(autojump_clock: MockClock) -> None:
    async with running(evolve(LIMITS, prepared_bytes_max=2 * PIXEL_BYTES, prepare_s=7.0)) as rig, rig.asked("a"):
        began_at = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="not ready within 7 s"):
            await rig.ask("b")
        assert trio.current_time() - began_at == pytest.approx(7)
        await trio.sleep(100)  # the lease of the first has no such limit


async def test_too_many_requests_that_wait_are_refused(autojump_clock: MockClock) -> None:
    limits = evolve(LIMITS, fetched_bytes_max=2 * CONTENT_BYTES_MIN, waiting_max=2)
    refused: list[str] = []

    async def ask(rig: MediaRig, owner: str) -> None:
        try:
            await rig.ask("remote a fetch=10", owner=owner)
        except Overloaded:
            refused.append(owner)

    async with running(limits) as rig, trio.open_nursery() as nursery:
        for owner in ("greedy", "greedy", "greedy", "greedy", "alice"):
            nursery.start_soon(ask, rig, owner)
            await trio.testing.wait_all_tasks_blocked()
    assert refused == ["greedy", "greedy"]


async def test_one_owners_slow_servers_hold_no_other_owner(autojump_clock: MockClock) -> None:
    limits = evolve(LIMITS, fetched_bytes_max=100 * CONTENT_BYTES_MIN)
    async with running(limits) as rig, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(partial(rig.ask, f"remote slow{number} fetch=10", owner="greedy"))
        await trio.testing.wait_all_tasks_blocked()
        began_at = trio.current_time()
        await rig.ask("remote quick fetch=1", owner="alice")
        assert trio.current_time() - began_at == pytest.approx(1)


async def test_one_request_for_all_memory_to_fetch_to_leaves_room_for_other_owners(autojump_clock: MockClock) -> None:
    """Four URLs of 16 MiB each wanted exactly the 64 MiB that there are, and a small data URL waited for all of them."""
    largest = f"most={16 * CONTENT_BYTES_MIN}"
    async with running(evolve(LIMITS, fetched_bytes_max=64 * CONTENT_BYTES_MIN)) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(partial(rig.ask, *(f"remote {name} {largest} fetch=20" for name in "abcd"), owner="greedy"))
        await trio.testing.wait_all_tasks_blocked()
        assert rig.preparations.statistics().fetched_bytes.taken == 48 * CONTENT_BYTES_MIN
        assert rig.ports.most["fetch"] == 3
        began_at = trio.current_time()
        await rig.ask("small", owner="alice")
        await rig.ask(f"remote other most={12 * CONTENT_BYTES_MIN} fetch=1", owner="bob")
        assert trio.current_time() - began_at == pytest.approx(1)


async def test_items_that_may_be_larger_than_an_owners_part_are_opened_in_turn(autojump_clock: MockClock) -> None:
    async with running() as rig:
        began_at, megabyte = trio.current_time(), CONTENT_BYTES_MIN
        names = [f"remote {name} most={9 * megabyte} size={3 * megabyte} fetch=1" for name in "abcd"]
        async with rig.asked(*names) as items:
            assert len(items) == 4
        assert rig.ports.most["fetch"] == 1
        assert rig.ports.bytes_max == [9 * megabyte, 9 * megabyte, 6 * megabyte, 3 * megabyte]
        assert trio.current_time() - began_at == pytest.approx(4)


async def test_contents_beyond_an_owners_part_are_refused(autojump_clock: MockClock) -> None:
    async with running() as rig:
        four = f"most={4 * CONTENT_BYTES_MIN} size={4 * CONTENT_BYTES_MIN}"
        with pytest.raises(TooLarge, match="12,582,912 bytes together") as caught:
            await rig.ask(*(f"{name} {four}" for name in "abcd"))
        assert caught.value.param is not None


async def test_pixels_of_one_owner_leave_room_for_those_of_others(autojump_clock: MockClock) -> None:
    large = [f"{name} pixels={4 * SIZE}" for name in "abcd"]
    async with running(evolve(LIMITS, prepared_bytes_max=64 * PIXEL_BYTES)) as rig:
        with pytest.raises(TooLarge, match="451,584 of the 602,112 bytes for all"):
            await rig.ask(*large, owner="greedy")
        async with rig.asked(*large[:3], owner="greedy"):
            began_at = trio.current_time()
            await rig.ask("small", owner="alice")
            assert trio.current_time() == pytest.approx(began_at)


async def test_one_owners_large_images_leave_a_decoder_for_a_small_one_of_another(autojump_clock: MockClock) -> None:
    limits = evolve(
        LIMITS, items_max=6, tokens_max=10**6, prepared_bytes_max=2**30, fetched_bytes_max=64 * CONTENT_BYTES_MIN
    )
    async with running(limits) as rig, trio.open_nursery() as nursery:
        large = [f"large{number} pixels=2100 inspect=4 decode=4" for number in range(6)]
        nursery.start_soon(partial(rig.ask, *large, owner="greedy"))
        for at_s in (1.0, 10.0, 14.0, 18.0):
            await trio.sleep_until(at_s)
            await rig.ask("small inspect=0.1 decode=0.1", owner="alice")
            assert trio.current_time() == pytest.approx(at_s + 0.2)
        assert (rig.ports.most["inspect"], rig.ports.most["decode"]) == (3, 3), "one owner has two of them"


async def test_the_actor_that_ends_gives_back_what_its_requests_held(autojump_clock: MockClock) -> None:
    async with running() as rig:
        other = Ports()
        found: Callable[..., Any] = MediaPorts
        ports = found(other.source, other.fetch, other.inspect, other.decode, other.released.append)
        preparations = Preparations({"seeing": LAYOUT}, ports, LIMITS, lambda *_: None)
        other_address: AnyAddress
        other_address, inbox = mailbox(1)
        second = MediaRig(other, other_address, preparations, [])
        async with trio.open_nursery() as nursery:
            life = trio.CancelScope()

            async def live() -> None:
                with life:
                    await media(inbox, preparations)

            nursery.start_soon(live)
            async with second.asked("a"):
                life.cancel()
                await trio.testing.wait_all_tasks_blocked()
                assert preparations.statistics().prepared_bytes == NOTHING
                assert len(other.released) == 1
        assert rig.ports.begun == []
