"""Token ids as one immutable value: little-endian words of 32 bits in one string of bytes.

The prompt of an agent has a hundred thousand ids. A list of integers takes some 36 bytes for each of them, and visits
each of them wherever it is copied, compared, sliced or sent. Here an id takes four bytes, and all of this copies bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

from attrs import frozen

ID_BYTES = 4
IDS_MAX = 2**32
"""One more than the largest id."""

SHOWN_MAX = 16  # ids in a `repr`
assert array("I", [1]).tobytes() == b"\1\0\0\0", "arrays and memory views have the words of the machine"


@frozen(repr=False)
class TokenIds(Sequence[int]):
    """The ids of tokens; `packed` has four bytes for each. Raises `ValueError` for bytes of another length.

    Equal to other `TokenIds` with the same ids, and to nothing else.
    """

    packed: bytes = b""

    def __attrs_post_init__(self) -> None:
        if len(self.packed) % ID_BYTES:
            raise ValueError(f"{len(self.packed)} bytes are no token ids of {ID_BYTES} bytes each")

    @classmethod
    def of(cls, ids: Iterable[int]) -> Self:
        """Return ids as one value; raises `OverflowError` for one that is negative or takes more than 32 bits."""
        return cls(array("I", ids).tobytes())

    @classmethod
    def joined(cls, parts: Iterable[TokenIds]) -> Self:
        """Return the ids of all parts, one behind the other."""
        return cls(b"".join([part.packed for part in parts]))

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.packed) // ID_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice[int | None, int | None, int | None]) -> Self: ...

    def __getitem__(self, index: int | slice[int | None, int | None, int | None]) -> int | Self:
        """Return an id, or a part of the ids."""
        words = memoryview(self.packed).cast("I")
        return type(self)(words[index].tobytes()) if isinstance(index, slice) else words[index]

    def __iter__(self) -> Iterator[int]:
        """Yield each id."""
        return iter(memoryview(self.packed).cast("I"))

    def __add__(self, other: TokenIds) -> Self:
        """Return the ids with others behind them."""
        return type(self)(self.packed + other.packed)

    def __repr__(self) -> str:
        """Return the first ids, and the number of the others."""
        more = f" and {len(self) - SHOWN_MAX} more" if len(self) > SHOWN_MAX else ""
        return f"TokenIds({', '.join(map(str, self[:SHOWN_MAX]))}{more})"

    def count(self, value: int) -> int:
        """Return how many of the ids are this one."""
        return array("I", self.packed).count(value)

    def index(self, value: int, start: int = 0, stop: int | None = None) -> int:
        """Return the first place of an id from `start` on and before `stop`; raises `ValueError` if there is none."""
        words = array("I", self.packed)
        return words.index(value, start) if stop is None else words.index(value, start, stop)

    def tolist(self) -> list[int]:
        """Return the ids as a list of integers."""
        return memoryview(self.packed).cast("I").tolist()
