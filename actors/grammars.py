"""Grammars: let a grammar be compiled and walked before an engine sees it, in fair turns between those who ask."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TypeAlias

import trio
from attrs import Factory, define, field

from actors.kit.calls import Askable, BugCounter, Call, Inbox
from protocol.errors import EngineLost, NotReady, Overloaded, RequestError
from protocol.messages import CheckGrammar, Grammar, GrammarChecked

Checker: TypeAlias = Askable[CheckGrammar, GrammarChecked, GrammarChecked]
CheckObserver: TypeAlias = Callable[[str, float], None]
"""Hears of each check how it ended (`accepted`, `refused`, `left`, or an error's code) and how long it took."""

# A checker that is started again. A constant: who would rather wait less has `first_token_s`, and who waits for longer
# asks another worker's.
READY_WITHIN_S = 20.0


@define(eq=False)
class _Check:
    """One grammar that is checked, or waits to be, for one owner: for however many requests."""

    request: CheckGrammar
    askers: int = 0
    found: GrammarChecked | None = None
    failure: RequestError | None = None
    over: trio.Event = field(factory=trio.Event)
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False)
class GrammarChecks:
    """Runs at most `at_once` checks, of one owner at most all but one, and remembers `verdicts_max` verdicts."""

    checker: Callable[[], Awaitable[Checker]]
    at_once: int
    waiting_max: int
    verdicts_max: int
    heard: CheckObserver
    _known: OrderedDict[bytes, GrammarChecked] = Factory(OrderedDict)
    _unfinished: dict[tuple[str, bytes], _Check] = Factory(dict)
    _waiting: dict[str, deque[_Check]] = Factory(dict)  # by owner; the first owner's turn is next
    _running: dict[str, int] = Factory(dict)  # by owner
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def verdict(self, request: CheckGrammar) -> GrammarChecked:
        """Return what is known of a grammar, or wait for its check, which ends when nobody waits for it any more.

        Raises `Overloaded` if too many wait, of its own owner or until one of another comes, and whatever the checker
        fails with.
        """
        await trio.lowlevel.checkpoint()
        digest = grammar_digest(request.grammar)
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        key = request.owner, digest
        if (check := self._unfinished.get(key)) is None:
            if self.waiting >= self.waiting_max:
                self._displace(request.owner)
            check = self._unfinished[key] = _Check(request)
            self._waiting.setdefault(request.owner, deque()).append(check)
            self._news.unpark_all()
        check.askers += 1
        try:
            await check.over.wait()
        finally:
            check.askers -= 1
            if not check.askers and not check.over.is_set():
                self._forget(key, check)
        if check.failure is not None:
            raise check.failure
        assert check.found is not None
        return check.found

    def _displace(self, owner: str) -> None:
        """Make room in a full line by its largest owner's last; raises `Overloaded` if that would be this one's own."""
        largest = max(self._waiting.values(), key=len)
        if len(largest) <= len(self._waiting.get(owner, ())) + 1:
            raise Overloaded(f"{self.waiting} grammars wait to be checked")
        last = largest[-1]
        last.failure = Overloaded("as many grammars wait as may, and one of a key with fewer displaced this one")
        self._drop((last.request.owner, grammar_digest(last.request.grammar)), last)
        last.over.set()

    @property
    def waiting(self) -> int:
        """How many checks wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def run(self) -> None:
        """Run the checks, until cancelled."""
        async with trio.open_nursery() as running:
            while True:
                while (check := self._next()) is not None:
                    running.start_soon(self._run, check)
                await self._news.park()

    def _next(self) -> _Check | None:
        """Return the check whose turn it is, if one may run."""
        if sum(self._running.values()) >= self.at_once:
            return None
        most = max(1, self.at_once - 1)
        owner = next((each for each in self._waiting if self._running.get(each, 0) < most), None)
        if owner is None:
            return None
        turns = self._waiting.pop(owner)
        check = turns.popleft()
        if turns:
            self._waiting[owner] = turns  # behind the other owners
        self._running[owner] = self._running.get(owner, 0) + 1
        return check

    async def _run(self, check: _Check) -> None:  # noqa: ASYNC910  # a task of its own, whose scope may end it
        owner, began_at, outcome = check.request.owner, trio.current_time(), "left"
        key = owner, grammar_digest(check.request.grammar)
        try:
            with check.scope:
                check.found = await self._checked(check.request)
                outcome = "refused" if check.found.refusal else "accepted"
                self._remember(key[1], check.found)
        except RequestError as error:
            check.failure, outcome = error, error.code
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            if self._unfinished.get(key) is check:
                del self._unfinished[key]
            check.over.set()
            self._news.unpark_all()
            self.heard(outcome, trio.current_time() - began_at)
        await trio.lowlevel.checkpoint()

    async def _checked(self, request: CheckGrammar) -> GrammarChecked:
        checker: Checker | None = None
        with trio.move_on_after(READY_WITHIN_S):
            checker = await self.checker()
        if checker is None:
            raise NotReady("the checker of grammars is starting")
        try:
            async with checker.ask(request, 0) as answer:
                found = await answer.result()
        except EngineLost as error:
            raise NotReady("the checker of grammars was lost") from error
        assert found is not None
        return found

    def _remember(self, digest: bytes, found: GrammarChecked) -> None:
        self._known[digest] = found
        while len(self._known) > self.verdicts_max:
            self._known.popitem(last=False)

    def _forget(self, key: tuple[str, bytes], check: _Check) -> None:
        """End a check that nobody waits for."""
        self._drop(key, check)
        check.scope.cancel(reason="whoever asked for the check left")

    def _drop(self, key: tuple[str, bytes], check: _Check) -> None:
        """Take a check out of the line, if it is still in it, and let nobody else join it."""
        del self._unfinished[key]
        turns = self._waiting.get(key[0], deque())
        if check in turns:
            turns.remove(check)
            if not turns:
                del self._waiting[key[0]]


def grammar_digest(grammar: Grammar) -> bytes:
    """Return what stands for a grammar where verdicts are remembered."""
    return sha256(f"{grammar.kind.value} {grammar.text}".encode(errors="surrogatepass")).digest()


async def grammars(
    inbox: Inbox[Call[CheckGrammar, GrammarChecked, GrammarChecked]],
    checks: GrammarChecks,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer what is asked of grammars."""
    bugs = BugCounter()

    async def answer_one(call: Call[CheckGrammar, GrammarChecked, GrammarChecked]) -> None:
        with call.answering(bugs) as answer:
            answer.end(await checks.verdict(call.request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(checks.run)
        task_status.started()
        while True:
            nursery.start_soon(answer_one, await inbox.receive())
