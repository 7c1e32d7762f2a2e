"""The patterns of decimal numbers in the schemas of Pydantic 2.11 to 2.13, which have look-aheads, without these."""

from __future__ import annotations

import re

_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,4})\}0\*)\$"
    r"|\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<signs>\d{1,3})\}0\*\$\)"
    r"\\d(?:\*\\\.\\d\*|\{0,(?P=whole)\}\\\.\\d\{0,(?P<fraction>\d{1,3})\})0\*\$\))"
)


def without_look_ahead(pattern: str) -> str:
    """Return a pattern for some of the numbers of a decimal pattern; any other pattern is returned as it is."""
    if (found := _DECIMAL.fullmatch(pattern)) is None:
        return pattern
    if found["whole"] is None:
        return _decimal(r"\d+", found["places"])
    digits = rf"\d{{1,{found['whole']}}}" if int(found["whole"]) else "0"
    if found["fraction"] is not None:
        return _decimal(digits, found["fraction"])
    signs = int(found["signs"])
    split = (rf"\d{{{before}}}\.\d{{1,{signs - 1 - before}}}" for before in range(1, signs - 1))
    return f"[+-]?(?:{'|'.join((digits, *split))})"


def _decimal(whole: str, places: str | None) -> str:
    if places is not None and int(places) == 0:
        return f"[+-]?{whole}"
    count = "+" if places is None else f"{{1,{places}}}"
    return rf"[+-]?{whole}(?:\.\d{count})?"
