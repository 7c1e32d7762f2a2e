"""Fuzz the decoders: `python -m tests.system.fuzz.media [--inputs 20000] [--first 0] [--seed 0] [--only N]`.

Damaged files go the whole way through the media actor and real decoders, each in a process of its own. Every one must
be refused with an error of its client, or come out in the shape that was computed for it. A decoder may crash, which is
such an error and is counted; the template of all decoders may not, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path

import trio
from attrs import Factory, define

from actors.kit.calls import Address, mailbox
from actors.media.media import Allowance, MediaPorts, PreparationLimits, Preparations, Source, media
from protocol.errors import RequestError
from protocol.messages.media import Media, MediaItem, MediaPrepared, PrepareMedia
from protocol.tensors import BYTES
from supervisor.media.contents import StoredContent, content_writer
from tests.rig.media import decoders, limited, open_descriptors
from tests.rig.vision import LAYOUT
from tests.supervisor.media.test_decoding import processes
from tests.system.fuzz.media_inputs import Input, make

MIB = 1024 * 1024
AT_ONCE = 3
SLOW_S = 20.0
LIMITS = PreparationLimits(
    items_max=1,
    tokens_max=100_000,
    prepare_s=60.0,
    fetched_bytes_max=64 * MIB,
    prepared_bytes_max=512 * MIB,
    fetches_max=AT_ONCE,
    decodes_max=AT_ONCE,
    waiting_max=AT_ONCE,
)
UNEXPECTED = "it could not be decoded: "
IN_A_SANDBOX = ("ModuleNotFoundError", "PermissionError", "AssertionError", "NameError", "AttributeError")
"""Errors of ours, not of a content: what a decoder needs is missing in its sandbox, or it has a bug."""


@define(eq=False)
class Report:
    """The result of a run: how inputs ended, and what was wrong."""

    counts: Counter[str] = Factory(Counter)
    problems: list[str] = Factory(list)
    examples: dict[str, int] = Factory(dict)  # of unexpected errors, by how they are counted
    took_s: float = 0.0


@define(eq=False)
class Player:
    """Plays inputs against one media actor."""

    report: Report
    show: bool
    inputs: dict[str, Input] = Factory(dict)  # those that are being played, by the URL that stands for each

    async def fetch(self, url: str, _: Allowance) -> StoredContent:
        await trio.lowlevel.checkpoint()
        with content_writer() as writer:
            writer.write(self.inputs[url].content)
            return writer.finish()

    async def play(self, address: Address[PrepareMedia, MediaPrepared, None], number: int, seed: int) -> None:
        played, url, began_at = make(number, seed), str(number), trio.current_time()
        self.inputs[url] = played
        try:
            ended = await self._ended(address, played, url)
        except RequestError as error:
            ended = f"{error.code}"
            wrong = error.fault != "client" or any(name in error.detail for name in IN_A_SANDBOX)
            self._note(number, f"{ended}: {error.detail}", played, wrong=wrong)
            if "crashed" in error.detail:
                ended = "crash"
            if UNEXPECTED in error.detail:
                ended = f"refused by {error.detail.rpartition(' ')[2]}, which nothing expected"
                self.report.examples.setdefault(ended, number)
        finally:
            del self.inputs[url]
        took_s = trio.current_time() - began_at
        self._note(number, f"took {took_s:.1f} s", played, wrong=took_s > SLOW_S)
        self.report.counts[ended] += 1

    async def _ended(self, address: Address[PrepareMedia, MediaPrepared, None], played: Input, url: str) -> str:
        async with address.ask(PrepareMedia(url, "seeing", (Media(played.modality, url),)), 1) as answer:
            async for prepared in answer:
                (item,) = prepared.items
                self._check(item, played, int(url))
                return f"survived as {item.form.value}"
        raise AssertionError("an answer without a reply")

    def _check(self, item: MediaItem, played: Input, number: int) -> None:
        size = prod(item.data.shape) * BYTES[item.data.dtype]
        wrong = size != len(item.data.data) or item.tokens < 1 or item.modality is not played.modality
        self._note(number, f"came out as {item}", played, wrong=wrong)

    def _note(self, number: int, what: str, played: Input, *, wrong: bool) -> None:
        if self.show:
            print(f"{number} ({played.about}, {len(played.content)} bytes) {what}")  # noqa: T201
        if wrong:
            self.report.problems.append(f"{number} ({played.about}): {what}")


def run(numbers: range | list[int], seed: int = 0, *, show: bool = False) -> Report:
    """Play the inputs of these numbers."""
    report, began_at = Report(), time.perf_counter()
    trio.run(partial(_run, numbers, seed, report, show=show))
    report.took_s = time.perf_counter() - began_at
    return report


async def _run(numbers: range | list[int], seed: int, report: Report, *, show: bool) -> None:
    player, left = Player(report, show), iter(numbers)
    before = open_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        async with decoders(Path(folder), limited(decode_s=5.0)) as found, trio.open_nursery() as actor:
            ports = MediaPorts(
                lambda _: Source(MIB, is_remote=False), player.fetch, found.inspect, found.decode, found.memory.release
            )
            preparations = Preparations({"seeing": LAYOUT}, ports, LIMITS, lambda *_: None)
            address: Address[PrepareMedia, MediaPrepared, None]
            address, inbox = mailbox(AT_ONCE)
            await actor.start(media, inbox, preparations)
            template = processes()[0]

            async def client() -> None:
                for number in left:
                    await player.play(address, number, seed)

            async with trio.open_nursery() as clients:
                for _ in range(AT_ONCE):
                    clients.start_soon(client)
            await trio.sleep(0.5)  # the last process ends after its answer
            report.counts["decoder jobs"] = found.counts.jobs
            _check_end(report, found.counts.malformed, template, preparations.statistics().prepared_bytes.taken)
            actor.cancel_scope.cancel()
    if open_descriptors() > before + 4:  # of threads that are kept
        report.problems.append(f"{open_descriptors() - before} descriptors are left")


def _check_end(report: Report, lies: int, template: int, held: int) -> None:
    if lies:
        report.problems.append(f"{lies} answers were false")
    if processes() != [template]:
        report.problems.append(f"the template was {template}, and {processes()} run now")
    if held:
        report.problems.append(f"{held} bytes are still held")


def main() -> int:
    """Attack; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play one input alone, and show it")
    options = parser.parse_args()
    if options.only is not None:
        report = run([options.only], options.seed, show=True)
    else:
        report = run(range(options.first, options.first + options.inputs), options.seed)
    print(*(f"{kind}: {count}" for kind, count in sorted(report.counts.items())), sep="\n")  # noqa: T201
    print(*(f"for example {number}: {kind}" for kind, number in report.examples.items()), sep="\n")  # noqa: T201
    print(*report.problems[:50], sep="\n")  # noqa: T201
    print(f"{report.took_s:.0f} s, {len(report.problems)} problems")  # noqa: T201
    return min(len(report.problems), 1)


if __name__ == "__main__":
    sys.exit(main())
