"""Answers that are read in the background, and how each ended beside the whole text."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bench.rig.clients import BackgroundReader, Chat, Outcome, chat_body
from bench.rig.node import wait_until

Ending = Literal["exact", "other text", "cut, looks whole", "error", "cut", "no end"]
"""How an answer ended: with the whole text; claiming to be whole with another text, or with a part of it; with an error
that says so; without a word, as the connection did; or not at all."""


class WatchedAnswer:
    """One answer that a thread reads."""

    def __init__(self, port: int, prompt: str, tokens: int, *, stream: bool = True) -> None:
        self.prompt = prompt
        self._chat = Chat(port, chat_body(prompt, tokens, stream=stream))
        self.outcome = self._chat.outcome  # its text and end so far
        self._reader = BackgroundReader(self._chat.read if stream else self._read_whole)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read."""
        return self._reader.outcome is not None

    def next_after(self, at: float) -> float | None:
        """Return how long after a time the next piece came, in seconds; None without one."""
        later = self.outcome.times[bisect_right(self.outcome.times, at) :]
        return later[0] - at if later else None

    def pieces_after(self, at: float) -> int:
        """Return how many pieces have come after a time."""
        return len(self.outcome.times) - bisect_right(self.outcome.times, at)

    def ending(self, whole: str) -> Ending:
        """Return how it ended, by the text that it should have."""
        outcome = self.outcome
        if not self.ended:
            return "no end"
        if outcome.error is not None:
            return "cut" if outcome.error.get("code") == "connection" else "error"
        if not outcome.whole:
            return "cut" if outcome.finish is None else "error"
        if outcome.text == whole:
            return "exact"
        return "cut, looks whole" if whole.startswith(outcome.text) else "other text"

    def leave(self) -> None:
        """Disconnect, if it has not ended."""
        self._chat.leave()
        wait_until(lambda: self.ended, 5.0)

    def _read_whole(self) -> Outcome:
        for choice in self._chat.read_body().get("choices", ()):
            self.outcome.text, self.outcome.finish = choice["message"]["content"], choice["finish_reason"]
        return self.outcome


def wait_begun(answers: Sequence[WatchedAnswer], pieces: int, within_s: float) -> bool:
    """Wait until each streamed answer has so many pieces; return whether each has, and goes on."""
    begun = wait_until(lambda: all(each.outcome.pieces >= pieces or each.ended for each in answers), within_s)
    return begun is not None and not any(each.ended for each in answers)


def wait_ended(answers: Sequence[WatchedAnswer], within_s: float) -> None:
    """Wait until each answer has ended, or the time is over."""
    wait_until(lambda: all(each.ended for each in answers), within_s)


def whole_texts(port: int, prompts: Iterable[str], tokens: int, within_s: float) -> dict[str, str]:
    """Return the whole answers by their prompts, asked for at once; raises `RuntimeError` if one does not come."""
    answers = [WatchedAnswer(port, prompt, tokens) for prompt in prompts]
    wait_ended(answers, within_s)
    for answer in answers:
        if not answer.ended or not answer.outcome.whole:
            raise RuntimeError(f"the server does not answer: {answer.outcome.status} {answer.outcome.error}")
    return {answer.prompt: answer.outcome.text for answer in answers}


def endings(answers: Iterable[WatchedAnswer], whole: Mapping[str, str]) -> str:
    """Return how many answers ended in each way, in words."""
    counts = Counter(answer.ending(whole[answer.prompt]) for answer in answers)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items())) or "none"
