"""Stop strings, found while text comes: one automaton for all stop strings of a request (Aho and Corasick, 1975).

A character costs one step, amortised at most two, for any number and length of stop strings. Text is held back only
while it may be the beginning of a stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from attrs import define, field


@define(eq=False)
class StopStrings:
    """The stop strings of a request as an automaton, shared by its choices.

    A state stands for the longest suffix of the text that is a prefix of a stop string. States with one successor are
    kept in lists, so 16 stop strings of 1,024 characters take a few hundred kilobytes.
    """

    stops: Sequence[str]
    first: frozenset[str] = field(init=False)  # the first characters of the stop strings
    # Arrays by the number of a state.
    depth: array[int] = field(init=False)  # the length of its suffix, in characters
    complete: list[int] = field(init=False)  # the length of the longest stop string that ends there, or 0
    _next: list[str] = field(init=False)  # the character that leads to the next number
    _shorter: array[int] = field(init=False)  # the state of the next shorter suffix
    # Other characters than `_next`, and the states that they lead to.
    _branches: dict[tuple[int, str], int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.first = frozenset(stop[0] for stop in self.stops)
        self._next, self.depth, self.complete = [""], array("l", [0]), [0]
        for stop in self.stops:
            self._insert(stop)
        self._shorter = array("l", bytes(array("l").itemsize * len(self._next)))
        for state, character, after in sorted(self._edges(), key=lambda edge: self.depth[edge[0]]):
            if state:
                self._shorter[after] = self.step(self._shorter[state], character)
            self.complete[after] = self.complete[after] or self.complete[self._shorter[after]]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while True:
            if self._next[state] == character:
                return state + 1
            if (after := self._branches.get((state, character))) is not None:
                return after
            if not state:
                return 0
            state = self._shorter[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for length, character in enumerate(stop, 1):
            if self._next[state] == character:
                state += 1
            elif (after := self._branches.get((state, character))) is not None:
                state = after
            else:
                new = len(self._next)
                if new == state + 1 and not self._next[state]:
                    self._next[state] = character
                else:
                    self._branches[state, character] = new
                self._next.append("")
                self.depth.append(length)
                self.complete.append(0)
                state = new
        self.complete[state] = len(stop)

    def _edges(self) -> list[tuple[int, str, int]]:
        edges = [(state, character, state + 1) for state, character in enumerate(self._next) if character]
        return edges + [(state, character, after) for (state, character), after in self._branches.items()]


@define(eq=False)
class StopScanner:
    """Finds stop strings in the text of one choice, and holds back what may become one."""

    strings: StopStrings
    held: str = ""
    _state: int = 0

    def scan(self, text: str) -> tuple[str, str | None]:
        """Take the next text; return the certain text, and the stop string behind it if one is complete.

        Of several stop strings the first to be complete counts, and then the longest. Text behind it is dropped.
        """
        strings, state = self.strings, self._state
        if not state and strings.first.isdisjoint(text):
            return text, None
        for length, character in enumerate(text, 1):
            state = strings.step(state, character)
            if size := strings.complete[state]:
                whole = self.held + text[:length]
                self.held, self._state = "", 0
                return whole[:-size], whole[-size:]
        whole, keep = self.held + text, strings.depth[state]
        self._state = state
        if not keep:
            self.held = ""
            return whole, None
        self.held = whole[-keep:]
        return whole[:-keep], None

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self.held, self._state = self.held, "", 0
        return held
