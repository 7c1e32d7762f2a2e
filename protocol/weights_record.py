"""The record of an engine's weights, by which the engines of one model are compared.

Each update of a model has a *serial* number above all earlier ones. The newest record of a model holds for all of its
engines: one that is behind is asked for nothing until it has these weights. So a client never gets answers of two
versions in turn, whichever engine failed in an update, started later, or was not there.
"""

from __future__ import annotations

from attrs import frozen

LAYOUT_MARK = ":"
"""The character between the layout of an engine's ranks, on which a checksum depends, and the checksum itself."""


@frozen
class WeightsRecord:
    """The weights of one engine; `serial` is 0 for those that it started with.

    `folder` is where engines of other nodes find them, too; empty: they came in another way, and are found nowhere.
    """

    serial: int = 0
    version: str = ""
    checksum: str = ""
    folder: str = ""

    def is_newer(self, other: WeightsRecord) -> bool:
        """Whether it holds in place of another one; of two updates at once the same one for every node."""
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, str, str]:
        return self.serial, self.version, self.checksum

    def behind(self, newest: WeightsRecord) -> str:
        """Return why an engine with these weights is not asked, as the end of a sentence; empty if it is."""
        if self.serial == newest.serial == 0:  # a version is only a name then
            return ""
        if (self.serial, self.version) != (newest.serial, newest.version):
            own = f"of version {self.version!r}" if self.serial else "those of its start"
            wanted = f"version {newest.version!r}" if newest.serial else "those of their start"
            return f"its weights are {own}, and its model has {wanted}"
        if differ(self.checksum, newest.checksum):
            return f"its weights of version {self.version!r} differ from those of other engines"
        return ""


FIRST_WEIGHTS = WeightsRecord()
"""The record of an engine that has just started."""


def differ(checksum: str, other: str) -> bool:
    """Whether two checksums are of different weights; those of different layouts cannot tell."""
    layout, _, digest = checksum.rpartition(LAYOUT_MARK)
    other_layout, _, other_digest = other.rpartition(LAYOUT_MARK)
    return layout == other_layout and digest != other_digest
