"""Requests and results of an engine's host: with their tensors, and each that cannot be read or sent fails alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from actors.engines.host.link_messages import BODY_BYTES_MAX, HostStatistics, LinkMessages
from actors.engines.shared_tensors import SHARED_BYTES_MIN, new_region, open_tensors
from protocol.errors import NotReady, RequestError
from protocol.link import codec
from protocol.link.attachments import WINDOW_BYTES
from protocol.link.frames import End, Fail, Frame, Item, Open
from protocol.link.peer import Peer, PeerStatistics
from protocol.messages.engine import Done, Ping
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import Encode, Encoded
from protocol.messages.operations import GrammarChecked
from protocol.token_ids import TokenIds
from tests.rig.tensors import embeddings, pixels


class Host:
    """A host and its node at the two ends of a link, whose bytes are carried by `settle`."""

    def __init__(self, **limits: Any) -> None:
        self.node, self.peer = Peer("node", serves_max=0, **limits), Peer("host", serves_max=4, **limits)
        self.later: list[tuple[float, Callable[[int], None], int]] = []
        self.messages = LinkMessages(self.peer, self.call_later, lease_s=7.0)
        self.requests: list[Any] = []
        self.received: list[tuple[Frame, bytes]] = []
        self.settle()
        self.received.clear()

    def call_later(self, delay: float, callback: Callable[[int], None], stream: int) -> None:
        self.later.append((delay, callback, stream))

    def settle(self) -> None:
        while self.node.ready or self.peer.ready:
            for frame in self.peer.receive_data(self.node.data_to_send()):
                if isinstance(frame, Open):
                    self.open(frame)
            self.received += [
                (frame, bytes(self.node.attached)) for frame in self.node.receive_data(self.peer.data_to_send())
            ]

    def open(self, frame: Open) -> None:
        try:
            self.requests.append(self.messages.request(frame))
        except RequestError as error:
            self.messages.fail(frame.stream, error)

    def ask(self, body: bytes, *attached: memoryview) -> None:
        size = sum(map(len, attached))
        self.node.send(Open(self.node.asked.last + 1, body, 9, attached=size), attached)
        self.settle()


REQUESTS = (
    Generate("a", TokenIds.of([1]), Sampling(1), media=(pixels(), pixels(3 * WINDOW_BYTES), pixels().place)),
    Encode("a", pixels(12)),
    Ping(),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_is_read_with_its_tensors(request_: Any) -> None:
    host = Host()
    host.ask(codec.encode(request_), *codec.attached(request_))
    assert host.requests == [request_]


@pytest.mark.parametrize(
    ("body", "attached"),
    [
        (codec.encode(Encode("a", pixels())), b""),
        (codec.encode(Encode("a", pixels())), b"short"),
        (codec.encode(Ping()), b"too much"),
        (b"\xff\xff", b""),
        (b"", b""),
    ],
    ids=repr,
)
def test_a_request_that_cannot_be_read_fails_alone(body: bytes, attached: bytes) -> None:
    host = Host()
    host.ask(body, *[memoryview(attached)] * bool(attached))
    ((fail, _),) = host.received
    assert isinstance(fail, Fail)
    assert fail.code == "internal"
    assert "cannot read the request" in fail.detail
    host.ask(codec.encode(Ping()))
    assert host.requests == [Ping()]


@pytest.mark.parametrize("size", [8, 3 * WINDOW_BYTES])
def test_a_result_comes_behind_its_tensors(size: int) -> None:
    host, result = Host(), Encoded(embeddings(pixels(), size))
    host.messages.call_later = None  # nothing is shared that no lease ends
    host.ask(codec.encode(Ping()))
    host.messages.end(1, result)
    host.settle()
    (item, data), (end, _) = host.received
    assert item == Item(1, b"", 0, size)
    assert isinstance(end, End)
    assert codec.decode(end.body, memoryview(data)) == result
    assert host.peer.statistics() == PeerStatistics()


@pytest.mark.parametrize(
    "result", [Encoded(embeddings(pixels(), 800)), GrammarChecked("x" * BODY_BYTES_MAX)], ids=["tensor", "body"]
)
def test_a_result_that_fits_no_link_fails_its_stream_alone(result: Any) -> None:
    host = Host(attached_bytes_max=799)
    host.ask(codec.encode(Ping()))
    host.messages.end(1, result)
    host.settle()
    ((fail, _),) = host.received
    assert isinstance(fail, Fail)
    assert fail.code == "too_large"
    assert host.peer.statistics() == PeerStatistics()


# Shared memory ------------------------------------------------------------------------------

LARGE = 3 * SHARED_BYTES_MIN


def share(request: Encode) -> tuple[Encode, Callable[[], None]]:
    """Return a request whose pixels are in a region, and what closes it."""
    region = new_region()
    for _ in region.write(request.tensors):
        pass
    return request.with_tensors(region.describe(request.tensors)), region.close


def test_the_memory_of_a_request_is_unmapped_when_its_stream_ends() -> None:
    host, request = Host(), Encode("a", pixels(LARGE))
    described, close = share(request)
    ends: list[Callable[[int], None]] = [
        host.messages.ended,
        lambda stream: host.messages.fail(stream, NotReady("x")),
        lambda stream: host.messages.end(stream, Done()),
    ]
    for stream, end in enumerate(ends, start=1):
        host.ask(codec.encode(described))
        assert host.requests[-1] == request
        assert host.messages.statistics() == HostStatistics(mappings=1, mapped_bytes=LARGE)
        end(stream)
        end(stream) if end == host.messages.ended else None
        assert host.messages.statistics() == HostStatistics()
        with pytest.raises(ValueError, match="released memoryview"):
            bytes(host.requests[-1].item.data.data)
    close()


def test_a_buffer_that_somebody_computes_with_is_not_unmapped() -> None:
    host = Host()
    described, close = share(Encode("a", pixels(LARGE)))
    host.ask(codec.encode(described))
    used = memoryview(host.requests[0].item.data.data)
    host.messages.ended(1)
    assert bytes(used) == bytes(pixels(LARGE).data.data)
    close()


def shared_result(host: Host) -> Encoded:
    """Let a host share a result, and return it as the node gets it."""
    host.ask(codec.encode(Ping()))
    host.messages.end(host.node.asked.last, Encoded(embeddings(pixels(), LARGE)))
    host.settle()
    end, _ = host.received[-1]
    assert isinstance(end, End)
    result = codec.decode(end.body, shared=True)
    assert isinstance(result, Encoded)
    return result


def test_a_large_result_is_shared_until_the_node_has_taken_it() -> None:
    host = Host()
    result = shared_result(host)
    (tensor,), (mapping,) = open_tensors(result.tensors)
    assert evolve(tensor, shared=None) == embeddings(pixels(), LARGE).data
    os.close(mapping.descriptor)
    assert host.messages.statistics() == HostStatistics(regions=1, region_bytes=LARGE)
    for _ in range(2):
        host.messages.taken(1)
    assert host.messages.statistics() == HostStatistics()


def test_a_result_that_nobody_takes_is_freed_after_its_lease() -> None:
    host = Host()
    shared_result(host)
    ((delay, callback, stream),) = host.later
    assert delay == 7.0
    callback(stream)
    assert host.messages.statistics() == HostStatistics()
