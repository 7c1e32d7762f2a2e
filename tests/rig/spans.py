"""A port of spans that keeps what it gets, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from attrs import define, field

from actors.kit.spans import Span, Spans
from protocol.trace import Trace, child_span


@define(eq=False)
class KeptSpans(Spans):
    """The spans of every sampled trace, in the order of their ends."""

    all: list[Span] = field(factory=list)
    _numbers: Iterator[int] = field(factory=lambda: count(1))

    def takes(self, trace: Trace | None) -> bool:
        return trace is not None and trace.sampled

    def child(self, before: Trace | None) -> Trace | None:
        return (
            None
            if before is None or not before.sampled
            else child_span(before, f"{(0xABC << 48) + next(self._numbers):032x}")
        )

    def record(self, span: Span) -> None:
        self.all.append(span)

    def tree(self, parent: str | None) -> list[str]:
        """Return the names of the spans below one in the order of their beginnings, indented."""
        lines: list[str] = []
        for span in sorted(self.all, key=lambda each: each.began_at):
            if span.trace.parent == parent:
                lines += [span.name, *(f"  {line}" for line in self.tree(span.trace.span))]
        return lines

    def named(self, name: str) -> list[Span]:
        return [span for span in self.all if span.name == name]
