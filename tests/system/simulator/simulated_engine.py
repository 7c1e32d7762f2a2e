"""The simulated engine of the product in place of a fake one: it says what the clients' judge expects."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf

import trio
from attrs import Factory, define, evolve, field, frozen

from actors.engines.simulated.batch import Batch, Turn, _Held
from actors.engines.simulated.costs import Costs as Prices
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.faults import Faults
from actors.engines.simulated.output import OutputGenerator, OutputSequence
from actors.engines.simulated.spec import SimulatedSpec
from protocol.messages import Generate, Logprob
from tests.rig.fake_engine import Costs, logprob_at
from tests.system.simulator.system import RequestKey, prompt_of, seeded


@frozen
class Said(OutputGenerator):
    """Says what a fake engine says."""

    def answer(self, request: Generate, prompt: bytes) -> OutputSequence:  # it is in the request, too
        ids, _ = seeded(request, self.spec.vocabulary_size)
        return OutputSequence(iter(ids), frozenset(request.sampling.stop_token_ids), b"", greedy=True)

    def logprob(self, voice: OutputSequence, place: int, token: int, most: int) -> Logprob:
        return logprob_at(token, place - 1, most, self.spec.vocabulary_size)


@define(eq=False)
class Watched(Batch):
    """The batch of a simulated engine whose costs and faults change as a fake one's do, and which can be looked at."""

    fake: Costs = field(kw_only=True)
    log: list[str] = Factory(list)
    given: dict[RequestKey, int] = Factory(dict)

    def submit(self, request: Generate, now: float) -> None:
        self.log.append(f"submit {request.id}")
        Batch.submit(self, request, now)

    def abort(self, request_id: str, now: float) -> None:
        self.log.append(f"abort {request_id}")
        self.faults = Faults(stuck=float(self.fake.stuck))
        Batch.abort(self, request_id, now)

    def next_at(self) -> float:
        self.faults = Faults(stuck=float(self.fake.stuck))
        return Batch.next_at(self)

    def _begin(self, held: _Held, turn: Turn) -> None:
        self.faults = evolve(self.faults, refuse=float(self.fake.refused(held.request.id)))
        Batch._begin(self, held, turn)
        self.faults = evolve(self.faults, refuse=0.0)

    def _speak(self, held: _Held, turn: Turn) -> None:
        Batch._speak(self, held, turn)
        asked = prompt_of(held.request), held.request.sampling.seed
        self.given[asked] = held.request.said + len(held.output)

    def _lasts_s(self, answering: list[_Held], pieces: list[tuple[_Held, int]], prefill_tokens: int) -> float:
        # Those that answer wait while prompts are computed, which at a fake engine's price is longer than they may.
        prices = Prices(fixed_s=self.fake.slow * self.fake.step_s, per_prefill_token_s=self.fake.prefill_s / 10)
        return prices.step_s(prefill_tokens, len(answering) + len(pieces), 0)


@define(eq=False)
class _View:
    """What is looked at of a fake engine's scheduler."""

    batch: Watched
    engine: SimulatedEngine

    @property
    def running(self) -> dict[str, _Held]:
        return self.batch.running

    @property
    def waiting(self) -> Iterable[_Held]:
        return self.batch.waiting.values()

    @property
    def given(self) -> dict[RequestKey, int]:
        return self.batch.given

    @property
    def log(self) -> list[str]:
        return self.batch.log

    def crash(self) -> None:
        self.engine.crash()


@define(eq=False)
class SimulatedHost:
    """Stands where a fake engine's host does; there is no line to it, so what happens to one happens to the engine."""

    costs: Costs
    rng: random.Random
    engine: SimulatedEngine = field(init=False)
    scheduler: _View = field(init=False)

    def __attrs_post_init__(self) -> None:
        costs = self.costs
        spec = SimulatedSpec(
            slots=costs.slots,
            waiting_max=costs.waiting_max,
            kv_tokens_max=costs.kv_tokens_max,
            context_max=costs.context_max,
            page_size=costs.page_size,
            vocabulary_size=costs.vocabulary_size,
            costs=Prices(release_s=costs.release_s),
        )
        self.engine = SimulatedEngine(spec, self.rng)
        batch = self.engine._batch = Watched(spec, Said(spec), self.rng, fake=costs)
        self.scheduler = _View(batch, self.engine)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Compute until cancelled; raises `EngineDied` after a crash."""
        await self.engine.run(task_status=task_status)

    def crash(self) -> None:
        """Be lost at once."""
        self.engine.crash()

    def cut(self) -> None:
        """Be lost at once, as the engine at the other end of a line is that is cut."""
        self.engine.crash()

    def swallow(self) -> None:
        """Say nothing more, and let nothing go."""
        self.engine.stall(inf)

    def check_free(self) -> None:
        """Check that nothing is held for any request, no page of memory either."""
        batch = self.engine._batch
        assert not batch.running, "an engine slot is held"
        assert not batch.waiting
        assert not batch.memory.referenced, "pages of memory are held"
        assert not self.engine._answers, "the engine remembers a request"
