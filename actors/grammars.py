"""Grammars: check each grammar before an engine sees it, in fair turns between the owners of requests.

A grammar is in effect a program that a client supplies: compiling it, or following it token by token, may take minutes
or gigabytes, and an engine that does so stands still for all its requests. A *checker*, a process of its own, compiles
and walks it first, within bounds. Owners (clients' keys) take turns; an owner that has all places but one gets no
other.

A verdict depends on the grammar alone and is kept. A check for which no request waits any more is cancelled. Nothing in
this file parses a grammar.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TypeAlias

import trio
from attrs import Factory, define, field, frozen

from actors.kit.calls import Askable, BugCounter, Call, Inbox
from actors.kit.shares import BudgetLimits
from protocol.errors import EngineLost, NotReady, Overloaded, RequestError
from protocol.messages.generation import Grammar
from protocol.messages.operations import CheckGrammar, GrammarChecked

Checker: TypeAlias = Askable[CheckGrammar, GrammarChecked, GrammarChecked]
CheckObserver: TypeAlias = Callable[[str, float], None]
"""Receives how each check ended (`accepted`, `refused`, `left`, or an error's code) and the seconds that it took."""

# How long a check waits for a checker that is being restarted. No setting: `first_token_s` bounds the wait of a client,
# and another worker's checker is asked after this one.
READY_WITHIN_S = 20.0


@define(eq=False)
class _Check:
    """The check of one grammar for one owner, for any number of its requests."""

    request: CheckGrammar
    askers: int = 0
    verdict: GrammarChecked | None = None
    failure: RequestError | None = None
    over: trio.Event = field(factory=trio.Event)
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@frozen
class GrammarChecksStatistics:
    """The numbers of checks at one moment; an unfinished check waits for its turn or runs."""

    unfinished: int
    waiting: int
    running: int


@define(eq=False)
class GrammarChecks:
    """Runs at most `checks_max` checks at a time, for one owner at most `checks_max - 1` (at least 1)."""

    wait_checker: Callable[[], Awaitable[Checker]]
    checks_max: int
    waiting_max: int
    verdicts_max: int
    on_checked: CheckObserver
    _verdicts: OrderedDict[bytes, GrammarChecked] = Factory(OrderedDict)
    _unfinished: dict[tuple[str, bytes], _Check] = Factory(dict)
    _waiting: dict[str, deque[_Check]] = Factory(dict)  # checks by owner, in the order of the owners' turns
    _running: dict[str, int] = Factory(dict)  # the number of running checks, by owner
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def verdict(self, request: CheckGrammar) -> GrammarChecked:
        """Return the verdict on a grammar, by a check if none is kept.

        The check is cancelled when all its askers have left. Raises any `RequestError` of the checker, and `Overloaded`
        if too many checks wait and no other owner has more than this one would.
        """
        await trio.lowlevel.checkpoint()
        digest = grammar_digest(request.grammar)
        if (verdict := self._verdicts.get(digest)) is not None:
            self._verdicts.move_to_end(digest)
            return verdict
        key = request.owner, digest
        if (check := self._unfinished.get(key)) is None:
            if self.waiting >= self.waiting_max:
                self._displace(request.owner)
            check = self._unfinished[key] = _Check(request)
            self._waiting.setdefault(request.owner, deque()).append(check)
            self._changed.unpark_all()
        check.askers += 1
        try:
            await check.over.wait()
        finally:
            check.askers -= 1
            if not check.askers and not check.over.is_set():
                self._cancel(key, check)
        if check.failure is not None:
            raise check.failure
        assert check.verdict is not None
        return check.verdict

    def _displace(self, owner: str) -> None:
        """Make room by failing the last check of the owner with the most; raises `Overloaded` if that is `owner`."""
        largest = max(self._waiting.values(), key=len)
        if len(largest) <= len(self._waiting.get(owner, ())) + 1:  # the check to be added included
            raise Overloaded(f"{self.waiting} grammars wait to be checked; try again")
        last = largest[-1]
        last.failure = Overloaded("the queue of checks is full, and this one made way for a key with fewer; try again")
        self._drop((last.request.owner, grammar_digest(last.request.grammar)), last)
        last.over.set()

    @property
    def waiting(self) -> int:
        """The number of checks that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def statistics(self) -> GrammarChecksStatistics:
        """Return how many checks there are."""
        return GrammarChecksStatistics(len(self._unfinished), self.waiting, sum(self._running.values()))

    async def run(self) -> None:
        """Run the checks, until cancelled."""
        async with trio.open_nursery() as running:
            while True:
                while (check := self._next()) is not None:
                    running.start_soon(self._run, check)
                await self._changed.park()

    def _next(self) -> _Check | None:
        """Return the check whose turn it is, None if no check waits or may run."""
        if sum(self._running.values()) >= self.checks_max:
            return None
        limits, running = BudgetLimits.of_slots(self.checks_max, kept=1), self._running
        owner = next((name for name in self._waiting if running.get(name, 0) < limits.owner_max), None)
        if owner is None:
            return None
        checks = self._waiting.pop(owner)
        check = checks.popleft()
        if checks:
            self._waiting[owner] = checks  # its turn is behind the other owners'
        self._running[owner] = self._running.get(owner, 0) + 1
        return check

    async def _run(self, check: _Check) -> None:  # noqa: ASYNC910  # a task of its own, whose scope may end it
        owner, began_at, outcome = check.request.owner, trio.current_time(), "left"
        key = owner, grammar_digest(check.request.grammar)
        try:
            with check.scope:
                check.verdict = await self._checked(check.request)
                outcome = "refused" if check.verdict.refusal else "accepted"
                self._remember(key[1], check.verdict)
        except RequestError as error:
            check.failure, outcome = error, error.code
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            if self._unfinished.get(key) is check:
                del self._unfinished[key]
            check.over.set()
            self._changed.unpark_all()
            self.on_checked(outcome, trio.current_time() - began_at)
        await trio.lowlevel.checkpoint()

    async def _checked(self, request: CheckGrammar) -> GrammarChecked:
        checker: Checker | None = None
        with trio.move_on_after(READY_WITHIN_S):
            checker = await self.wait_checker()
        if checker is None:
            raise NotReady("the checker of grammars is starting")
        try:
            async with checker.ask(request, 0) as answer:
                verdict = await answer.result()
        except EngineLost as error:
            raise NotReady("the checker of grammars was lost") from error
        assert verdict is not None
        return verdict

    def _remember(self, digest: bytes, verdict: GrammarChecked) -> None:
        self._verdicts[digest] = verdict
        while len(self._verdicts) > self.verdicts_max:
            self._verdicts.popitem(last=False)

    def _cancel(self, key: tuple[str, bytes], check: _Check) -> None:
        """Cancel a check for which no request waits."""
        self._drop(key, check)
        check.scope.cancel(reason="all who asked for the check have left")

    def _drop(self, key: tuple[str, bytes], check: _Check) -> None:
        """Remove a check from the waiting ones and from the joinable ones."""
        del self._unfinished[key]
        checks = self._waiting.get(key[0], deque())
        if check in checks:
            checks.remove(check)
            if not checks:
                del self._waiting[key[0]]


def grammar_digest(grammar: Grammar) -> bytes:
    """Return the key of a grammar under which its verdict is kept."""
    return sha256(f"{grammar.kind.value} {grammar.text}".encode(errors="surrogatepass")).digest()


async def grammars(
    inbox: Inbox[Call[CheckGrammar, GrammarChecked, GrammarChecked]],
    checks: GrammarChecks,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer each call with the verdict on its grammar."""
    bugs = BugCounter()

    async def answer_one(call: Call[CheckGrammar, GrammarChecked, GrammarChecked]) -> None:
        with call.answering(bugs) as answer:
            answer.end(await checks.verdict(call.request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(checks.run)
        task_status.started()
        while True:
            nursery.start_soon(answer_one, await inbox.receive())
