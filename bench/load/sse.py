"""A parser of server-sent events, by their specification, for bytes that are cut anywhere."""

from __future__ import annotations

from attrs import define, field

from bench.load.messages import RequestFailed

EVENT_BYTES_MAX = 32 * 1024 * 1024

MARK = b"\xef\xbb\xbf"  # of UTF-8, which may stand before the first line

Event = tuple[bytes, bytes]  # its name, empty if it has none, and its data


@define
class EventStream:
    """Collects lines into events. Comments, ids and retry times are ignored."""

    _rest: list[bytes] = field(factory=list)  # of a line that has begun, in parts: together they may be megabytes
    _rest_size: int = 0
    _name: bytes = b""
    _data: list[bytes] = field(factory=list)
    _size: int = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes; raises `RequestFailed` at one that is too long."""
        # A carriage return at the end may be half of a line's end.
        continues = b"\n" not in data and b"\r" not in data and not (self._rest and self._rest[-1].endswith(b"\r"))
        if continues:
            self._keep(data)
            events = []
        else:
            buffer = b"".join([*self._rest, data])
            cut = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, max(len(buffer) - 1, 0))) + 1
            self._rest, self._rest_size = [], 0
            self._keep(buffer[cut:])
            events = self._lines(buffer[:cut].splitlines())
        if self._size + self._rest_size > EVENT_BYTES_MAX:
            raise RequestFailed("shape", "an event that does not end", f"after {EVENT_BYTES_MAX} bytes")
        return events

    def end(self) -> list[Event]:
        """Return the event that lacked only its blank line when the stream ended; an unfinished line is dropped."""
        rest = b"".join(self._rest)
        return self._lines([*([rest[:-1]] if rest.endswith(b"\r") else []), b""])

    def _keep(self, part: bytes) -> None:
        if part:
            self._rest.append(part)
            self._rest_size += len(part)

    def _lines(self, lines: list[bytes]) -> list[Event]:
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                self._data.append(value)
                self._size += len(value)
            elif not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data.clear()
                self._name, self._size = b"", 0
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif line.startswith(MARK):
                events += self._lines([line[len(MARK) :]])
        return events
