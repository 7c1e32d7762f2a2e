"""Continuous batching as a function of time: requests go in, and `advance(now)` returns the events until `now`.

A step gives one token to every decoding request, and computes up to `prefill_chunk` tokens of the prompts, first come,
first served; a prompt's last chunk gives the first token. A request is admitted with pages for its prompt and answer,
so that no running request waits for memory. Only an answer of more than `ANSWER_TOKENS_MAX` tokens takes more as it
grows. Without free pages the shortest answers are preempted, as by SGLang: they give up slots and pages, are the first
to get some, and compute all anew.

    submit -> waiting -> running: prompt in chunks -> decoding: a token a step -> ended
                 ^                                        | its pages go to a longer answer
                 +------------------- preempted ----------+

    prefill leg: running -> transferring until its decode accepts the prompt -> one token -> ended
    decode leg:  waiting -> transferring until its prefill would be done and `transfer_s` has passed -> decoding

    sequential prefill: running -> transferring: its state is held until it is aborted
    sequential decode:  waiting -> transferring for `transfer_s`, if the state is still held then -> decoding

There is no clock in here: times come in as `now`, in seconds, and never go back. So a day of traffic is simulated in
seconds, and the same calls at the same times give the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import inf

from attrs import define, field

from actors.engines.simulated.cache_events import CacheEvents
from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.kv_memory import KvMemory
from actors.engines.simulated.output import OutputGenerator, pack_prompt
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import FaultDraws, Faults, SimulatedSpec
from actors.engines.simulated.step import BatchStep, BatchUpdate
from actors.engines.simulated.transfers import Transfers
from protocol.cost import ANSWER_TOKENS_MAX
from protocol.errors import AskerLeft, EngineRefused, HandOffFailed, NotReady, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.engine import RankLoad
from protocol.messages.generation import Finished, FinishReason, Generate, Tokens, Usage
from protocol.weight_versions import FIRST_VERSION


@define(eq=False)
class Batch:
    """The scheduler of one rank of an engine."""

    spec: SimulatedSpec
    speech: OutputGenerator
    chance: FaultDraws
    faults: Faults = field(default=Faults())
    rendezvous_rooms: RendezvousRooms = field(factory=RendezvousRooms)
    states: HeldStates = field(factory=HeldStates)
    wake: Callable[[], object] = field(default=lambda: None)  # called when a decode has accepted a prompt
    rank: int = 0
    version: Callable[[], str] = field(default=lambda: FIRST_VERSION)  # of the weights
    transfers: Transfers = field(init=False)
    memory: KvMemory = field(init=False)
    # Ordered, since a dict is slow to find its first entry after many removals.
    waiting: OrderedDict[str, HeldRequest] = field(init=False, factory=OrderedDict)
    running: dict[str, HeldRequest] = field(init=False, factory=dict)
    _leaving: dict[str, HeldRequest] = field(init=False, factory=dict)
    _growing: dict[str, HeldRequest] = field(init=False, factory=dict)  # running requests beyond their first pages
    # Running requests whose prompts are being transferred, to a decode or from a prefill.
    _transferring: dict[str, HeldRequest] = field(init=False, factory=dict)
    _step: BatchStep | None = field(init=False, default=None)
    _stalled_until: float = field(init=False, default=-inf)
    _still: bool = field(init=False, default=False)  # between steps: none begins
    _news: bool = field(init=False, default=False)
    _prompt_tokens: int = field(init=False, default=0)  # the prompt tokens of all admitted requests
    _cached_tokens: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.transfers = Transfers(self.spec, self.rendezvous_rooms, self.states)
        self.memory = KvMemory(self.spec.pages, CacheEvents(rank=self.rank))

    # Requests --------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether nothing more can be submitted."""
        return len(self.running) + len(self.waiting) >= self.spec.slots + self.spec.waiting_max

    def submit(self, request: Generate, now: float) -> None:
        """Queue a request for a slot; raises `HandOffFailed` for a state that it cannot take, `NotReady` at rest."""
        if self._still:
            raise NotReady("the engine stands still")
        assert request.id not in self.running, "an id that is in use"
        assert request.id not in self.waiting, "an id that is in use"
        held = HeldRequest(request)
        self.transfers.submitted(held)
        held.look_up(self.spec.page_size, self.spec.media, caches=self._caches)
        self.waiting[request.id] = held
        if self._step is None or self._step.planned_at == now:
            self._news = True

    def abort(self, request_id: str, now: float) -> None:
        """Abort a request: released at once if it still waits, else `release_s` from now."""
        held = self.running.get(request_id) or self.waiting.get(request_id)
        if held is None or held.free_at < inf:
            return
        held.free_at = now
        if request_id in self.running:
            held.free_at += self.spec.costs.release_s
            held.stuck = self._happens(self.faults.stuck)
        self._transferring.pop(request_id, None)
        self.transfers.release(held)
        self._leaving[request_id] = held
        self._news = True

    def inject(self, faults: Faults) -> None:
        """Replace the faults; the current step ends as it began."""
        self.faults = faults
        self._news = True

    def stall(self, until: float) -> None:
        """Stop everything until `until`."""
        self._stalled_until = max(self._stalled_until, until)
        self._news = True

    def flush(self) -> None:
        """Drop the prefix cache."""
        self.memory.flush()

    def stand_still(self) -> None:
        """Put all requests back into the queue with their tokens so far, and begin no step before `go_on`."""
        self._still, self._step = True, None
        for held in (*reversed(self.running.values()),):
            self._put_back(held)

    def go_on(self) -> None:
        """Begin steps again."""
        self._still, self._news = False, True

    def close(self) -> None:
        """Release the prefills that wait for this ended engine."""
        for held in (*self.running.values(), *self.waiting.values()):
            self.transfers.accepted(held)
        self.transfers.close()

    def load(self) -> RankLoad:
        """Return the counts of requests and of KV tokens; shared pages count once."""
        shared = self.memory.referenced * self.spec.page_size
        own = sum(
            held.kv_tokens - len(held.lease.shared) * self.spec.page_size
            for held in self.running.values()
            if held.lease is not None
        )
        waiting_tokens = sum(len(held.request.tokens) for held in self.waiting.values())
        hit_rate = self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        return RankLoad(
            running=len(self.running),
            slots=self.spec.slots,
            waiting=len(self.waiting),
            waiting_tokens=waiting_tokens,
            kv_tokens_used=shared + own,
            kv_tokens_max=self.memory.pages_max * self.spec.page_size,
            hit_rate=hit_rate,
        )

    # Time ------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Return when something happens next without further calls: `inf` for never, a time in the past for at once."""
        if self._news:
            return self._stalled_until
        earliest = inf if self._step is None else self._step.ends_at
        for held in self._leaving.values():
            if held.free_at < earliest and not self._is_stuck(held):
                earliest = held.free_at
        if self._transferring:
            earliest = min(earliest, *(held.ready_at for held in self._transferring.values()))
        return max(earliest, self._stalled_until)

    def advance(self, now: float) -> BatchUpdate:
        """Return the events until `now`; at most one step ends in one call, however late it is."""
        update = BatchUpdate()
        if now < self._stalled_until:
            return update
        self._news = False
        due, step = now, self._step
        if step is not None and step.ends_at <= now:
            due, self._step = max(step.ends_at, self._stalled_until), None
            self._complete(step, update)
            if self._happens(self.faults.stall):
                self.stall(now + self.faults.stall_s)
        self._release(now, update)
        if now < self._stalled_until:
            return update
        self._finish_transfers(now, update)
        if self._step is None:
            self._plan(due, now)
        elif self._step.planned_at == now:
            self._plan(self._step.began_at, now)
        return update

    def _happens(self, share: float) -> bool:
        return share > 0 and self.chance.random() < share

    def _is_stuck(self, held: HeldRequest) -> bool:
        return held.stuck and self.faults.stuck > 0

    def _release(self, now: float, update: BatchUpdate) -> None:
        gone = [held for held in self._leaving.values() if held.free_at <= now and not self._is_stuck(held)]
        for held in gone:
            del self._leaving[held.request.id]
            self._drop(held)
            update.failed.append((held.request.id, AskerLeft("aborted")))

    def _finish_transfers(self, now: float, update: BatchUpdate) -> None:
        for held in [held for held in self._transferring.values() if held.ready_at <= now]:
            del self._transferring[held.request.id]
            held.computed = len(held.request.tokens)
            if not self.transfers.can_arrive(held):
                self._fail(held, HandOffFailed("its prefill was left before the decode had the KV cache"), update)
            else:
                self._begin(held, update)

    # A step begins ---------------------------------------------------------------------

    def _plan(self, due: float, now: float) -> None:
        """Begin a step at `due`, so that no time is lost between steps; at `now` if it would be over already."""
        self._step = None
        if self._still:
            return
        self._grow()
        self._admit(now)
        decoding: list[HeldRequest] = []
        pieces: list[tuple[HeldRequest, int]] = []
        room = self.spec.prefill_chunk
        for held in self.running.values():
            if held.free_at < inf:
                continue
            if len(held.output) > held.given:
                decoding.append(held)
            elif room and held.request.id not in self._transferring:
                self._cached_tokens += held.find(self.memory, self.spec.page_size)
                size = min(room, len(held.prompt) - held.computed)
                pieces.append((held, size))
                room -= size
        if not decoding and not pieces:
            return
        lasts_s = self._step_s(decoding, pieces, self.spec.prefill_chunk - room)
        began_at = due if due + lasts_s > now else now
        self._step = BatchStep(began_at, now, began_at + lasts_s, decoding, pieces)

    def _step_s(self, decoding: list[HeldRequest], pieces: list[tuple[HeldRequest, int]], prefill_tokens: int) -> float:
        costs, kv_tokens = self.spec.costs, 0
        if costs.per_kv_token_s:
            kv_tokens = sum(held.kv_tokens for held in decoding) + sum(held.computed for held, _ in pieces)
        return self.faults.slow * costs.step_s(prefill_tokens, len(decoding) + len(pieces), kv_tokens)

    def _admit(self, now: float) -> None:
        """Give slots and pages to waiting requests, by priority and in their order: a smaller one does not overtake."""
        while self.waiting and len(self.running) < self.spec.slots:
            request_id, held = max(self.waiting.items(), key=lambda item: item[1].request.priority)
            request, size = held.request, self.spec.page_size
            if held.sequence is None:
                held.sequence = self.speech.answer(request, pack_prompt(held.prompt))
            held.look_up(size, self.spec.media, caches=self._caches)  # anew after a preemption
            most = len(held.prompt) + min(self._tokens_max(held) - held.given, ANSWER_TOKENS_MAX)
            held.lease = self.memory.take(held.reusable(size), -(-most // size))
            if held.lease is None:
                if not self._put_one_back(below=request.priority):
                    return
                continue
            held.computed = len(held.lease.shared) * size
            held.cached = held.cached if held.given else held.computed
            self._prompt_tokens += len(held.prompt)
            self._cached_tokens += held.computed
            self.running[request_id] = self.waiting.pop(request_id)
            if self.spec.leg is Leg.DECODE and not held.given:
                held.ready_at = now + self._prefill_and_transfer_s(len(request.tokens))
                self._transferring[request_id] = held
                self.transfers.accepted(held)

    def _grow(self) -> None:
        """Give pages to very long answers, if need be the shortest decoding answers' pages."""
        for held in tuple(self._growing.values()):
            while held.request.id in self._growing and held.free_at == inf and not self._has_page(held):
                self._put_one_back()

    def _put_one_back(self, below: float = inf) -> bool:
        """Take the pages of a decoding request below a priority: of the lowest one, the shortest answer's."""
        decoding = (other for other in self.running.values() if other.answered and other.free_at == inf)
        lower = [other for other in decoding if other.request.priority < below]
        if not lower:
            return False
        self._put_back(min(lower, key=lambda other: (other.request.priority, len(other.output))))
        return True

    def _put_back(self, held: HeldRequest) -> None:
        """Take the slot and the pages of a request, which is the first to get some again."""
        self._release_pages(held)
        held.preempt()
        self.waiting[held.request.id] = self.running.pop(held.request.id)
        self.waiting.move_to_end(held.request.id, last=False)

    def _has_page(self, held: HeldRequest) -> bool:
        return held.has_page(self.memory, self.spec.page_size)

    @property
    def _caches(self) -> bool:
        """Whether there is a prefix cache; a decode receives every prompt's KV cache, and has no use for one."""
        return self.spec.prefix_cache and self.spec.leg is not Leg.DECODE

    def _tokens_max(self, held: HeldRequest) -> int:
        """Return the most tokens of an answer in this engine."""
        return 1 if self.spec.leg is Leg.PREFILL else held.request.sampling.tokens_max

    def _prefill_and_transfer_s(self, tokens: int) -> float:
        """Return the time until a decode has the KV cache of a prompt that it has accepted."""
        return self.faults.slow * self.spec.prefill_and_transfer_s(tokens)

    # A step ends -----------------------------------------------------------------------

    def _complete(self, step: BatchStep, update: BatchUpdate) -> None:
        for held, size in step.pieces:
            if held.free_at < inf:
                continue
            held.has_begun = True
            held.computed += size
            held.score(self.spec.seed, self.spec.vocabulary_size)
            if self._caches:
                held.publish_prompt(self.memory, self.spec.page_size)
            if held.computed < len(held.prompt):
                continue
            if held.given:
                self._emit(held, update)
                continue
            if self.transfers.waits(held, partial(self._accepted, held)):
                self._transferring[held.request.id] = held
                continue
            self._begin(held, update)
        for held in step.decoding:
            if held.free_at == inf:
                self._emit(held, update)

    def _accepted(self, held: HeldRequest) -> None:
        """End a prefill's wait: a decode has accepted the prompt, or never will."""
        held.ready_at = -inf
        if self._transferring.get(held.request.id) is held:
            self.wake()

    def _begin(self, held: HeldRequest, update: BatchUpdate) -> None:
        if self._happens(self.faults.refuse):
            self._fail(held, EngineRefused("the engine does not like it"), update)
        elif self.transfers.returns_states:
            self._transferring[held.request.id] = held
            update.begun.append((held.request.id, self.transfers.hold(held, self.version())))
        else:
            update.begun.append((held.request.id, held.started(self.version())))
            self._emit(held, update)

    def _fail(self, held: HeldRequest, error: RequestError, update: BatchUpdate) -> None:
        self._drop(held)
        update.failed.append((held.request.id, error))

    def _emit(self, held: HeldRequest, update: BatchUpdate) -> None:
        request, sequence = held.request, held.sequence
        assert sequence is not None
        wanted = request.sampling
        token = next(sequence.ids)
        held.output.append(token)
        number = len(held.output)
        if held.version != (version := self.version()):
            held.version = version
            update.begun.append((request.id, Tokens((), version=version)))
        update.emitted.append(request.id)
        update.tokens.append(token)
        top, index = request.logprobs, request.resumed_tokens + number
        update.logprobs.append(None if top is None else self.speech.logprob(sequence, index, token, top))
        stops = token in sequence.ends and number > wanted.tokens_min and self.spec.leg is not Leg.PREFILL
        if stops or number == self._tokens_max(held):
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            usage = Usage(len(request.tokens), number, held.cached)
            update.ended.append((request.id, Finished(reason, usage, token if stops else None)))
            self._drop(held)
        elif number - held.given >= ANSWER_TOKENS_MAX:
            self._growing[request.id] = held

    def _drop(self, held: HeldRequest) -> None:
        """Release a request."""
        self.transfers.accepted(held)
        self.transfers.release(held)
        self.waiting.pop(held.request.id, None)
        if self.running.pop(held.request.id, None) is not None:
            self._transferring.pop(held.request.id, None)
            self._release_pages(held)

    def _release_pages(self, held: HeldRequest) -> None:
        self._growing.pop(held.request.id, None)
        held.release_pages(self.memory, self.spec.page_size, caches=self._caches)
