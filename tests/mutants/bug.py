"""What a planted bug is: a file, what stands there once, and what stands there instead."""

from __future__ import annotations

from attrs import frozen


@frozen
class Bug:
    """One planted bug."""

    name: str
    old: str
    new: str
    harmless: str = ""  # why nothing need notice it


Bugs = dict[str, tuple[Bug, ...]]  # by path
