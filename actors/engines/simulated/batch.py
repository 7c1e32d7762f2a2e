"""Continuous batching as a function of time: what is asked goes in, and each turn says what has come out by `now`.

A step gives one token to every request that answers, and computes at most `prefill_chunk` tokens of the prompts that
are not computed yet, first come, first served; a prompt's last piece gives the first token. Whoever is admitted has
pages for its prompt and its longest answer from then on, so what runs never waits for memory, and nothing is preempted.

A prefill's answer ends with its first token, which comes when the prompt is computed and a decode that it meets has
a slot and pages for it. A decode has those for what another engine computes: the first token is there with the prompt,
when that engine alone would have computed it and `transfer_s` has passed.

There is no clock in here: times come in as `now`, in seconds, and never go back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from math import inf

from attrs import Factory, define, field, frozen

from actors.engines.simulated.faults import Chance, Faults
from actors.engines.simulated.kv_memory import Lease, Memory, chain, packed, root
from actors.engines.simulated.output import OutputGenerator, OutputSequence
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import SimulatedSpec
from protocol.cluster import Leg
from protocol.errors import AskerLeft, EngineRefused, RequestError
from protocol.messages import EngineLoad, Finished, FinishReason, Generate, Logprob, Usage


@frozen
class Turn:
    """What has happened, by request id; `spoke`, `tokens` and `logprobs` are parallel."""

    begun: list[tuple[str, int]] = Factory(list)  # with how many tokens of the prompt were cached
    spoke: list[str] = Factory(list)
    tokens: list[int] = Factory(list)
    logprobs: list[Logprob | None] = Factory(list)
    ended: list[tuple[str, Finished]] = Factory(list)
    failed: list[tuple[str, RequestError]] = Factory(list)


@define(eq=False)
class _Held:
    """One request, from its submission until nothing is held for it."""

    request: Generate
    digests: list[bytes] | None = None  # of the prompt's full pages, once somebody wanted to know
    voice: OutputSequence | None = None
    lease: Lease | None = None
    cached: int = 0
    computed: int = 0  # tokens of the prompt
    output: list[int] = Factory(list)
    ready_at: float = inf  # when the prompt is there that another engine computes, or can be handed to that one
    free_at: float = inf  # set by an abort
    stuck: bool = False

    @property
    def room(self) -> int:
        """Where a prefill and a decode meet for it."""
        assert self.request.rendezvous is not None
        return self.request.rendezvous.room

    @property
    def kv_tokens(self) -> int:
        """How many tokens are in its pages; the last one that was said is not yet."""
        return self.computed + max(len(self.output) - 1, 0)


@frozen
class _Step:
    """One step on its way, and what takes part in it."""

    began_at: float
    planned_at: float  # what comes in the same instant still joins
    ends_at: float
    answering: list[_Held]
    pieces: list[tuple[_Held, int]]


@define(eq=False)
class Batch:
    """The scheduler of one engine."""

    spec: SimulatedSpec
    speech: OutputGenerator
    chance: Chance
    faults: Faults = field(default=Faults())
    rendezvous_rooms: RendezvousRooms = field(factory=RendezvousRooms)
    wake: Callable[[], object] = field(default=lambda: None)  # called when a decode has taken what waited for it
    memory: Memory = field(init=False)
    waiting: OrderedDict[str, _Held] = field(init=False, factory=OrderedDict)  # a dict finds its first slowly
    running: dict[str, _Held] = field(init=False, factory=dict)
    _leaving: dict[str, _Held] = field(init=False, factory=dict)
    # Those that run, and whose prompts are on their way: a decode's to it, a prefill's to decodes.
    _coming: dict[str, _Held] = field(init=False, factory=dict)
    _step: _Step | None = field(init=False, default=None)
    _stalled_until: float = field(init=False, default=-inf)
    _news: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.memory = Memory(self.spec.pages)

    # What is asked ---------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether nothing more can be submitted."""
        return len(self.running) + len(self.waiting) >= self.spec.slots + self.spec.waiting_max

    def submit(self, request: Generate, now: float) -> None:
        """Let a request wait for its slot."""
        assert request.id not in self.running, "an id that is in use"
        assert request.id not in self.waiting, "an id that is in use"
        self.waiting[request.id] = held = _Held(request)
        if self.spec.leg is Leg.DECODE:
            self.rendezvous_rooms.expect(held.room)
        if self._step is None or self._step.planned_at == now:
            self._news = True

    def abort(self, request_id: str, now: float) -> None:
        """Let a request go: at once if it still waits, else `release_s` from now."""
        held = self.running.get(request_id) or self.waiting.get(request_id)
        if held is None or held.free_at < inf:
            return
        held.free_at = now
        if request_id in self.running:
            held.free_at += self.spec.costs.release_s
            held.stuck = self._happens(self.faults.stuck)
        self._coming.pop(request_id, None)
        self._leaving[request_id] = held
        self._news = True

    def inject(self, faults: Faults) -> None:
        """Take other faults; what is on its way ends as it began."""
        self.faults = faults
        self._news = True

    def stall(self, until: float) -> None:
        """Let nothing happen before `until`."""
        self._stalled_until = max(self._stalled_until, until)
        self._news = True

    def flush(self) -> None:
        """Drop the prefix cache."""
        self.memory.flush()

    def close(self) -> None:
        """Let nobody wait for this engine, which has ended."""
        for held in (*self.running.values(), *self.waiting.values()):
            self._leave(held)

    def load(self) -> EngineLoad:
        """Count requests, and the KV memory that they hold: pages that several share count once."""
        shared = self.memory.referenced * self.spec.page_size
        own = sum(
            held.kv_tokens - len(held.lease.shared) * self.spec.page_size
            for held in self.running.values()
            if held.lease is not None
        )
        return EngineLoad(len(self.running), len(self.waiting), shared + own)

    # What happens ----------------------------------------------------------------------

    def next_at(self) -> float:
        """Return when something happens next if nothing more is asked; `inf` for never, the past for at once."""
        if self._news:
            return self._stalled_until
        at = inf if self._step is None else self._step.ends_at
        for held in self._leaving.values():
            if held.free_at < at and not self._is_stuck(held):
                at = held.free_at
        at = min(at, *(held.ready_at for held in self._coming.values())) if self._coming else at
        return max(at, self._stalled_until)

    def advance(self, now: float) -> Turn:
        """Return what has happened by now; at most one step ends in one turn, however late it is."""
        turn = Turn()
        if now < self._stalled_until:
            return turn
        self._news = False
        due, step = now, self._step
        if step is not None and step.ends_at <= now:
            due, self._step = max(step.ends_at, self._stalled_until), None
            self._complete(step, turn)
            if self._happens(self.faults.stall):
                self.stall(now + self.faults.stall_s)
        self._release(now, turn)
        if now < self._stalled_until:
            return turn
        self._arrive(now, turn)
        if self._step is None:
            self._plan(due, now)
        elif self._step.planned_at == now:
            self._plan(self._step.began_at, now)
        return turn

    def _happens(self, share: float) -> bool:
        return share > 0 and self.chance.random() < share

    def _is_stuck(self, held: _Held) -> bool:
        return held.stuck and self.faults.stuck > 0

    def _release(self, now: float, turn: Turn) -> None:
        gone = [held for held in self._leaving.values() if held.free_at <= now and not self._is_stuck(held)]
        for held in gone:
            del self._leaving[held.request.id]
            self._drop(held)
            turn.failed.append((held.request.id, AskerLeft("aborted")))

    def _arrive(self, now: float, turn: Turn) -> None:
        for held in [held for held in self._coming.values() if held.ready_at <= now]:
            del self._coming[held.request.id]
            held.computed = len(held.request.tokens)
            self._begin(held, turn)

    # A step begins ---------------------------------------------------------------------

    def _plan(self, due: float, now: float) -> None:
        """Begin a step at `due`, which makes good what was lost between steps; at `now` if it would be over already."""
        self._step = None
        self._admit(now)
        answering: list[_Held] = []
        pieces: list[tuple[_Held, int]] = []
        room = self.spec.prefill_chunk
        for held in self.running.values():
            if held.free_at < inf:
                continue
            if held.output:
                answering.append(held)
            elif room and held.request.id not in self._coming:
                size = min(room, len(held.request.tokens) - held.computed)
                pieces.append((held, size))
                room -= size
        if not answering and not pieces:
            return
        lasts_s = self._lasts_s(answering, pieces, self.spec.prefill_chunk - room)
        began_at = due if due + lasts_s > now else now
        self._step = _Step(began_at, now, began_at + lasts_s, answering, pieces)

    def _lasts_s(self, answering: list[_Held], pieces: list[tuple[_Held, int]], prefill_tokens: int) -> float:
        costs, kv_tokens = self.spec.costs, 0
        if costs.per_kv_token_s:
            kv_tokens = sum(held.kv_tokens for held in answering) + sum(held.computed for held, _ in pieces)
        return self.faults.slow * costs.step_s(prefill_tokens, len(answering) + len(pieces), kv_tokens)

    def _admit(self, now: float) -> None:
        """Give slots and pages to those who wait, in their order: nobody is overtaken by a smaller one."""
        while self.waiting and len(self.running) < self.spec.slots:
            request_id, held = next(iter(self.waiting.items()))
            tokens, size = held.request.tokens, self.spec.page_size
            prompt = packed(tokens) if held.digests is None else b""
            if held.digests is None:
                salt = root(held.request.cache_salt)
                held.digests = chain(salt, prompt, size) if self._caches else []
                held.voice = self.speech.answer(held.request, prompt)
            # At least one token is computed, because the first token of the answer comes out of that.
            sharable = held.digests[: (len(tokens) - 1) // size]
            held.lease = self.memory.take(sharable, -(-(len(tokens) + self._most(held)) // size))
            if held.lease is None:
                return
            held.cached = held.computed = len(held.lease.shared) * size
            self.running[request_id] = self.waiting.pop(request_id)
            if self.spec.leg is Leg.DECODE:
                held.ready_at = now + self._elsewhere_s(len(tokens))
                self._coming[request_id] = held
                self.rendezvous_rooms.take(held.room)

    @property
    def _caches(self) -> bool:
        """Whether there is a prefix cache; a decode is given every prompt, and has no use for one."""
        return self.spec.prefix_cache and self.spec.leg is not Leg.DECODE

    def _most(self, held: _Held) -> int:
        """Return how many tokens a request gets here at the most."""
        return 1 if self.spec.leg is Leg.PREFILL else held.request.sampling.tokens_max

    def _elsewhere_s(self, tokens: int) -> float:
        """Return how long an engine like this one takes for a prompt alone and nothing cached, and to hand it over."""
        costs, chunk = self.spec.costs, self.spec.prefill_chunk
        steps = (costs.step_s(min(chunk, tokens - done), 1, done) for done in range(0, tokens, chunk))
        return self.faults.slow * (sum(steps) + costs.transfer_s)

    # A step ends -----------------------------------------------------------------------

    def _complete(self, step: _Step, turn: Turn) -> None:
        for held, size in step.pieces:
            if held.free_at < inf:
                continue
            held.computed += size
            self._publish_prompt(held)
            if held.computed < len(held.request.tokens):
                continue
            if self.spec.leg is Leg.PREFILL and self.rendezvous_rooms.wait(held.room, partial(self._taken, held)):
                self._coming[held.request.id] = held
                continue
            self._begin(held, turn)
        for held in step.answering:
            if held.free_at == inf:
                self._speak(held, turn)

    def _taken(self, held: _Held) -> None:
        """Let a prompt go on its way: a decode has taken it, or never will."""
        held.ready_at = -inf
        if self._coming.get(held.request.id) is held:
            self.wake()

    def _begin(self, held: _Held, turn: Turn) -> None:
        if self._happens(self.faults.refuse):
            self._drop(held)
            turn.failed.append((held.request.id, EngineRefused("the engine does not like it")))
            return
        turn.begun.append((held.request.id, held.cached))
        self._speak(held, turn)

    def _speak(self, held: _Held, turn: Turn) -> None:
        request, voice = held.request, held.voice
        assert voice is not None
        wanted = request.sampling
        token = next(voice.ids)
        held.output.append(token)
        number = len(held.output)
        turn.spoke.append(request.id)
        turn.tokens.append(token)
        most = request.logprobs
        place = request.said + number
        turn.logprobs.append(None if most is None else self.speech.logprob(voice, place, token, most))
        stops = token in voice.ends and number > wanted.tokens_min and self.spec.leg is not Leg.PREFILL
        if stops or number == self._most(held):
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            usage = Usage(len(request.tokens), number, held.cached)
            turn.ended.append((request.id, Finished(reason, usage, token if stops else None)))
            self._drop(held)

    def _publish_prompt(self, held: _Held) -> None:
        assert held.digests is not None
        assert held.lease is not None
        if not self._caches:
            return
        for digest in held.digests[len(held.lease.shared) : held.computed // self.spec.page_size]:
            self.memory.publish(held.lease, digest)

    def _drop(self, held: _Held) -> None:
        """Free what a request holds; its pages, those of its answer too, stay cached for who continues it."""
        self._leave(held)
        self.waiting.pop(held.request.id, None)
        if self.running.pop(held.request.id, None) is None or held.lease is None:
            return
        self._coming.pop(held.request.id, None)
        if self._caches and held.output:
            shared, size = held.lease.shared, self.spec.page_size
            rest = (held.request.tokens[len(shared) * size :] + held.output)[: held.kv_tokens - len(shared) * size]
            before = shared[-1] if shared else root(held.request.cache_salt)
            for digest in chain(before, packed(rest), size):
                self.memory.publish(held.lease, digest)
        self.memory.release(held.lease)

    def _leave(self, held: _Held) -> None:
        """Let no prefill wait for what this engine does not take."""
        if self.spec.leg is Leg.DECODE:
            self.rendezvous_rooms.take(held.room)
