"""What an engine gets for a grammar is decided once, in a thread, and remembered within limits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import trio
import trio.testing

from actors.kit.offload import OFFLOAD_SIZE_MIN, T
from protocol.errors import BadRequest
from protocol.messages.generation import Grammar, GrammarKind
from supervisor.engines import engine_grammars
from supervisor.engines.engine_grammars import EngineGrammars

SCHEMA = json.dumps({"type": "string", "maxLength": 8, "description": "a name"})


class Threads:
    """Runs work in place, once its threads are free, and counts it."""

    def __init__(self, *, busy: bool = False) -> None:
        self.ran: list[tuple[str, int]] = []
        self.free = trio.Event()
        if not busy:
            self.free.set()

    async def __call__(self, function: Callable[[], T], /, *, owner: str, size: int) -> T:
        self.ran.append((owner, size))
        await self.free.wait()
        return function()


def of(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


async def test_a_grammar_is_decided_once_and_in_a_thread() -> None:
    threads = Threads()
    grammars = EngineGrammars(threads)
    decided = await grammars.get(of(SCHEMA), "alice")
    assert await grammars.get(of(SCHEMA), "bob") is decided
    (ran,) = threads.ran
    assert ran[0] == "alice"
    assert ran[1] > OFFLOAD_SIZE_MIN


async def test_a_refusal_is_remembered_as_well() -> None:
    threads = Threads()
    grammars = EngineGrammars(threads)
    refused = of(json.dumps({"description": "x" * 40, "not": {"type": "null"}}))
    for _ in range(2):
        with pytest.raises(BadRequest, match="#: not: "):
            await grammars.get(refused, "alice")
    assert len(threads.ran) == 1


async def test_equal_grammars_at_once_are_decided_once_though_the_first_asker_leaves() -> None:
    """Each was decided: 62 of 192 equal requests were refused as overloaded."""
    threads = Threads(busy=True)
    grammars = EngineGrammars(threads)
    got: list[Grammar] = []

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            got.append(await grammars.get(of(SCHEMA), "alice"))

    first = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, first)
        await trio.testing.wait_all_tasks_blocked()
        first.cancel(reason="its client has left")
        for _ in range(100):
            nursery.start_soon(ask, trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        threads.free.set()
    assert len(got) == 100
    assert len(set(map(id, got))) == 1
    assert len(threads.ran) == 2


async def test_decisions_that_were_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_grammars, "REMEMBERED_BYTES_MAX", 3_000)
    threads = Threads()
    grammars = EngineGrammars(threads)
    many = [of(json.dumps({"const": f"{number}" * 50})) for number in range(10)]
    for each in many:
        await grammars.get(many[0], "alice")
        await grammars.get(each, "alice")
    assert len(threads.ran) == 10, "the first one was used between all others"
    await grammars.get(many[1], "alice")
    assert len(threads.ran) == 11


async def test_schemas_of_structural_tags_are_decided_as_well() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}
    with pytest.raises(BadRequest, match=r"structural tag cannot be used: #/format/json_schema: uniqueItems: "):
        await EngineGrammars(Threads()).get(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)), "")
