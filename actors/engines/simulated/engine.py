"""The simulated engine: a batch for each rank behind the engine port, with Trio's clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf

import trio
from attrs import Factory, define, evolve, field

from actors.engines.blocks.block_log import BlockLog
from actors.engines.blocks.following import follow_blocks
from actors.engines.port import Generation
from actors.engines.request_check import check_largest_token, check_operation, check_request
from actors.engines.simulated.adapters import SimulatedAdapters
from actors.engines.simulated.batch import Batch
from actors.engines.simulated.expert_records import SimulatedExpertRecords
from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.kept_files import SimulatedFiles
from actors.engines.simulated.memory_operations import MemoryOperations
from actors.engines.simulated.output import OutputGenerator
from actors.engines.simulated.profiles import SimulatedProfiles
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import FaultDraws, Faults, SimulatedSpec
from actors.engines.simulated.step import BatchUpdate
from actors.engines.simulated.weights import SimulatedWeights
from actors.kit.calls import Answer
from actors.kit.fast_path import put_token
from protocol.errors import EngineDied, EngineLost, HandOffFailed, Overloaded
from protocol.messages.cluster import Leg
from protocol.messages.engine import Done, EngineInfo, EngineLoad
from protocol.messages.generation import Generate, Tokens, one_token
from protocol.messages.kind import Message
from protocol.messages.kv_events import BlockEvents
from protocol.messages.operations import FlushCache, operation_names
from protocol.model_folder import Digest

LOAD_EVERY_S = 0.05  # the time between two reports of the load


@define(eq=False)
class SimulatedEngine:
    """One simulated engine; implements `actors.engines.port.Engine` while `run` runs.

    Its answers are made of `sentences`, as token ids; without any, of ids drawn from its vocabulary. They depend on its
    seed, the prompt and, at a temperature above 0, the request's seed or id; of the sampling parameters it follows no
    more than `logit_bias` of 100 or -100 and beyond: penalties, `top_p` and the like change nothing. `chance` draws the
    faults and nothing else. A prefill waits until a decode with the same `rendezvous_rooms` has room for its KV cache;
    without a common one each leg acts as if they met. A sequential prefill holds a state among `states` instead. In
    virtual time the same calls give the same answers.
    """

    spec: SimulatedSpec
    chance: FaultDraws
    sentences: Sequence[Sequence[int]] = ()
    digest: Digest = ()  # the folder of the model whose tokenizer made the sentences
    rendezvous_rooms: RendezvousRooms = field(factory=RendezvousRooms)
    states: HeldStates = field(factory=HeldStates)  # that its sequential prefills and decodes share
    publishes: bool = True  # whether watchers get the blocks of its prefix cache
    first_adapters: Mapping[str, str] = field(factory=dict)  # folders by name; nothing is read from them
    _adapters: SimulatedAdapters = field(init=False)
    weights: SimulatedWeights = field(init=False)
    _batches: tuple[Batch, ...] = field(init=False)  # one a rank
    _memory: MemoryOperations = field(init=False)
    _handlers: Mapping[type[Message], Callable[[Message], Awaitable[Message]]] = field(init=False)  # by operation
    _info: EngineInfo = field(init=False)
    _answers: dict[str, Generation] = field(init=False, factory=dict)
    _lost: trio.Event = field(init=False, factory=trio.Event)
    _why: str = field(init=False, default="")
    _crash_at: float = field(init=False, default=inf)
    _wake: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    _blocks: BlockLog = field(init=False, factory=lambda: BlockLog("simulated"))
    _files: SimulatedFiles = field(init=False, factory=SimulatedFiles)
    _profiles: SimulatedProfiles = field(
        init=False, default=Factory(lambda self: SimulatedProfiles(self._files), takes_self=True)
    )
    _experts: SimulatedExpertRecords = field(
        init=False,
        default=Factory(lambda self: SimulatedExpertRecords(self._files, self.spec.experts), takes_self=True),
    )
    _load_changed: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        mistakes = [str(mistake) for mistake in self.spec.disagreements()]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        self._adapters = SimulatedAdapters.of(self.spec.adapters_max, self.first_adapters)
        speech = OutputGenerator.from_sentences(self.spec, self.sentences)
        own = self.spec, speech, self.chance, self.spec.faults, self.rendezvous_rooms, self.states
        self._batches = tuple(
            Batch(*own, self._wake.unpark_all, rank, lambda: self.weights.version) for rank in range(self.spec.ranks)
        )
        self._memory = MemoryOperations(lambda: self._batches, self._pass_on_changes, self._wake.unpark_all)
        self.weights = SimulatedWeights(self._memory, self._drop_cache)
        self._handlers = {
            FlushCache: self._flush_cache,
            **self._memory.handlers,
            **self._files.handlers,
            **self._profiles.handlers,
            **self._adapters.handlers,
            **self._experts.handlers,
            **self.weights.handlers,
        }
        self._info = evolve(self.spec.info, digest=self.digest, operations=operation_names(self._handlers))

    # The port --------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The engine's kind, version and limits."""
        return evolve(self._info, adapters=self._adapters.table.adapters) if self.spec.adapters_max else self._info

    def submit(self, request: Generate) -> Generation:
        """Start a request; raises as the port does: `Overloaded` with all places taken, `EngineLost` after the end."""
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        check_request(request, self.info)
        check_largest_token(max(request.tokens), self.info)
        self._check_leg(request)
        batch = self._batches[request.rank]
        if batch.full:
            raise Overloaded(f"{self.spec.slots} requests run and {self.spec.waiting_max} wait")
        self._adapters.take(request)
        batch.submit(request, trio.current_time())
        self._load_changed.unpark_all()
        answer = self._answers[request.id] = Answer(request.sampling.tokens_max)
        self._wake_if_due(batch)
        return answer

    def abort(self, request_id: str) -> None:
        """Stop a request at any point of its life."""
        for batch in self._batches:  # a rank without the request ignores it
            batch.abort(request_id, trio.current_time())
            self._wake_if_due(batch)

    async def wait_released(self, request_id: str) -> None:
        """Wait until the request's slot and pages are free."""
        await trio.lowlevel.checkpoint()
        if (answer := self._answers.get(request_id)) is not None:
            await answer.over.wait()

    async def wait_lost(self) -> None:
        """Wait for the end of `run`, or for a crash."""
        await self._lost.wait()

    async def held_up(self) -> bool:
        """Return false: it waits for nothing."""
        await trio.lowlevel.checkpoint()
        return False

    async def load(self) -> EngineLoad:
        """Return the counts of requests and of their KV tokens; raises `EngineLost` after the end."""
        await trio.lowlevel.checkpoint()
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        return EngineLoad.of_ranks([batch.load() for batch in self._batches]).totals

    async def operate(self, request: Message) -> Message:
        """Carry out an operation by its handler; raises `Unsupported` without one, `EngineLost` after the end."""
        await trio.lowlevel.checkpoint()
        check_operation(request, self.info)
        if self._lost.is_set():
            raise EngineLost("the engine has ended")
        return await self._handlers[type(request)](request)

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        """Pass on the pages of the prefix cache, and then each change; raises `EngineLost` at the end."""
        await follow_blocks(self._blocks, receive, self._lost)

    async def watch_load(self, receive: Callable[[EngineLoad], None]) -> None:
        """Pass on the load, and again when it has changed; raises `EngineLost` at the end."""
        last: EngineLoad | None = None
        while not self._lost.is_set():
            if (loads := EngineLoad.of_ranks([batch.load() for batch in self._batches])) != last:
                last = loads
                receive(loads)
            await self._load_changed.park()
            await trio.sleep(LOAD_EVERY_S)
        await trio.lowlevel.checkpoint()
        raise EngineLost(self._why)

    # Operations ------------------------------------------------------------------------

    async def _flush_cache(self, _: Message) -> Done:
        await trio.lowlevel.checkpoint()
        if any(batch.running or batch.waiting for batch in self._batches):
            raise Overloaded("requests run")
        self._drop_cache()
        return Done()

    def _drop_cache(self) -> None:
        for batch in self._batches:
            batch.flush()
            self._pass_on_changes(batch)

    # Faults on request -----------------------------------------------------------------

    @property
    def faults(self) -> Faults:
        """The faults injected at the moment; the first rank's, if ranks differ."""
        return self._batches[0].faults

    def inject(self, faults: Faults, rank: int | None = None) -> None:
        """Replace the injected faults, of one rank or of all; slower steps begin with the next one."""
        for batch in self._chosen(rank):
            batch.inject(faults)
        self._schedule_crash()
        self._wake.unpark_all()

    def stall(self, for_s: float, rank: int | None = None) -> None:
        """Stop one rank or all for so long: no step ends, and nothing is released."""
        for batch in self._chosen(rank):
            batch.stall(trio.current_time() + for_s)
        self._wake.unpark_all()

    def _chosen(self, rank: int | None) -> tuple[Batch, ...]:
        return self._batches if rank is None else (self._batches[rank],)

    def crash(self) -> None:
        """Become lost at once: every answer fails, and `run` raises `EngineDied`."""
        self._end("the engine crashed")

    # The actor -------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute until cancelled, waking once a step; raises `EngineDied` after a crash."""
        self._schedule_crash()
        task_status.started()
        try:
            while not self._lost.is_set():
                now = trio.current_time()
                if now >= self._crash_at:
                    break
                for batch in self._batches:
                    self._advance(batch, now)
                with trio.move_on_at(min(self._crash_at, *[batch.next_at() for batch in self._batches])):
                    await self._wake.park()
            self.crash()
            raise EngineDied(self._why)
        finally:
            self._end("the engine was stopped")

    def _advance(self, batch: Batch, now: float) -> None:
        """Deliver the events of a rank until now, and publish its blocks."""
        update = batch.advance(now)
        if update.emitted:
            self._profiles.on_step()
            self._experts.on_step()
        for _, finished in update.ended:
            self._experts.on_end(finished.usage)
        self._deliver(update)
        self._pass_on_changes(batch)
        if update.begun or update.ended or update.failed:
            self._load_changed.unpark_all()

    def _check_leg(self, request: Generate) -> None:
        """Raise `HandOffFailed` for a rendezvous that is none, at another prefill, or at another rank of this one."""
        if self.spec.leg is Leg.BOTH or self.spec.is_sequential:
            return
        where, own = Rendezvous.decode(request.hand_off), self.info.hand_off_address
        if own is None:
            return
        if where.has_partner and where.address != own:
            raise HandOffFailed("the rendezvous is at another prefill")
        if where.rank != request.rank:
            raise HandOffFailed("the rendezvous is at another rank")

    def _wake_if_due(self, batch: Batch) -> None:
        """Wake the actor if a rank has something to do now, not only at the end of its step."""
        if batch.next_at() <= trio.current_time():
            self._wake.unpark_all()

    def _schedule_crash(self) -> None:
        after_s = self.faults.crash_after_s
        self._crash_at = inf if after_s is None else trio.current_time() + after_s

    def _deliver(self, update: BatchUpdate) -> None:
        """Put a rank's events into the answers; their readers may abort, submit or crash meanwhile."""
        answers, now = self._answers, trio.current_time()
        for request_id, beginning in update.begun:
            if (answer := answers.get(request_id)) is not None:
                answer.put(beginning, 0)
        for request_id, token, logprob in zip(update.emitted, update.tokens, update.logprobs, strict=True):
            if (answer := answers.get(request_id)) is not None:
                if logprob is None:
                    put_token(answer, token, now, one_token)
                else:
                    answer.put(Tokens((token,), (logprob,)))
        for request_id, finished in update.ended:
            self._adapters.release(request_id)
            if (answer := answers.pop(request_id, None)) is not None:
                answer.end(finished)
        for request_id, error in update.failed:
            self._adapters.release(request_id)
            if (answer := answers.pop(request_id, None)) is not None:
                answer.fail(error)

    def _pass_on_changes(self, batch: Batch) -> None:
        """Publish the changes of a rank's prefix cache."""
        if (changes := batch.memory.events.take()) and self.publishes:
            self._blocks.apply(changes)

    def _end(self, why: str) -> None:
        """Become lost; the first reason counts."""
        if self._lost.is_set():
            return
        self._why = why
        self._lost.set()
        self._load_changed.unpark_all()
        self._blocks.notify()
        for batch in self._batches:
            batch.close()
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            answer.fail(EngineLost(why))
        self._wake.unpark_all()
