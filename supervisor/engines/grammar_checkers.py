"""Grammar checks: the checkers of a node's engines, and where a model's grammars are checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TypeAlias, cast
from zlib import crc32

import trio
from attrs import evolve

from actors.engines.sglang.boot_message import SglangSpec
from actors.grammars import Checker, GrammarChecks, grammar_digest, grammars
from actors.kit.calls import Address, Askable, Call, Function, mailbox
from actors.kit.offload import Offload, RunInThread
from protocol.cluster import Leg
from protocol.errors import (
    ActorLost,
    BadRequest,
    Draining,
    EngineLost,
    LinkLost,
    NotReady,
    Overloaded,
    RequestError,
)
from protocol.grammars import complaint
from protocol.kind import Message
from protocol.messages import CheckGrammar, Grammar, GrammarChecked
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.config.load import Cluster, EngineSection
from supervisor.engines.sglang.engine import HostRuntime, checker
from supervisor.engines.sglang.spawn import HostStarter, zygote_name
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

log = logging.getLogger(__name__)

Asked: TypeAlias = Call[CheckGrammar, GrammarChecked, GrammarChecked]
Checking: TypeAlias = Address[CheckGrammar, GrammarChecked, GrammarChecked]

BACKEND = "xgrammar"
ELSEWHERE = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)


async def accept(_: Message) -> Message:
    """Accept every grammar: of an engine whose backend bounds each token itself, or has none."""
    await trio.lowlevel.checkpoint()
    return GrammarChecked()


def addresses(
    cluster: Cluster,
    node: str,
    spec_of: Callable[[str], SglangSpec],
    house_of: Callable[[EngineSection], HostRuntime],
    hosts_of: Mapping[str, HostStarter],
    world: Runtime,
) -> tuple[Services, list[Tree]]:
    """Return where the grammars of this node's engines are checked, and the children that check them.

    Engines that would compile a grammar alike share a checker.
    """
    serves: dict[tuple[str, type[Message]], Askable[Message, Message, Message]] = {}
    trees: list[Tree] = []
    alike: dict[str, Askable[Message, Message, Message]] = {}
    for name, section in cluster.engines_on(node).items():
        if section.kind != "sglang" or section.settings.get("grammar_backend", BACKEND) not in {BACKEND, None}:
            serves[name, CheckGrammar] = Function(accept)
            continue
        recipe = repr((section.model, section.device, section.settings, section.environment, section.grammars))
        if recipe not in alike:
            address, tree = _tree(name, section, spec_of(name), house_of(section), hosts_of, world)
            alike[recipe] = cast("Askable[Message, Message, Message]", address)
            trees.append(tree)
        serves[name, CheckGrammar] = alike[recipe]
    return serves, trees


def _tree(
    name: str,
    section: EngineSection,
    spec: SglangSpec,
    house: HostRuntime,
    hosts_of: Mapping[str, HostStarter],
    world: Runtime,
) -> tuple[Checking, Tree]:
    assert section.device is not None  # the configuration has been checked
    limits = section.grammars
    plug: Registration[Link] = Registration()
    asked = _asked(limits.waiting_max)
    # One process, whatever the engine is made of.
    alone = evolve(spec, leg=Leg.BOTH, tensor_parallel=1, nodes=1, meet=None, transfer=None, bootstrap_port=None)
    own = evolve(alone, name=f"{name}.grammars", checks_grammars=True)
    checks = partial(
        GrammarChecks,
        partial(_checker, plug),
        limits.at_once,
        limits.waiting_max,
        limits.verdicts_max,
        partial(world.metrics.grammar_checked, section.model),
    )
    process = Child(
        name="process",
        run=_process,
        args=(own, hosts_of[name], plug, house),
        stop_within_s=section.ladder.total_s + 1.0,
        about="compiles and walks each grammar in a fork of its own",
        limits=(
            ("compile s", limits.compile_s),
            ("walk s", limits.walk_s),
            ("step ms", limits.step_ms),
            ("bytes", limits.bytes_max),
        ),
    )
    turns = Child(
        name="turns",
        run=_turns,
        args=(asked[1], checks),
        about="fair turns between keys",
        limits=(("at once", limits.at_once), ("waiting", limits.waiting_max), ("verdicts", limits.verdicts_max)),
    )
    # A tree of its own: its deaths are not counted with an engine's.
    return asked[0], Tree(
        name=f"grammars-{name}",
        children=(turns, process),
        restarts_max=None,
        backoff=Backoff(min_s=0.5, crashes=True),
        needs=tuple(filter(None, [zygote_name(name, section)])),
        about=f"checks what answers of {section.model} are to keep to",
    )


def _asked(size: int) -> tuple[Checking, trio.MemoryReceiveChannel[Asked]]:
    return mailbox(size)


async def _checker(plug: Registration[Link]) -> Checker:
    return cast("Checker", await plug.wait())


async def _turns(  # noqa: ASYNC128  # grammars calls started()
    inbox: trio.MemoryReceiveChannel[Asked], checks: Callable[[], GrammarChecks], *, task_status: trio.TaskStatus[None]
) -> None:
    await grammars(inbox, checks(), task_status=task_status)


async def _process(
    spec: SglangSpec,
    starts: HostStarter,
    plug: Registration[Link],
    house: HostRuntime,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    task_status.started()  # whoever needs it waits for its plug: nobody else's start waits for this one
    await checker(spec, starts, plug, house)


# For a model ---------------------------------------------------------------------------


async def check(
    directory: Directory, own: Services, aside: RunInThread, model: str, grammar: Grammar, owner: str
) -> None:
    """Have a grammar checked by an engine's node; raises `BadRequest` if it is refused.

    The same grammar goes to the same node as long as that can be asked, and else to another one.
    """
    # Rules that refer to each other are read more than once.
    said = await Offload(aside, owner).run(2 * len(grammar.text), partial(complaint, grammar))
    if said is not None:
        raise BadRequest(said)
    failure: RequestError = NotReady("no engine of this model is up")
    for worker in _in_turn(directory, model, grammar_digest(grammar)):
        try:
            found = await _ask(worker, own, CheckGrammar(grammar, owner))
        except ELSEWHERE as error:
            failure = error
            continue
        if found.refusal:
            raise BadRequest(found.refusal)
        return
    raise failure


def _in_turn(directory: Directory, model: str, digest: bytes) -> Iterator[LocalWorker | RemoteWorker]:
    """Yield a model's workers that are up, each digest's from a place of its own on, whoever is up."""
    known = directory.derived(("by name", model), partial(_by_name, directory, model))
    begin = crc32(digest) % max(1, len(known))
    for worker in chain(islice(known, begin, None), islice(known, begin)):
        if worker.offer.up:
            yield worker


def _by_name(directory: Directory, model: str) -> list[LocalWorker | RemoteWorker]:
    return sorted((each for each in directory.every() if each.model == model), key=lambda each: each.load.name)


async def _ask(worker: LocalWorker | RemoteWorker, own: Services, request: CheckGrammar) -> GrammarChecked:
    if isinstance(worker, LocalWorker):
        asking = own[worker.offered.name, CheckGrammar].ask(request, 0)
    elif worker.link is None:
        raise LinkLost(f"there is no link to node {worker.node}")
    else:
        asking = worker.link.ask(request, 0, worker.offer.name)
    async with asking as answer:
        found = await answer.result()
    assert isinstance(found, GrammarChecked)
    return found
