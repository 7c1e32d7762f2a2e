"""The formats of answers by their names: a new one is a file in this folder and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from actors.text.formats.stage import PLAIN, Stage
from protocol.messages.text import Respond

MakeStage: TypeAlias = Callable[[Respond], Stage]
"""Makes the stage of one choice of a request."""

FORMATS: Mapping[str, MakeStage] = {
    "plain": lambda _: PLAIN,
}
