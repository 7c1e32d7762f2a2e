"""The `prompt` of completions: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import ClassVar, Self

from attrs import frozen

from protocol.dialects.options import CHOICES_MAX, INT32_MAX
from protocol.strict.mistakes import Mistakes, describe, wrong

IDS_MAX = 2**20  # of all prompts together; a prompt that is too long for its model is refused later, with its length


@frozen
class TokenIdList:
    """A list of token ids; it may have a million entries, so it is checked without a loop in Python."""

    value_types: ClassVar[tuple[type, ...]] = (list,)  # for `protocol/strict/structure.py`, as `from_value` is

    ids: tuple[int, ...]

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the list; raises `Mistakes` if it is empty or holds anything but token ids."""
        assert isinstance(value, list)
        if not value:
            raise wrong("must not be empty")
        if len(value) > IDS_MAX:
            raise wrong(f"must hold at most {IDS_MAX} token ids, holds {len(value)}")
        # `set`, `min` and `max` run in C: a long prompt must not block the event loop.
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) > INT32_MAX:
            raise _first_wrong_id(value)
        return cls(tuple(value))


def _first_wrong_id(value: list[object]) -> Mistakes:
    index = next(i for i, token in enumerate(value) if type(token) is not int or not 0 <= token <= INT32_MAX)
    return wrong(f"must be a token id from 0 to {INT32_MAX}, got {describe(value[index])}", f"[{index}]")


@frozen
class Prompts:
    """One or more prompts, all of them texts or all of them token ids; without either, the one that begins a text."""

    value_types: ClassVar[tuple[type, ...]] = (str, list)

    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """The number of prompts; each is at least one choice."""
        return len(self.texts) + len(self.token_lists) or 1

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the prompts in the field `prompt`; raises `Mistakes` if it holds anything else."""
        if isinstance(value, str):
            return cls(texts=(value,))
        assert isinstance(value, list)
        if not value:
            raise wrong("must not be empty")
        match value[0]:
            case str():
                _check_prompts(value, str, "a string like the first one")
                return cls(texts=tuple(value))
            case list():
                _check_prompts(value, list, "a list of token ids like the first one")
                return cls(token_lists=token_lists(value))
            case _:
                return cls(token_lists=(TokenIdList.from_value(value).ids,))


def _check_prompts(value: list[object], kind: type, expected: str) -> None:
    if len(value) > CHOICES_MAX:
        raise wrong(f"must hold at most {CHOICES_MAX} prompts, holds {len(value)}")
    for index, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise wrong(f"expected {expected}, got {describe(prompt)}", f"[{index}]")


def token_lists(value: list[list[object]]) -> tuple[tuple[int, ...], ...]:
    """Return each of several lists of token ids; raises `Mistakes` for an empty one, and for anything else in them."""
    if (total := sum(map(len, value))) > IDS_MAX:
        raise wrong(f"must hold at most {IDS_MAX} token ids, holds {total}")
    lists: list[tuple[int, ...]] = []
    for index, ids in enumerate(value):
        try:
            lists.append(TokenIdList.from_value(ids).ids)
        except Mistakes as error:
            raise wrong(error.mistakes[0].message, f"[{index}]{error.mistakes[0].path}") from None
    return tuple(lists)
