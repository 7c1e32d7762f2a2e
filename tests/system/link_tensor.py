"""Delays of the tokens of a link while tensors cross it: two processes, one real WebSocket.

`python -m tests.system.link_tensor` asks a second process for 64 streams of tokens, 20 a second each, and beside them
sends tensors of 100 MB in all, as requests of 2 MB, of which as many are in flight as would need twice the room that
there is, and gets as many bytes back in their results. Every token carries when it was sent, on the clock that all
processes of a machine share, so its delay is known exactly. Alternated are stretches in which tensors cross and
stretches of the same length in which none does; compared are the delays of the tokens that were sent in them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import trio
from attrs import define, field

from actors.kit.calls import BugCounter, Call, mailbox
from protocol.errors import PeerLost
from protocol.link.greeting import Greeter
from protocol.link.peer import Peer
from protocol.messages.generation import Finished, FinishReason, Generate, Sampling, Started, Tokens, Usage
from protocol.messages.media import Encode, Encoded
from protocol.token_ids import TokenIds
from supervisor.links import websocket
from supervisor.links.encoding import TOKEN_IDS
from supervisor.links.endpoint import Endpoint
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import Link
from supervisor.links.serving import Services
from tests.rig.tensors import embeddings, pixels

ROOT = Path(__file__).parents[2]
STREAMS = 64
TOKENS_A_SECOND = 20.0
TENSORS_BYTES = 100 * 1000 * 1000  # of requests, and as many of results
TENSOR_BYTES = 12 * (2 * 1000 * 1000 // 12)  # whole pixels, and whole elements of a result
ROOM_BYTES = 8 * TENSOR_BYTES
TIMES = 5
BOUND_MS = 10.0
GREET_S = 5.0
TOKENS, TENSORS = "tokens", "tensors"
CLUSTER, LISTENS, DIALS = "bench", "listens", "dials"


def now_us() -> int:
    """Return a reading, in microseconds, of a clock that every process of this machine reads the same.

    It begins anew within half an hour, since no token's id is longer: a run in which it does is no measurement.
    """
    return time.monotonic_ns() // 1000 % TOKEN_IDS


def tell(line: str) -> None:
    """Say something to whoever started this."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# The end that answers --------------------------------------------------------------------


async def say_tokens(inbox: trio.MemoryReceiveChannel[Call[Generate, Started | Tokens, Finished]]) -> None:
    """Answer each request with tokens at a steady pace; a token's id is when it was sent."""

    async def answer_call(call: Call[Generate, Started | Tokens, Finished]) -> None:
        with call.answering(bugs) as answer:
            most = call.request.sampling.tokens_max
            due_at = trio.current_time() + int(call.request.id, 16) / STREAMS / TOKENS_A_SECOND
            answer.put(Started(0), 0)
            for _ in range(most):
                due_at += 1 / TOKENS_A_SECOND
                await trio.sleep_until(due_at)
                answer.put(Tokens((now_us(),)), 1)
            answer.end(Finished(FinishReason.LENGTH, Usage(1, most)))

    bugs = BugCounter()
    async with trio.open_nursery() as nursery:
        async for call in inbox:
            nursery.start_soon(answer_call, call)


async def give_tensors(inbox: trio.MemoryReceiveChannel[Call[Encode, Encoded, Encoded]]) -> None:
    """Answer each request with as many bytes as it has."""
    bugs = BugCounter()
    async for call in inbox:
        with call.answering(bugs) as answer:
            answer.end(Encoded(embeddings(call.request.item, TENSOR_BYTES)))


async def serve() -> None:
    """Listen on a free port, print it, and serve one link after the other."""
    tokens_inbox: trio.MemoryReceiveChannel[Call[Generate, Started | Tokens, Finished]]
    tensors_inbox: trio.MemoryReceiveChannel[Call[Encode, Encoded, Encoded]]
    tokens, tokens_inbox = mailbox(2 * STREAMS)
    tensors, tensors_inbox = mailbox(2 * STREAMS)
    serves = cast("Services", {(TOKENS, Generate): tokens, (TENSORS, Encode): tensors})

    async def talk(wire: websocket.WebSocketTransport) -> None:
        await websocket.greet(wire, Greeter("listens", CLUSTER, LISTENS, b"", bytes(32), None), GREET_S)
        with suppress(PeerLost):
            peer = Peer(LISTENS, serves_max=4 * STREAMS, attached_bytes_max=ROOM_BYTES)
            await Link(wire, peer, serves, heartbeat=Heartbeat()).run()

    async def accepted(stream: trio.SocketStream) -> None:
        await websocket.accept(stream, None, GREET_S, talk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say_tokens, tokens_inbox)
        nursery.start_soon(give_tensors, tensors_inbox)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        tell(str(listeners[0].socket.getsockname()[1]))
        await trio.serve_listeners(accepted, listeners)


# The end that asks -----------------------------------------------------------------------


@define
class Arrivals:
    """Every token that came: when it was sent and when it was here, in microseconds."""

    tokens: list[tuple[int, int]] = field(factory=list)

    def delays_ms(self, begin_us: int, end_us: int) -> list[float]:
        """Return the delays of the tokens that were sent in a stretch of time, in order of size."""
        return sorted((here - sent) / 1000 for sent, here in self.tokens if begin_us <= sent <= end_us)


