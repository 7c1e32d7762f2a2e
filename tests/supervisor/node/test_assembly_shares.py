"""Everything that keys share, found in the assembly of a node: with one key asking for all it may, another is served.

A budget or a pool that is added without a share fails here: the first test by its constructor in the source, the second
by the object in the assembly.
"""

from __future__ import annotations

import ast
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NoReturn

import attrs
import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.grammars import GrammarChecks
from actors.kit.fair_budget import FairBudget
from actors.kit.shares import BudgetLimits
from actors.routing.slot_shares import SlotShares
from protocol.errors import RequestError
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.operations import CheckGrammar
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.connections import Connections
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.histories import Conversation, ResponseHistories, ResponseHistory
from supervisor.gateway.http.request import BODY_BYTES_FREE
from supervisor.gateway.keys.key_sources import KEYS, KeySources
from supervisor.gateway.keys.keys import ClientKey, Keys
from supervisor.gateway.memory import ANSWER_BYTES_FREE
from supervisor.gateway.memory_budgets import Backlogs, MemoryBudget
from supervisor.node.assembly import Assembly
from supervisor.threads.text_threads import TextThreads
from tests.repository.sources import FILES, nodes
from tests.rig.assembly import built_assembly, everybody
from tests.rig.gateway import SECRET
from tests.rig.router import Fake
from tests.rig.scratch import ROOT
from tests.supervisor.threads.test_text_threads import LIGHT, hold

# In the source -------------------------------------------------------------------------------------

LIMITERS = {"CapacityLimiter", "Semaphore", "BoundedSemaphore", "FairBudget", "MemoryBudget", "BudgetLimits"}
MADE = {
    "actors/embedder.py": "requests: behind the inbox, where keys take turns",
    "actors/embedding.py": "as many as are admitted by the gate",
    "actors/encoder.py": "calls with pixels: behind the inbox, where keys take turns",
    "actors/engines/hosted_engine.py": "operations, for operators alone",
    "actors/engines/sglang/host/vision/media_input.py": "threads of an engine that copy pixels of a fixed size",
    "actors/engines/slots/kv_admission.py": "KV memory of a rank (`KvAdmission.may_begin`)",
    "actors/engines/slots/slots.py": "slots: routers leave some of them to other keys (`SlotShares`)",
    "actors/grammars.py": "checkers of grammars (`GrammarChecks`)",
    "actors/media/media.py": "contents, pixels, fetches and decoders (`FairBudget`)",
    "actors/media/preparation.py": "embeddings (`FairBudget`)",
    "actors/routing/slot_shares.py": "slots (`SlotShares`)",
    "actors/processor.py": "as many as are admitted by the gate",
    "actors/publisher.py": "subscribers, which are other nodes and operators",
    "supervisor/cli/engine.py": "a command of an operator",
    "supervisor/cluster/mesh.py": "links between nodes",
    "supervisor/control/unix_socket.py": "operators",
    "supervisor/gateway/admission.py": "a gate without limits of keys",
    "supervisor/gateway/gateway.py": "places at the gate (`AdmissionGate`)",
    "supervisor/gateway/memory.py": "bodies and answers (`MemoryBudget`)",
    "supervisor/gateway/memory_budgets.py": "the limits of a key in a `MemoryBudget`",
    "supervisor/gateway/server.py": "connections that are refused, each for a moment",
    "supervisor/gateway/turns.py": "turns of the event loop, in the order of arrival",
    "supervisor/media/files.py": "threads that read files (`FairBudget`)",
    "supervisor/media/memory.py": "one thread that frees memory",
    "supervisor/media/network.py": "threads that resolve names (`FairBudget`)",
    "supervisor/node/preview.py": "prints the limits of slots",
    "supervisor/telemetry/metrics.py": "scrapes, for monitors",
    "supervisor/tensors/shared_memory.py": "one thread that frees memory",
    "supervisor/tensors/transfer_thread.py": "the one thread of a transfer engine",
    "supervisor/threads/file_threads.py": "files of the operator",
}
"""Each file of the product that makes a limiter, and how its units are shared between keys."""


def makes_limiter(path: Path) -> bool:
    if not any(name in path.read_text(encoding="utf-8") for name in LIMITERS):
        return False
    calls = (node.func for node in nodes(path) if isinstance(node, ast.Call))
    names = (ast.unparse(function).split(".") for function in calls)
    return any(LIMITERS.intersection(name[:1] + name[-1:]) for name in names)


def test_each_limiter_of_the_product_is_shared_between_keys_or_used_by_none() -> None:
    made = {str(path) for path in FILES if path.parts[0] in {"actors", "supervisor"} and makes_limiter(path)}
    assert made == set(MADE), "say how the units of a new limiter are shared between keys"


# In an assembly ------------------------------------------------------------------------------------

SHARED = (FairBudget, MemoryBudget, AdmissionGate, SlotShares, Connections, ResponseHistories, Backlogs)


