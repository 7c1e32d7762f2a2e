"""A trace of requests in Mooncake's form: one JSON object a line, with times in milliseconds and lengths in tokens.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}

Each of the `hash_ids` names a block of 512 tokens of the prompt. Other fields are ignored: derived traces have some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from bench.load.plan import TracedRequest


class Line(msgspec.Struct, frozen=True):
    """One line as it stands in the file."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, scale: float = 1.0) -> tuple[TracedRequest, ...]:
    """Read a trace, in the order of its times, which count from the first; raises `OSError`, or `ValueError`.

    Lengths are multiplied by `scale`, so that a trace of a large model fits the context of a small one.
    """
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if text.strip():
            try:
                lines.append(msgspec.json.decode(text, type=Line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not lines:
        raise ValueError(f"{path} is empty")
    lines.sort(key=lambda line: line.timestamp)
    return tuple(
        TracedRequest(
            at_s=(line.timestamp - lines[0].timestamp) / 1e3,
            prompt_tokens=round(line.input_length * scale),
            output_tokens=round(line.output_length * scale),
            blocks=line.hash_ids,
        )
        for line in lines
    )