async def listen_to(link: Link, number: int, tokens_max: int, arrivals: Arrivals) -> None:
    """Ask for one stream, and note its tokens until cancelled."""
    request = Generate(f"{number:032x}", TokenIds.of([1]), Sampling(tokens_max=tokens_max))
    async with link.ask(request, tokens_max, TOKENS) as replies:
        async for reply in replies:
            if isinstance(reply, Tokens):
                here = now_us()
                arrivals.tokens += [(sent, here) for sent in reply.ids]


async def cross(link: Link, size: int) -> None:
    """Send tensors of `size` bytes in all, and wait until those of their results are here and whole."""
    request = Encode("0" * 32, pixels(TENSOR_BYTES))
    limiter = trio.CapacityLimiter(2 * ROOM_BYTES // TENSOR_BYTES)

    async def one() -> None:
        async with limiter, link.ask(request, 1, TENSORS) as answer:
            result = await answer.result()
            assert isinstance(result, Encoded)
            assert len(result.item.data.data) == TENSOR_BYTES, "the tensor is not whole"

    async with trio.open_nursery() as nursery:
        for _ in range(size // TENSOR_BYTES):
            nursery.start_soon(one)


@asynccontextmanager
async def linked(port: int) -> AsyncIterator[Link]:
    """Dial the other process, and yield the link."""
    links: list[Link] = []
    up, over = trio.Event(), trio.Event()

    async def talk(wire: websocket.WebSocketTransport) -> None:
        await websocket.greet(wire, Greeter("dials", CLUSTER, DIALS, b"", bytes(range(32)), LISTENS), GREET_S)
        links.append(Link(wire, Peer(DIALS, serves_max=1, attached_bytes_max=ROOM_BYTES), heartbeat=Heartbeat()))
        async with trio.open_nursery() as nursery:
            await nursery.start(links[0].run)
            up.set()
            await over.wait()
            nursery.cancel_scope.cancel(reason="all is measured")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(websocket.dial, Endpoint("127.0.0.1", port), None, GREET_S, talk)
        await up.wait()
        yield links[0]
        over.set()


@define
class Stretch:
    """What the tokens' delays were, and for how long it was looked at; in milliseconds and seconds."""

    p50: float
    p99: float
    most: float
    tokens: int
    took_s: float

    @classmethod
    def of(cls, arrivals: Arrivals, begin_us: int, end_us: int) -> Stretch:
        """Return the stretch between two readings of the clock."""
        delays = arrivals.delays_ms(begin_us, end_us)
        return cls(
            percentile(delays, 0.5), percentile(delays, 0.99), delays[-1], len(delays), (end_us - begin_us) / 1e6
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which such a share of an ordered list is."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(port: int, times: int, size: int) -> list[tuple[Stretch, Stretch]]:
    """Return so many pairs of stretches: one while tensors cross, and one of its length in which none does."""
    arrivals, found = Arrivals(), []
    async with linked(port) as link, trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(listen_to, link, number, 1_000_000, arrivals)
        await trio.sleep(1.0)
        await cross(link, size)  # the first of anything is slower
        for _ in range(times):
            begin_us = now_us()
            await cross(link, size)
            crossed_us = now_us()
            await trio.sleep(0.5)  # what was late is here
            quiet_us = now_us()
            await trio.sleep((crossed_us - begin_us) / 1e6)
            end_us = now_us()
            await trio.sleep(0.5)
            found.append((Stretch.of(arrivals, begin_us, crossed_us), Stretch.of(arrivals, quiet_us, end_us)))
        nursery.cancel_scope.cancel(reason="all is measured")
    return found


@contextmanager
def other_end() -> Iterator[int]:
    """Start the process that answers, and end it whatever happens in the body; yield its port."""
    command = [sys.executable, "-m", "tests.system.link_tensor", "--serve"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> int:
    """Print every stretch and the medians of what the tensors added; return 1 if its p99 is over the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--bytes", type=int, default=TENSORS_BYTES)
    parser.add_argument("--serve", action="store_true", help="be the process that answers")
    arguments = parser.parse_args()
    if arguments.serve:
        trio.run(serve)
        return 0
    with other_end() as port:
        found = trio.run(partial(measure, port, arguments.times, arguments.bytes))
    megabytes = arguments.bytes / 1e6
    tell(f"{STREAMS} streams of {TOKENS_A_SECOND:g} tokens a second; {megabytes:g} MB in each direction; in ms")
    tell(f"{'':<10}{'s':>7}{'tokens':>8}{'p50':>8}{'p99':>8}{'max':>8}")
    for crossing, quiet in found:
        for name, stretch in (("crossing", crossing), ("quiet", quiet)):
            tell(
                f"{name:<10}{stretch.took_s:>7.2f}{stretch.tokens:>8}{stretch.p50:>8.2f}{stretch.p99:>8.2f}{stretch.most:>8.2f}"
            )
    added_p50 = median(crossing.p50 - quiet.p50 for crossing, quiet in found)
    added_p99 = median(crossing.p99 - quiet.p99 for crossing, quiet in found)
    tell(f"added, median of {len(found)}: p50 {added_p50:.2f} ms, p99 {added_p99:.2f} ms (bound {BOUND_MS:g} ms)")
    return 0 if added_p99 < BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
