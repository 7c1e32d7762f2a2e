"""Programs of operators: operations of engines in the order in which an operator asks for them, and wrong orders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from attrs import field, frozen

from protocol.messages.adapters import ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.engine_files import ListFiles
from protocol.messages.experts import DumpExpertRecord, StartExpertRecord, StopExpertRecord
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest, MemoryTag, RunningRequests
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.operations import FlushCache
from protocol.messages.profile import StartProfile, StopProfile
from protocol.messages.weights import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    GetWeightsChecksum,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensors,
)
from tests.contracts.weights import file_of, update_of
from tests.rig.fake_engine import Costs
from tests.system.simulator.prefix_plan import aside

SHARES = {"operated": 0.3}  # of the seeds; `python -m tests.system.hunt --operations`: 1
ADMIN_SECRET = "secret-of-the-operator"
STREAMS = 64  # of a link, since an operation has one beside the requests in wait for its end
ADAPTERS_MAX = 2
EXPERTS = 4

DONE, REFUSED, BUSY, UNSUPPORTED = "done", "invalid_request", "overloaded", "unsupported_parameter"
"""Outcomes of an operation at an engine: its result, or the code of its error."""

GONE = "/gone"  # the folder that no simulated engine has
DRAIN_S = (0.2, 3.0)  # the longest waits for the ends of running requests


@frozen
class Step:
    """One operation of a program, and the outcomes that it may have at an engine that nothing else disturbs."""

    request: Message
    outcomes: frozenset[str] = frozenset({DONE})

    @property
    def is_done(self) -> bool:
        """Whether it must be carried out."""
        return self.outcomes == {DONE}


def refused(*requests: Message) -> list[Step]:
    """Return steps that must be refused."""
    return [Step(request, frozenset({REFUSED})) for request in requests]


def leaving(request: LeavingRequest) -> Step:
    """Return a step that needs running requests out of its way; where it waits for their ends, that may be too long."""
    holds = request.running is RunningRequests.HOLD
    return Step(request, frozenset({DONE} if holds else {DONE, BUSY}))


def tensors(rng: random.Random, shape: Sequence[int] = (2, 2)) -> UpdateWeightsFromTensors:
    """Return new weights of a simulated engine, or of another shape."""
    data = rng.randbytes(4 * shape[0] * shape[1])
    return update_of(file_of({"simulated.weight": ("F32", [*shape], data)}))


@frozen
class Programs:
    """Draws programs; no two updates have one version."""

    rng: random.Random
    numbers: Iterator[int]

    def draw(self) -> list[Step]:
        """Return a program."""
        rng = self.rng
        programs: tuple[Callable[[], list[Step]], ...] = (
            *[self._memory] * 3,
            *[self._disk] * 2,
            *[self._session] * 2,
            self._beside,
            self._wrong,
        )
        return rng.choice(programs)()

    def _way(self) -> dict[str, Any]:
        """Draw what becomes of running requests."""
        running = self.rng.choice([*RunningRequests])
        return {"running": running, "within_s": self.rng.choice(DRAIN_S)}

    def _version(self) -> str:
        return f"v{next(self.numbers)}"

    def _memory(self) -> list[Step]:
        rng = self.rng
        tags = tuple(rng.sample([*MemoryTag], rng.randint(1, 3)))
        steps = [leaving(ReleaseMemory(tags=tags, **self._way()))]
        steps += refused(ReleaseMemory(tags=tags))
        if MemoryTag.WEIGHTS in tags:
            steps += refused(GetWeightsChecksum())
        if MemoryTag.KV_CACHE in tags:
            steps += refused(FlushCache())
        steps += refused(*(ResumeMemory(tags=(tag,)) for tag in MemoryTag if tag not in tags))
        if len(tags) > 1:
            steps.append(Step(ResumeMemory(tags=tags[:1])))
        return [*steps, Step(ResumeMemory()), *refused(ResumeMemory())]

    def _disk(self) -> list[Step]:
        version = self._version()
        steps = refused(UpdateWeightsFromDisk(folder=GONE, version=version))
        steps.append(leaving(UpdateWeightsFromDisk(folder=f"/{version}", version=version, **self._way())))
        return [*steps, Step(GetWeightsChecksum()), Step(SetWeightsVersion())]

    def _session(self) -> list[Step]:
        rng, version = self.rng, self._version()
        steps = [leaving(BeginWeightsUpdate(**self._way()))]
        steps += refused(
            BeginWeightsUpdate(), ReleaseMemory(), UpdateWeightsFromDisk(folder="/other", version=f"{version} other")
        )
        steps += [Step(tensors(rng)) for _ in range(rng.choice((0, 1, 2)))]
        steps += refused(tensors(rng, (2, 3)))
        return [*steps, Step(EndWeightsUpdate(version)), *refused(EndWeightsUpdate(f"{version} again"))]

    def _beside(self) -> list[Step]:
        """Draw operations that leave engines in service."""
        name = f"a{next(self.numbers)}"
        programs = (
            [Step(FlushCache(), frozenset({DONE, BUSY}))],
            [Step(GetWeightsChecksum()), Step(SetWeightsVersion(self._version()))],
            [
                Step(LoadAdapter(name, f"/{name}")),
                *refused(LoadAdapter(name, "/other")),
                Step(ListAdapters()),
                Step(UnloadAdapter(name, wait_s=1.0)),
            ],
            [Step(StartProfile(steps=3)), Step(StopProfile()), Step(ListFiles())],
            [Step(StartExpertRecord()), Step(StopExpertRecord()), Step(DumpExpertRecord())],
        )
        return self.rng.choice(programs)

    def _wrong(self) -> list[Step]:
        """Return operations that an engine in service must refuse."""
        return refused(
            ResumeMemory(),
            EndWeightsUpdate(self._version()),
            tensors(self.rng),
            ReleaseMemory(tags=()),
            ReleaseMemory(within_s=0.0),
        )


def allow_all(costs: Costs) -> None:
    """Let an engine carry out every operation that a simulated one may have."""
    costs.adapters_max, costs.experts = ADAPTERS_MAX, EXPERTS


@frozen
class Operators:
    """The operators of one seed."""

    number: int
    seed: int  # of their draws
    numbers: Iterator[int] = field(factory=count)  # of versions and adapters

    def chance(self, number: int) -> random.Random:
        """Return the generator of one operator."""
        return random.Random(f"{self.seed} {number}")

    def programs(self, chance: random.Random) -> Programs:
        """Return what draws the programs of one operator."""
        return Programs(chance, self.numbers)


def draw_operators(rng: random.Random, *, planned: bool | None) -> Operators | None:
    """Draw how many operators a seed has, and whether it has any, unless that is `planned`; it leaves `rng` as it is."""
    own = aside(rng)
    if not (own.random() < SHARES["operated"] if planned is None else planned):
        return None
    return Operators(own.choice((1, 1, 2, 3)), own.randrange(2**32))
