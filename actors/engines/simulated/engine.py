"""The simulated engine behind the engine port: a batch, Trio's clock, and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import trio
from attrs import define, evolve, field

from actors.engines.port import Generation
from actors.engines.request_check import check_request
from actors.engines.simulated.batch import Batch, Turn
from actors.engines.simulated.faults import Chance, Faults
from actors.engines.simulated.output import OutputGenerator
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import SimulatedSpec
from actors.kit.calls import Answer
from protocol.errors import BadRequest, EngineDied, EngineLost, Overloaded
from protocol.messages import EngineInfo, EngineLoad, Generate, Started, Tokens
from protocol.model_folder import Digest


@define(eq=False)
class SimulatedEngine:
    """One simulated engine; keeps the promises of `actors.engines.port.Engine` while `run` runs.

    It says `lines`, sentences as token ids; without any, ids drawn from its vocabulary. What it says depends on its
    seed, the prompt and, at a temperature above 0, the request's seed or id; of how tokens are to be chosen it heeds no
    more than `logit_bias` of 100 or -100 and beyond: penalties, `top_p` and the like change nothing. `chance` draws
    the faults and nothing else. A prefill waits until a decode with the same `rendezvous_rooms` has room for what it
    computed; else each says and takes what it would if they met, whatever becomes of the other. In virtual time
    everything is the same again when it is asked the same again.
    """

    spec: SimulatedSpec
    chance: Chance
    lines: Sequence[Sequence[int]] = ()
    digest: Digest = ()  # of the model's folder that it speaks by
    rendezvous_rooms: RendezvousRooms = field(factory=RendezvousRooms)
    _batch: Batch = field(init=False)
    _info: EngineInfo = field(init=False)
    _answers: dict[str, Generation] = field(init=False, factory=dict)
    _lost: trio.Event = field(init=False, factory=trio.Event)
    _why: str = field(init=False, default="")
    _crash_at: float = field(init=False, default=inf)
    _wake: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        mistakes = [str(each) for each in self.spec.disagreements()]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        self._info = evolve(self.spec.info, digest=self.digest)
        speech = OutputGenerator.of(self.spec, self.lines)
        self._batch = Batch(
            self.spec, speech, self.chance, self.spec.faults, self.rendezvous_rooms, self._wake.unpark_all
        )

    # The port --------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine is and what it can hold."""
        return self._info

    def submit(self, request: Generate) -> Generation:
        """Start a request; raises `BadRequest`, `Overloaded` with all places taken, `EngineLost` after the end."""
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        check_request(request, self.info)
        self._check_part(request)
        if self._batch.full:
            raise Overloaded(f"{self.spec.slots} requests run and {self.spec.waiting_max} wait")
        self._batch.submit(request, trio.current_time())
        answer = self._answers[request.id] = Answer(request.sampling.tokens_max)
        self._look()
        return answer

    def abort(self, request_id: str) -> None:
        """Stop a request, whatever point it has reached."""
        self._batch.abort(request_id, trio.current_time())
        self._look()

    async def wait_released(self, request_id: str) -> None:
        """Wait until the request is over, which it is when its slot and its pages are free."""
        await trio.lowlevel.checkpoint()
        if (answer := self._answers.get(request_id)) is not None:
            await answer.over.wait()

    async def wait_lost(self) -> None:
        """Wait for the end of `run`, or for a crash."""
        await self._lost.wait()

    async def load(self) -> EngineLoad:
        """Return what runs, what waits and what they hold; raises `EngineLost` after the end."""
        await trio.lowlevel.checkpoint()
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        return self._batch.load()

    async def flush_cache(self) -> None:
        """Drop the prefix cache; raises `Overloaded` while requests run."""
        await trio.lowlevel.checkpoint()
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        if self._batch.running or self._batch.waiting:
            raise Overloaded("requests run")
        self._batch.flush()

    # Faults on request -----------------------------------------------------------------

    @property
    def faults(self) -> Faults:
        """What is wrong with the engine at the moment."""
        return self._batch.faults

    def inject(self, faults: Faults) -> None:
        """Replace what is wrong with the engine; slower steps begin with the next one."""
        self._batch.inject(faults)
        self._count_down()
        self._wake.unpark_all()

    def stall(self, for_s: float) -> None:
        """Let nothing happen for so long: no step ends, and nothing is released."""
        self._batch.stall(trio.current_time() + for_s)
        self._wake.unpark_all()

    def crash(self) -> None:
        """Be lost at once: every answer fails, and `run` raises `EngineDied`."""
        self._end("the engine crashed")

    # The actor -------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute until cancelled, waking once a step; raises `EngineDied` after a crash."""
        self._count_down()
        task_status.started()
        try:
            while not self._lost.is_set():
                now = trio.current_time()
                if now >= self._crash_at:
                    break
                self._tell(self._batch.advance(now))
                with trio.move_on_at(min(self._batch.next_at(), self._crash_at)):
                    await self._wake.park()
            self.crash()
            raise EngineDied(self._why)
        finally:
            self._end("the engine was stopped")

    def _check_part(self, request: Generate) -> None:
        """Raise `BadRequest` for what has said more than there is, or is to meet nobody whom this leg can meet."""
        if not 0 <= request.said < len(request.tokens):
            raise BadRequest(f"said must be from 0 to {len(request.tokens) - 1}, got {request.said}", param="said")
        where, own = request.rendezvous, self.info.bootstrap
        if where is not None and own is not None and (where.host, where.port) != own:
            raise BadRequest("the rendezvous is at another prefill", param="rendezvous")

    def _look(self) -> None:
        """Wake the actor if it has something to do now, not only at the end of its step."""
        if self._batch.next_at() <= trio.current_time():
            self._wake.unpark_all()

    def _count_down(self) -> None:
        after_s = self.faults.crash_after_s
        self._crash_at = inf if after_s is None else trio.current_time() + after_s

    def _tell(self, turn: Turn) -> None:
        """Hand over what has happened. Whoever hears it may abort, submit or crash in the same turn."""
        answers = self._answers
        for request_id, cached in turn.begun:
            if (answer := answers.get(request_id)) is not None:
                answer.put(Started(cached), 0)
        for request_id, token, logprob in zip(turn.spoke, turn.tokens, turn.logprobs, strict=True):
            if (answer := answers.get(request_id)) is not None:
                answer.put(Tokens([token]) if logprob is None else Tokens([token], (logprob,)))
        for request_id, finished in turn.ended:
            if (answer := answers.pop(request_id, None)) is not None:
                answer.end(finished)
        for request_id, error in turn.failed:
            if (answer := answers.pop(request_id, None)) is not None:
                answer.fail(error)

    def _end(self, why: str) -> None:
        """Be lost, for whatever reason comes first."""
        if self._lost.is_set():
            return
        self._why = why
        self._lost.set()
        self._batch.close()
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            answer.fail(EngineLost(why))
        self._wake.unpark_all()
