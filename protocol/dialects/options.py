"""The fields that every dialect shares, with their limits: each range is written here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from attrs import frozen

from protocol.messages import Respond, Turn

from .mistakes import Mistake, describe

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024
STOP_TOKENS_MAX = 64


@frozen
class Within:
    """A number's bounds; `above` excludes itself."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None

    def complaint(self, value: object) -> str | None:
        """Say which bound a number breaks."""
        assert isinstance(value, int | float)
        fine = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )
        if fine:
            return None
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        words = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return f"must be {words}, got {describe(value).removesuffix('.0')}"


@frozen
class Holds:
    """How many characters or items something may hold."""

    at_least: int = 0
    at_most: int | None = None

    def complaint(self, value: object) -> str | None:
        """Say that a string, list or object is too short or too long."""
        assert isinstance(value, str | list | tuple | dict)
        what = "characters" if isinstance(value, str) else "items"
        if len(value) < self.at_least:
            return "must not be empty" if self.at_least == 1 else f"must hold at least {self.at_least} {what}"
        if self.at_most is not None and len(value) > self.at_most:
            return f"must hold at most {self.at_most} {what}, holds {len(value)}"
        return None


@frozen
class Matches:
    """A pattern that a whole string must match, and the words for it."""

    pattern: str
    words: str

    def complaint(self, value: object) -> str | None:
        """Say that a string does not match."""
        assert isinstance(value, str)
        return None if re.fullmatch(self.pattern, value) else f"must be {self.words}, got {describe(value)}"


@frozen
class TopK:
    """-1 means all tokens, so zero is the one small number that means nothing."""

    def complaint(self, value: object) -> str | None:
        """Say that a number is neither -1 nor a count."""
        assert isinstance(value, int)
        if value == -1 or 1 <= value <= INT32_MAX:
            return None
        return f"must be -1 (all tokens) or from 1 to {INT32_MAX}, got {describe(value)}"


Name = Annotated[str, Holds(1, 256)]
TokenCount = Annotated[int, Within(at_least=1, at_most=INT32_MAX)]
Penalty = Annotated[float, Within(at_least=-2, at_most=2)]
StopString = Annotated[str, Holds(1, STOP_CHARACTERS_MAX)]
StopStrings = Annotated[tuple[StopString, ...], Holds(0, STOPS_MAX)]
TokenId = Annotated[int, Within(at_least=0, at_most=INT32_MAX)]


@frozen(kw_only=True)
class Options:
    """How the client wants tokens to be chosen and the answer to end; None leaves it to the model."""

    temperature: Annotated[float, Within(at_least=0, at_most=2)] | None = None
    top_p: Annotated[float, Within(above=0, at_most=1)] | None = None
    top_k: Annotated[int, TopK()] | None = None
    min_p: Annotated[float, Within(at_least=0, at_most=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Within(above=0, at_most=2)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Holds(0, STOP_TOKENS_MAX)] | None = None
    min_tokens: Annotated[int, Within(at_least=0, at_most=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Within(at_least=-INT64_MAX - 1, at_most=INT64_MAX)] | None = None

    def disagreements(self, tokens_max: int | None, spelled: str) -> Iterator[Mistake]:
        """Yield what is wrong between fields that are each right; `spelled` is the client's name for `tokens_max`."""
        if tokens_max is not None and (self.min_tokens or 0) > tokens_max:
            yield Mistake("min_tokens", f"must be at most {spelled} ({tokens_max}), got {self.min_tokens}")


def respond(
    options: Options, *, request_id: str, turns: tuple[Turn, ...], tokens_max: int | None, params: dict[str, str]
) -> Respond:
    """Return the request that a processor understands."""
    stop = options.stop or ()
    return Respond(
        id=request_id,
        turns=turns,
        tokens_max=tokens_max,
        tokens_min=options.min_tokens or 0,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=options.repetition_penalty,
        stop=(stop,) if isinstance(stop, str) else stop,
        stop_token_ids=options.stop_token_ids or (),
        ignore_eos=options.ignore_eos or False,
        seed=options.seed,
        params=params,
    )
