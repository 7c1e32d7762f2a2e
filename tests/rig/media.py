"""Real decoders, and requests that are prepared by them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import evolve

from actors.media.jobs import Bounds
from supervisor.media.decoding import DecodeLimits, Decoders
from supervisor.media.memory import MediaMemory
from supervisor.media.template import COMMAND, DecoderTemplate, decoder_template
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods
from supervisor.supervision.registration import Registration

MIB = 1024 * 1024
BOUNDS = Bounds(pixels_max=20_000_000, aspect_max=200.0, frames_max=1_000, seconds_max=60.0)
LIMITS = DecodeLimits(bytes_max=16 * MIB, bounds=BOUNDS, decode_s=5.0, memory_bytes_max=512 * MIB)


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def decoders(
    folder: Path, limits: DecodeLimits = LIMITS, command: tuple[str, ...] = COMMAND
) -> AsyncIterator[Decoders]:
    """Yield decoders whose template runs; everything ends with the body."""
    registration: Registration[DecoderTemplate] = Registration()
    found = Decoders(registration, MediaMemory(), limits)
    output_log = OutputLog(folder / "decoders.log")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.memory.run)
        await nursery.start(decoder_template, registration, output_log, GracePeriods(), {}, command)
        with trio.fail_after(60):
            await registration.wait()
        yield found
        nursery.cancel_scope.cancel()


def limited(decode_s: float) -> DecodeLimits:
    """Return limits with another time for each job."""
    return evolve(LIMITS, decode_s=decode_s)