def parts(value: Any) -> Iterator[Any]:
    """Yield what an object refers to: fields, items, arguments and closures."""
    kind = type(value)
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not None)
    elif attrs.has(kind):
        yield from (getattr(value, field.name, None) for field in attrs.fields(kind))


def shared_objects(root: Any) -> list[Any]:
    seen, found, waiting = dict[int, Any](), list[Any](), [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, SHARED):
            found.append(value)
        waiting.extend(parts(value))
    return found


def several_keys(*names: str) -> Keys:
    keys = Keys(KeySources(None, {KEYS: ",".join(f"{name}={name}-{SECRET}" for name in names)}))
    keys.load()
    return keys


def front(keys: Keys) -> Assembly:
    """Return the node with the gateway of a model that sees."""
    cluster = read_cluster(ROOT / "examples" / "vision.toml")
    return built_assembly(cluster, "front", evolve(everybody(), keys=keys))[0]


def gateway_of(assembly: Assembly) -> Gateway:
    assert assembly.gateway is not None
    return assembly.gateway


def key_of(gateway: Gateway, name: str) -> ClientKey:
    return gateway.keys.find([(b"authorization", f"Bearer {name}-{SECRET}".encode())])


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    return front(several_keys("greedy", "alice"))


def label(shared: Any) -> str:
    return f"{type(shared).__name__} {getattr(shared, 'name', '')}".strip()


EXPECTED = [
    "AdmissionGate",
    "Backlogs",
    "Connections",
    *(f"FairBudget {name}" for name in ("a decoder", "a fetch", "a place to fetch to", "a thread to read a file")),
    *(f"FairBudget {name}" for name in ("a thread to resolve a name", "memory", "memory for embeddings")),
    "MemoryBudget answers in one piece (answers_bytes_max)",
    "MemoryBudget requests (bodies_bytes_max)",
    "ResponseHistories",
    "SlotShares",
]


def test_what_keys_share_in_a_node_with_a_gateway_is_known_here(assembly: Assembly) -> None:
    assert sorted(map(label, shared_objects(assembly))) == EXPECTED


def test_nothing_is_kept_from_the_only_key() -> None:
    alone = front(several_keys("greedy"))
    [shares] = (each for each in shared_objects(alone) if isinstance(each, SlotShares))
    assert shares.kept() == 0
    gateway = gateway_of(alone)
    assert not gateway.places_of(key_of(gateway, "greedy"), gateway.gate.requests_max).never_fits(
        gateway.gate.requests_max
    )


# With one key asking for all it may ----------------------------------------------------------------


async def at_once(take: Callable[[], Awaitable[Any]]) -> None:
    """Check that a call needs no time, though others hold what they have for ever."""
    done = trio.Event()

    async def run() -> None:
        await take()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        assert done.is_set()
        nursery.cancel_scope.cancel()


async def greedy_calls(
    nursery: trio.Nursery, rng: random.Random, limits: BudgetLimits, call: Callable[[int], Awaitable[None]]
) -> None:
    """Ask for everything: first for one call with the most, then for calls of all sizes."""
    sizes = [limits.call_max, *(rng.randint(1, limits.call_max) for _ in range(20)), *[1] * rng.randint(0, 600)]
    for size in sizes if rng.random() < 0.5 else rng.sample(sizes, len(sizes)):
        nursery.start_soon(call, size)
        if rng.random() < 0.2:
            await wait_all_tasks_blocked()
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("FairBudget")])
async def test_a_small_call_has_units_of_every_budget_at_once(
    name: str, seed: int, assembly: Assembly, autojump_clock: MockClock
) -> None:
    [budget] = (each for each in shared_objects(assembly) if label(each) == name)
    limits, rng = budget.limits, random.Random(seed)
    small = True if limits.small_max == 0 and limits.large_max < limits.total else None

    async def call(size: int) -> None:
        with suppress(RequestError):
            async with budget.taking(size, "greedy", small=small and rng.random() < 0.5):
                await trio.sleep_forever()

    async def take(units: int) -> None:
        async with budget.taking(units, "alice", small=small):
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await greedy_calls(nursery, rng, limits, call)
        for _ in range(50):
            await at_once(partial(take, rng.randint(1, max(1, limits.small_max))))
        assert budget.taken <= limits.owner_max
        nursery.cancel_scope.cancel()
    assert budget.statistics().taken == 0


@pytest.mark.parametrize("seed", range(5))
async def test_a_small_request_has_a_place_at_the_gate_at_once(
    seed: int, assembly: Assembly, autojump_clock: MockClock
) -> None:
    gateway, rng = gateway_of(assembly), random.Random(seed)
    gate = evolve(gateway.gate, unready=lambda: None)
    greedy, alice = key_of(gateway, "greedy"), key_of(gateway, "alice")

    async def call(size: int) -> None:
        with suppress(RequestError):
            async with gate.admitted(owner="greedy", weight=size, limits=gateway.places_of(greedy, size)):
                await trio.sleep_forever()

    async def take(weight: int) -> None:
        async with gate.admitted(owner="alice", weight=weight, limits=gateway.places_of(alice, weight)):
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await greedy_calls(nursery, rng, gateway.places_of(greedy), call)
        for _ in range(300):
            await at_once(partial(take, rng.randint(1, 8)))
        nursery.cancel_scope.cancel()
    assert (gate.inside, gate.large) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "free_bytes"), [("bodies", BODY_BYTES_FREE), ("answers", ANSWER_BYTES_FREE)])
