"""The `prompt` of completions: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import ClassVar, Self

from attrs import frozen

from protocol.dialects.options import CHOICES_MAX, INT32_MAX
from protocol.strict.mistakes import Mistakes, describe, wrong

IDS_MAX = 2**20  # of all prompts together; what is longer than a model takes is refused later, and with its length


@frozen
class TokenIds:
    """A list of token ids, which may be long."""

    kinds: ClassVar[tuple[type, ...]] = (list,)

    ids: tuple[int, ...]

    @classmethod
    def structured(cls, value: object) -> Self:
        """Return the list; raises `Mistakes` for an empty one, or one that holds anything but token ids."""
        assert isinstance(value, list)
        if not value:
            raise wrong("must not be empty")
        if len(value) > IDS_MAX:
            raise wrong(f"must hold at most {IDS_MAX} token ids, holds {len(value)}")
        # Sets and extremes at the speed of C: a long prompt must not hold up everybody else.
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) > INT32_MAX:
            raise _first_wrong(value)
        return cls(tuple(value))


def _first_wrong(value: list[object]) -> Mistakes:
    place = next(at for at, each in enumerate(value) if type(each) is not int or not 0 <= each <= INT32_MAX)
    return wrong(f"must be a token id from 0 to {INT32_MAX}, got {describe(value[place])}", f"[{place}]")


@frozen
class Prompts:
    """One or more prompts, all of them texts or all of them token ids."""

    kinds: ClassVar[tuple[type, ...]] = (str, list)

    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.texts) + len(self.token_lists)

    @classmethod
    def structured(cls, value: object) -> Self:
        """Return what a client sent as `prompt`; raises `Mistakes` for what is none."""
        if isinstance(value, str):
            return cls(texts=(value,))
        assert isinstance(value, list)
        if not value:
            raise wrong("must not be empty")
        match value[0]:
            case str():
                _check(value, str, "a string like the first one")
                return cls(texts=tuple(value))
            case list():
                _check(value, list, "a list of token ids like the first one")
                return cls(token_lists=_lists(value))
            case _:
                return cls(token_lists=(TokenIds.structured(value).ids,))


def _check(value: list[object], kind: type, words: str) -> None:
    if len(value) > CHOICES_MAX:
        raise wrong(f"must hold at most {CHOICES_MAX} prompts, holds {len(value)}")
    for place, each in enumerate(value):
        if type(each) is not kind:
            raise wrong(f"expected {words}, got {describe(each)}", f"[{place}]")


def _lists(value: list[list[object]]) -> tuple[tuple[int, ...], ...]:
    if (total := sum(map(len, value))) > IDS_MAX:
        raise wrong(f"must hold at most {IDS_MAX} token ids, holds {total}")
    out: list[tuple[int, ...]] = []
    for place, each in enumerate(value):
        try:
            out.append(TokenIds.structured(each).ids)
        except Mistakes as error:
            raise wrong(error.mistakes[0].message, f"[{place}]{error.mistakes[0].path}") from None
    return tuple(out)
