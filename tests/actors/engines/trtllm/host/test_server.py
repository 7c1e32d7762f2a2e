"""A host in this process, with the recorded fake: an engine's work ends with the request that it is for."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import define, evolve, field

from actors.engines.adapter_table import AdapterTable
from actors.engines.host.served_link import ServedLink
from actors.engines.host.watchdog import Watchdog
from actors.engines.trtllm.boot_message import build
from actors.engines.trtllm.host.library import PACKAGE, Library, Llm
from actors.engines.trtllm.host.server import TrtllmHost
from actors.engines.trtllm.signatures import VERSIONS
from protocol.errors import HandOffFailed, InternalError, RequestError
from protocol.link.frames import Frame
from protocol.link.peer import Peer
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Sampling, Started
from protocol.messages.kind import Message
from protocol.token_ids import TokenIds
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import Fault, prompt_of
from tests.rig.trtllm_engines import FAKE, SPEC

WITHIN_S = 10.0
LONG = 400  # tokens, over half a second
ONE = EngineInfo("trtllm", VERSIONS[-1], 512, 4096, 8192, 4000, 8, 16, honours_seed=False)
PREFILL = evolve(ONE, hand_off=HandOff.SEQUENTIAL, hand_off_address=b"life")
DECODE = evolve(ONE, hand_off=HandOff.SEQUENTIAL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Import the fake as the package, for one test."""
    monkeypatch.syspath_prepend(str(FAKE))
    yield Library()
    for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@define(eq=False)
class Link:
    """A link whose node is not there: only the errors of requests are kept."""

    errors: asyncio.Queue[RequestError] = field(factory=asyncio.Queue)
    states: asyncio.Queue[bytes] = field(factory=asyncio.Queue)

    @property
    def peer(self) -> Link:
        return self

    @property
    def messages(self) -> Link:
        return self

    def send(self, frame: Frame) -> None:
        """Drop a part of an answer."""

    def reply(self, stream: int, reply: Message) -> None:
        if isinstance(reply, Started):
            self.states.put_nowait(reply.hand_off)

    def flush(self) -> None:
        """Do nothing: no frame waits."""

    def fail(self, stream: int, error: RequestError) -> None:
        self.errors.put_nowait(error)


@define(eq=False)
class Watched:
    """An engine whose requests are kept."""

    llm: Any
    cancels: bool = False  # ends each request by itself, at once
    requests: list[Any] = field(factory=list)

    def generate_async(self, **arguments: object) -> Any:
        self.requests.append(self.llm.generate_async(**arguments))
        if self.cancels:
            self.requests[-1].abort()
        return self.requests[-1]


def hosted(names: Library, info: EngineInfo) -> tuple[TrtllmHost, Link, Watched]:
    """Return a host with a new engine, its link, and the engine."""
    leg = {} if info.hand_off is HandOff.NONE else {"cache_transceiver_config": {"backend": "DEFAULT"}}
    engine, link = Watched(names.start({"model": "none", "max_batch_size": 8, **leg})), Link()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer("host", serves_max=16)
        host = TrtllmHost(
            cast("Llm", engine), names, info, (), peer, theirs, Watchdog(Path()), build(SPEC, ""), AdapterTable(0)
        )
    host.link = cast("ServedLink", link)
    return host, link, engine


async def failed(host: TrtllmHost, link: Link, request: Generate) -> RequestError:
    """Return the error of a request."""
    host._start(1, request)  # noqa: SLF001  # what a frame would do
    async with asyncio.timeout(WITHIN_S):
        return await link.errors.get()


def prompt(fault: Fault, tokens_max: int = 8) -> Generate:
    return Generate("r", TokenIds.of(prompt_of(fault, 9, 8)), Sampling(tokens_max))


def test_the_engine_ends_a_request_that_failed_in_its_host(names: Library) -> None:
    async def fail() -> None:
        host, link, engine = hosted(names, ONE)
        error = await failed(host, link, evolve(prompt(Fault.LOGPROB_MISSING, LONG), logprobs=2))
        assert isinstance(error, InternalError)
        (inside,) = engine.requests
        assert inside.aborted()
        assert inside.finished, "the slot was given back while the engine computed on"
        assert len(inside.outputs[0].token_ids) < LONG
        assert not host.by_stream

    asyncio.run(fail())


def test_a_state_that_cannot_be_read_fails_its_request_alone(names: Library) -> None:
    async def fail() -> None:
        host, link, engine = hosted(names, DECODE)
        error = await failed(host, link, evolve(prompt(Fault.STUCK), hand_off=b"no state"))
        assert isinstance(error, HandOffFailed)
        assert not engine.requests
        assert not host.by_stream

    asyncio.run(fail())


def test_a_decode_that_its_engine_ends_before_the_kv_cache_has_come_lacks_its_prefill(names: Library) -> None:
    async def fail() -> None:
        prefill, before, _ = hosted(names, PREFILL)
        wanted = Generate("r", TokenIds.of([4, 5, 6]), Sampling(8))
        prefill._start(1, wanted)  # noqa: SLF001
        state = await before.states.get()
        host, link, engine = hosted(names, DECODE)
        engine.cancels = True
        error = await failed(host, link, evolve(wanted, hand_off=state))
        assert isinstance(error, HandOffFailed)
        assert not host.by_stream

    asyncio.run(fail())
