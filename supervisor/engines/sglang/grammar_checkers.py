"""The grammar checkers of a node's SGLang engines: processes, shared by engines that compile grammars alike.

Each checker is a tree of its own beside the engines: a grammar may kill it at any time, and its restarts must not count
against an engine. While it is down, grammars are checked by other nodes, or wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias, cast

import trio
from attrs import evolve

from actors.engines.sglang.spec import SglangSpec
from actors.grammars import Checker, GrammarChecks, grammars
from actors.kit.calls import Address, Askable, Call, mailbox
from protocol.messages.cluster import Leg
from protocol.messages.kind import Message
from protocol.messages.operations import CheckGrammar, GrammarChecked
from supervisor.engines.host.life import LADDER, HostRuntime
from supervisor.engines.kind import NodeContext
from supervisor.engines.sglang.engine import run_checker
from supervisor.engines.sglang.section import CHECKER_PREFIX, SglangSection
from supervisor.engines.sglang.spawn import HostStarter, zygote_name
from supervisor.links.link import Link
from supervisor.links.serving import Services
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

CheckCall: TypeAlias = Call[CheckGrammar, GrammarChecked, GrammarChecked]
CheckerAddress: TypeAlias = Address[CheckGrammar, GrammarChecked, GrammarChecked]

BACKENDS = ("xgrammar", None)  # for which a checker compiles; None is SGLang's default, which is xgrammar


def checkers(
    context: NodeContext,
    spec_of: Callable[[str], SglangSpec],
    runtime_of: Callable[[SglangSection], HostRuntime],
    host_starters: Mapping[str, HostStarter],
) -> tuple[tuple[Tree, ...], Services]:
    """Return the children that check the grammars of this node's engines, and the checker of each engine as a service.

    Engines that would compile a grammar alike share a checker.
    """
    serves: dict[tuple[str, type[Message]], Askable[Message, Message, Message]] = {}
    trees: list[Tree] = []
    shared: dict[str, Askable[Message, Message, Message]] = {}
    for name, section in context.cluster.engines_of(SglangSection).items():
        if section.node != context.node or section.leg == "encode" or section.task != "generate":
            continue
        if section.settings.get("grammar_backend") not in BACKENDS:
            continue
        settings = repr((section.model, section.device, section.settings, section.environment))
        if settings not in shared:
            address, tree = _tree(name, section, spec_of(name), runtime_of(section), host_starters, context.runtime)
            shared[settings] = cast("Askable[Message, Message, Message]", address)
            trees.append(tree)
        serves[name, CheckGrammar] = shared[settings]
    return tuple(trees), serves


def _tree(
    name: str,
    section: SglangSection,
    spec: SglangSpec,
    runtime: HostRuntime,
    host_starters: Mapping[str, HostStarter],
    node_runtime: Runtime,
) -> tuple[CheckerAddress, Tree]:
    limits = spec.grammars
    registration: Registration[Link] = Registration()
    address: CheckerAddress
    address, inbox = mailbox(limits.waiting_max)
    # One process, even if the engine has several ranks or is one leg.
    one_rank = evolve(spec, tensor_parallel=1, nodes=1, dist_init_address=None)
    both_legs = evolve(one_rank, leg=Leg.BOTH, transfer=None, bootstrap_port=None)
    checker_spec = evolve(
        both_legs, name=f"{name}.grammars", checks_grammars=True, metrics=False, diffusion=None, diffusion_settings={}
    )
    checks = partial(
        GrammarChecks,
        partial(_checker, registration),
        limits.checks_max,
        limits.waiting_max,
        limits.verdicts_max,
        partial(node_runtime.metrics.grammar_checked, section.model),
    )
    process = Child(
        name="process",
        run=_process,
        args=(checker_spec, host_starters[name], registration, runtime),
        stop_within_s=LADDER.total_s + 1.0,
        about="compiles and walks each grammar in a fork of its own",
    )
    queue = Child(
        name="queue",
        run=_queue,
        args=(inbox, checks),
        about="shares checks fairly between keys",
    )
    # A tree of its own, so that its restarts do not count against an engine.
    return address, Tree(
        name=f"{CHECKER_PREFIX}{name}",
        children=(queue, process),
        restarts_max=None,
        backoff=Backoff(min_s=0.5, crashes=True),
        needs=tuple(filter(None, [zygote_name(name, section)])),
        about=f"checks the grammars of requests for {section.model}",
    )


async def _checker(registration: Registration[Link]) -> Checker:
    return cast("Checker", await registration.wait())


async def _queue(  # noqa: ASYNC128  # grammars calls started()
    inbox: trio.MemoryReceiveChannel[CheckCall],
    checks: Callable[[], GrammarChecks],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await grammars(inbox, checks(), task_status=task_status)


async def _process(
    spec: SglangSpec,
    start_host: HostStarter,
    registration: Registration[Link],
    runtime: HostRuntime,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    task_status.started()  # at once: no other child's start waits for a checker; a check waits for its registration
    await run_checker(spec, start_host, registration, runtime)
