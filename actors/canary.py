"""Canary: ask an idle engine for a token now and then, and have it replaced if it does not answer.

Only an answer proves that an engine lives: its process, its socket and a count in shared memory may outlive its
scheduler. A busy engine is watched by the deadlines of its requests; an idle one would fail the next client first. So
the canary is a request like any other, through the same port, and all of its answer counts. It affects no client: it
shares no cache, by a salt of its own, is in no usage and in no load of routing, and yields to the first request. It
never asks an engine that is out of service on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import trio
from attrs import define, frozen

from actors.engines.port import Generation
from actors.engines.slots.probe import probing
from actors.engines.slots.slots import Slots
from actors.kit.hand_off import KindHandOff
from protocol.errors import EngineDied, EngineLost, EngineStuck, InternalError, RequestError
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Sampling, Started, Tokens
from protocol.strict.checks import Within
from protocol.token_ids import TokenIds

# The time for an answer is waited in so many parts: a part in which this process was stopped counts as one.
WAITS = 4
WITHIN_S = 10.0
"""The time for the answer of a canary whose engine names none."""
PRIORITY_MIN = -(2**31)
PROMPT_TOKENS = (1, 2, 3, 0)  # the first one in the vocabulary and no placeholder is the prompt

ANSWERED, YIELDED, LATE, FAILED = "answered", "yielded", "late", "failed"
"""The outcomes of a canary: the engine goes on after the first two, and ends after the others."""

Time = Annotated[float, Within(above=0, at_most=86_400)]


@frozen(kw_only=True)
class CanaryLimits:
    """`[engine.NAME.canary]`: whether an idle engine is asked, after how long, and how long its answer may take."""

    enabled: bool = True  # whether the idle engine is asked for a token now and then
    after_s: Time = 10.0  # time without a request, or since the last canary, after which it is asked
    # longest time for its whole answer; then the engine is restarted. By default `silent_s` of the engine
    within_s: Time | None = None

    @property
    def answered_within_s(self) -> float:
        """The longest time for its whole answer."""
        return WITHIN_S if self.within_s is None else self.within_s


@define(eq=False)
class CanaryObserver:
    """Receives the ends of canaries; this one ignores them."""

    def ended(self, rank: int, outcome: str, seconds: float) -> None:
        """A canary of a rank has ended, after so many seconds."""


async def canary(
    slots: Slots,
    limits: CanaryLimits,
    new_id: Callable[[], str],
    new_number: Callable[[], int],
    hand_off: KindHandOff | None,
    observer: CanaryObserver,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Watch one rank of an engine, that of the slots; `hand_off` is its kind's, None for a kind without pairs.

    Raises `EngineStuck` if a canary gets no whole answer within its time, or an error, and `EngineDied` when the engine
    is lost.
    """
    task_status.started()
    while True:
        await _wait_idle(slots, limits.after_s)
        info, rank, alone = slots.engine.info, slots.rank, b""
        if hand_off is not None and info.hand_off is not HandOff.NONE:
            alone = hand_off.without_partner(info, rank=rank, number=new_number())
        request = canary_request(info, new_id(), new_id(), alone, rank)
        report = partial(_report, observer, slots.rank, trio.current_time())
        await _ask(slots, request, limits.answered_within_s, report)


def canary_request(info: EngineInfo, request_id: str, salt: str, hand_off: bytes = b"", rank: int = 0) -> Generate:
    """Return the request of a canary to a rank: one token, greedily, and one step more of a decode.

    A decode computes nothing for its first token, which comes from a prefill. A leg of a pair is asked with a
    `hand_off` without a partner.
    """
    media = info.media
    special = () if media is None else (media.image_token, media.video_token)
    prompt = next(token for token in PROMPT_TOKENS if token < info.vocabulary_size and token not in special)
    return Generate(
        request_id,
        TokenIds.of([prompt]),
        Sampling(min(2 if info.is_decode else 1, info.request_tokens_max - 1), temperature=0.0, ignore_eos=True),
        cache_salt=salt,
        priority=PRIORITY_MIN,
        hand_off=hand_off,
        rank=rank,
    )


async def _wait_idle(slots: Slots, after_s: float) -> None:
    """Wait until the engine is in service and has had no request for so long."""
    await trio.lowlevel.checkpoint()
    while True:
        now, since = trio.current_time(), slots.idle_since
        due_at = now + after_s if since is None or not slots.in_service() else since + after_s
        if due_at <= now:
            return
        await trio.sleep_until(due_at)


async def _ask(slots: Slots, request: Generate, within_s: float, report: Callable[[str], None]) -> None:
    """Ask for one answer, and report its outcome; raises as `canary` does."""
    outcome, returns_state = YIELDED, slots.engine.info.returns_states
    try:
        async with probing(slots, request) as generation:
            if not await _is_over(slots, generation, within_s, returns_state=returns_state):
                outcome = LATE
                raise EngineStuck(  # noqa: TRY301  # it leaves the probe at once
                    f"its canary got no whole answer within {within_s:g} s"
                )
            if not returns_state:
                await _check_whole(generation)
            outcome = ANSWERED
        report(outcome)
    except EngineLost as error:
        raise EngineDied("the engine is lost") from error
    except EngineStuck:  # late, or its slot is kept until the engine is at fault
        report(LATE if outcome == LATE else FAILED)
        raise
    except RequestError as error:
        report(FAILED)
        raise EngineStuck(f"its canary failed: {error.code}: {error.detail}") from error


async def _is_over(slots: Slots, generation: Generation, within_s: float, *, returns_state: bool) -> bool:
    """Wait for the end of an answer, or for its state, and return whether it came in time.

    The time begins anew while the engine is held up: its kind limits that.
    """
    await trio.lowlevel.checkpoint()
    waits = WAITS
    while waits:
        with trio.move_on_after(within_s / WAITS):
            if returns_state:
                await _receive_state(generation)
            else:
                await generation.over.wait()
            return True
        waits -= 1
        if not waits and await slots.held_up():
            waits = WAITS
    return generation.over.is_set() and not returns_state


async def _receive_state(generation: Generation) -> None:
    """Wait for the state of a prompt, which is all of a sequential prefill's answer; raises as `_check_whole` does."""
    async for reply in generation:
        if isinstance(reply, Started) and reply.hand_off:
            return
    raise InternalError("it ended without a state")


async def _check_whole(generation: Generation) -> None:
    """Raise the `RequestError` of an answer, or `InternalError` for one without a token."""
    tokens = 0
    async for reply in generation:
        tokens += len(reply.ids) if isinstance(reply, Tokens) else 0
    if await generation.result() is None or not tokens:
        raise InternalError("it ended without a token")


def _report(observer: CanaryObserver, rank: int, began_at: float, outcome: str) -> None:
    observer.ended(rank, outcome, trio.current_time() - began_at)
