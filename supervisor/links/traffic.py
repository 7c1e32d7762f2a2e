"""Counts of the messages and bytes on a link; counting tokens would cost more than sending them."""

from __future__ import annotations

from attrs import define, frozen


@define(eq=False)
class Traffic:
    """Messages and bytes in each direction, over one link, or over all links to a node until it is forgotten."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    waits: int = 0  # askers that waited for a stream or for room

    def add(self, other: Traffic) -> Traffic:
        """Add the counts of another link; returns itself."""
        self.messages_sent += other.messages_sent
        self.messages_received += other.messages_received
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        self.waits += other.waits
        return self

    def waited(self) -> None:
        """Count an asker that waits."""
        self.waits += 1

    def sent(self, size: int) -> None:
        """Count a sent message of `size` bytes."""
        self.messages_sent += 1
        self.bytes_sent += size

    def received(self, size: int) -> None:
        """Count a received message of `size` bytes."""
        self.messages_received += 1
        self.bytes_received += size


@frozen
class LinkStatistics:
    """Counts of the state of one end of a link at this moment."""

    answers: int  # requests of this end, until the other end has ended their streams
    calls: int  # requests of the other end, until they are released
    streams_asked: int  # by the protocol's count: cancelled streams too, until they end
    streams_served: int
    queued_bytes: int  # frames without attachments