def test_a_small_request_has_memory_at_once(name: str, free_bytes: int, seed: int, assembly: Assembly) -> None:
    gateway, rng = gateway_of(assembly), random.Random(seed)
    budget: MemoryBudget = getattr(gateway.memory, name)
    held = [budget.reserve("greedy", free_bytes) for _ in range(200)]
    for reservation in held * 3:
        size = rng.choice([budget.bytes_max(), budget.request_max("greedy"), rng.randint(1, budget.bytes_max()), 9999])
        with suppress(RequestError):
            reservation.grow(size)
    assert budget.reserved_bytes <= budget.request_max("greedy")
    with budget.reserving("alice", free_bytes) as small:
        small.grow(free_bytes + budget.bytes_max() // 32)
    others = [budget.reserve(other, free_bytes) for other in "abcd" for _ in range(9)]
    for reservation in others:
        with suppress(RequestError):
            reservation.grow(budget.bytes_max() // 9)
    with budget.reserving("alice", free_bytes) as small:
        small.grow(free_bytes)
    for reservation in held + others:
        reservation.release()


def test_a_key_has_connections_however_many_another_has(assembly: Assembly) -> None:
    gateway = gateway_of(assembly)
    limits = evolve(gateway.limits, connections_max=8, key_connections_max=256)
    connections = evolve(gateway.connections, limits=lambda: limits)
    outboxes: list[Any] = [object() for _ in range(8)]
    opened = 0
    for outbox in outboxes:
        with suppress(RequestError):
            connections.authenticated(outbox, key_of(gateway, "greedy"))
            opened += 1
    assert opened == 6
    connections.authenticated(outboxes[-1], key_of(gateway, "alice"))
    for outbox in outboxes:
        connections.remove(outbox)


def test_a_conversation_is_kept_and_a_backlog_allowed_however_much_another_key_has(assembly: Assembly) -> None:
    gateway = gateway_of(assembly)
    histories, backlogs = gateway.memory.histories, gateway.memory.backlogs
    for number in range(100):
        ResponseHistory(8 * 2**20, histories, "greedy").remember(str(number), Conversation("", (), 4 * 2**20))
    kept = ResponseHistory(8 * 2**20, histories, "alice")
    kept.remember("mine", Conversation("mine", (), 2**20))
    assert kept.find("mine") is not None
    backlogs.size_bytes, backlogs.count = gateway.limits.backlogs_bytes_max, gateway.limits.key_connections_max
    assert backlogs.allows(0, 100_000)
    backlogs.size_bytes = backlogs.count = 0


def test_slots_are_left_to_another_key(assembly: Assembly) -> None:
    shares, workers = assembly.models["tiny-vision"].routing.shares, [Fake("w", slots=16)]
    taken = 0
    while shares.allows("greedy", workers):
        shares.take("greedy", "w")
        taken += 1
    assert taken == 15
    assert shares.allows("alice", workers)
    for _ in range(taken):
        shares.give_back("greedy", "w")


# Elsewhere in a node -------------------------------------------------------------------------------


async def test_a_text_has_a_thread_after_one_turn_of_another_key(autojump_clock: MockClock) -> None:
    threads, order = TextThreads(), list[str]()
    async with trio.open_nursery() as nursery:
        for _ in range(threads.limits.key_waiting_max):
            nursery.start_soon(hold, threads, "greedy", LIGHT, order)
        await trio.sleep(10.5)
        began_at = trio.current_time()
        await hold(threads, "alice", LIGHT, order)
        assert trio.current_time() - began_at == pytest.approx(1.5), "its own second after the rest of a turn"
        nursery.cancel_scope.cancel()


async def test_a_grammar_is_checked_at_once_however_many_another_key_sends(autojump_clock: MockClock) -> None:
    async def checker() -> NoReturn:
        await trio.sleep_forever()

    checks = GrammarChecks(checker, 2, 64, 4, lambda *_: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checks.run)
        for number in range(10):
            nursery.start_soon(checks.verdict, CheckGrammar(Grammar(GrammarKind.REGEX, f"{number}"), "greedy"))
        await wait_all_tasks_blocked()
        assert checks.statistics().running == 1
        nursery.start_soon(checks.verdict, CheckGrammar(Grammar(GrammarKind.REGEX, "a"), "alice"))
        await wait_all_tasks_blocked()
        assert checks.statistics().running == 2
        nursery.cancel_scope.cancel()
