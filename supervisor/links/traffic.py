"""Counts of what has crossed a link: by the message, since counting tokens would cost more than sending them."""

from __future__ import annotations

from attrs import define, frozen


@define(eq=False)
class Traffic:
    """Messages and bytes in each direction, over one link, or over all links to a node while it is known."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    waits: int = 0  # of askers, for another stream to end or for room

    def add(self, other: Traffic) -> Traffic:
        """Add the counts of another link; returns itself."""
        self.messages_sent += other.messages_sent
        self.messages_received += other.messages_received
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        self.waits += other.waits
        return self

    def waited(self) -> None:
        """Count an asker that had to wait."""
        self.waits += 1

    def sent(self, size: int) -> None:
        """Count a message of `size` bytes that was sent."""
        self.messages_sent += 1
        self.bytes_sent += size

    def received(self, size: int) -> None:
        """Count a message of `size` bytes that was received."""
        self.messages_received += 1
        self.bytes_received += size


@frozen
class LinkStatistics:
    """Counts of what one end of a link holds at this moment."""

    answers: int  # of requests whose streams the other end has not ended
    calls: int  # that this end serves
    streams_asked: int  # as the protocol counts them: also those that were cancelled and have not ended yet
    streams_served: int
    queued_bytes: int  # of frames
