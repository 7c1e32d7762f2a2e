"""Clients that read slowly while the node drains: log and metrics agree with what each received."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import trio
from attrs import define, evolve

from protocol.messages.generation import FinishReason
from supervisor.telemetry.metrics import Metrics
from tests.rig.fake_engine import Costs
from tests.system.simulator import judge
from tests.system.simulator.clients import GONE, Reader
from tests.system.simulator.model import VOCABULARY, PlannedRequest
from tests.system.simulator.single_fault import PATIENT, HonestClient, SingleFault
from tests.system.simulator.system import LIMITS

WHOLE = frozenset(reason.value for reason in FinishReason)
CUT = "cut"


def samples(name: str, metrics: Metrics) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each sample of a metric."""
    for family in metrics.families({}):
        yield from ((sample.labels, sample.value) for sample in family.samples if sample.name == name)


@define(eq=False)
class SlowReader(Reader):
    """Reads a little at a time, and rests before each."""

    bytes_max: int = 512

    async def more(self) -> bool:
        assert self.rng is not None
        await trio.sleep(self.rng.random() * self.pause_s)
        try:
            data = await self.stream.receive_some(self.bytes_max)
        except trio.BrokenResourceError:
            data = b""
        self.buffer += data
        return bool(data)


@define(eq=False)
class SlowReaders(SingleFault):
    """Clients that read what comes more slowly than it comes, through the drain of the node."""

    drains: ClassVar[bool] = True

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        slots, step_s = rng.choice(((1, 0.05), (4, 0.002)))  # most answers are whole here long before their clients
        return PATIENT | {
            "workers": 2,
            "costs": Costs(slots=slots, step_s=step_s, vocabulary_size=VOCABULARY),
            "limits": evolve(LIMITS, backlog_bytes_max=rng.choice((24_000, 200_000))),
            "drain_s": rng.choice((1.0, 3.0, 10.0, 60.0)),
        }

    async def live(self) -> None:
        system, received = self.system, Counter[str]()
        asked = self.rng.randint(2, 6)
        async with trio.open_nursery() as nursery:
            for number in range(asked):
                nursery.start_soon(self._read, self.honest(f"s{number}"), received)
        await system.over.wait()
        metrics = system.gateway.runner.metrics
        counted = Counter[str]()
        for labels, times in samples("espalier_requests_total", metrics):
            counted["whole" if labels["outcome"] in WHOLE else labels["outcome"]] += int(times)
        self.note("heard", sorted(received.items()), "counted", sorted(counted.items()))
        assert received.total() == asked
        assert counted["whole"] == received["whole"], f"counted as whole: {counted}, received: {received}"
        assert counted.total() == asked, f"some are not counted: {counted}"
        incomplete = sum(times for _, times in samples("espalier_responses_incomplete_total", metrics))
        assert not counted["left"], f"no client has left: {counted}"
        assert incomplete == counted[CUT], "an answer was cut for no reason"

    async def _read(self, client: HonestClient, received: Counter[str]) -> None:
        system, rng = self.system, self.rng
        client.slow = True
        await trio.sleep(rng.random())
        wanted = PlannedRequest(
            turns=(("user", client.name),),
            tokens_max=rng.randint(40, 200),
            n=rng.choice((1, 2)),
            stream=rng.random() < 0.8,
        )
        reader = SlowReader(system.connect(), rng=rng, pause_s=rng.choice((0.1, 1.0, 4.0)))
        reader.bytes_max = rng.choice((256, 1024))
        answer = judge.Received()
        try:
            await reader.send(client.post(wanted))
            await reader.read_answer(answer)
        except GONE:
            pass
        finally:
            reader.hang_up()
        outcome = client.judged(wanted, answer, stayed=True)
        received[outcome] += 1
        self.note(client.name, outcome, len(answer.body))
