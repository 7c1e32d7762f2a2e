"""Routing policies: a new one costs a file and a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.routing.policies.least_loaded import least_loaded
from actors.routing.policies.row import PolicyContext
from actors.routing.policies.table import POLICIES
from supervisor.config.load import FileMistakes
from supervisor.engines.kinds import read_cluster
from tests.rig.scratch import ROOT, scratch

TINY = ROOT / "examples" / "tiny"
CLUSTER = """
[gateway]
port = 0
[model.tiny]
path = "{folder}"
policy = "{policy}"
"""
ENGINE = """
[engine.{name}]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""

DUMMY = '''
"""The policy `by_prompt`: requests with the same first token go to the same worker, while that one has room."""

from __future__ import annotations

from actors.routing.candidates import Candidates, Choice
from protocol.messages.generation import Generate


def by_prompt(request: Generate, candidates: Candidates) -> Choice | None:
    """Return the worker to ask."""
    loads = sorted(candidates, key=lambda load: load.name)
    return Choice(loads[request.tokens[0] % len(loads)]) if loads else None
'''

ROUTED = """
from pathlib import Path

import trio
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from supervisor.engines.kinds import read_cluster
from supervisor.supervision.registration import Registration
from tests.rig.assembly import built_assembly

async def main():
    assembly, _ = built_assembly(read_cluster(Path({file!r})), "main")
    routing = assembly.models["tiny"].routing
    chosen = []
    with assembly.engines["a"].publish(Up()), assembly.engines["b"].publish(Up()):
        for first in (0, 1, 2, 1, 1):
            route = routing.choose(Generate("0" * 32, TokenIds.of([first, 7]), Sampling(3)))
            chosen.append(route.name)
            route.end()
    print(*chosen)

class Up:
    info = None

trio.run(main)
"""


FED = '''
"""The policy `by_watch`: the worker that its feed has seen first."""

from __future__ import annotations

from typing import ClassVar

import trio
from attrs import define, field

from actors.routing.candidates import Candidates, Choice
from actors.routing.policies.feed import FeedGauge, WatchablePool
from actors.routing.policies.row import MadePolicy, PolicyContext
from protocol.messages.generation import Generate


@define(eq=False)
class SeenWorkers:
    """The feed: the names of the workers in the order in which they came."""

    about: ClassVar[str] = "which workers have come, for policy by_watch"
    limits: ClassVar[tuple[tuple[str, float], ...]] = ()
    pool: WatchablePool
    names: list[str] = field(factory=list)

    @property
    def gauges(self) -> tuple[FeedGauge, ...]:
        """The number of workers that it has seen."""
        return (FeedGauge("espalier_seen_workers", "Workers seen", lambda: len(self.names)),)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Follow the workers until cancelled."""
        task_status.started()
        while True:
            names = [worker.full_name for worker in self.pool.watchable()]
            self.names += [name for name in names if name not in self.names]
            await self.pool.wait_members_changed()


def by_watch(context: PolicyContext) -> MadePolicy:
    """Return the policy of a model with its feed."""
    seen = SeenWorkers(context.pool)

    def choose(request: Generate, candidates: Candidates, /) -> Choice | None:
        found = (candidates.find(name) for name in seen.names)
        load = next((load for load in found if load is not None), None)
        return None if load is None else Choice(load)

    return MadePolicy(choose, feed=seen)
'''

WATCHED = """
from pathlib import Path

import trio
import trio.testing
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from supervisor.engines.kinds import read_cluster
from tests.rig.assembly import built_assembly

class Up:
    info = None

async def main():
    assembly, metrics = built_assembly(read_cluster(Path({file!r})), "main")
    (tree,) = [child for child in assembly.tree.children if child.name == "seen-tiny"]
    (child,) = tree.children
    async with trio.open_nursery() as nursery:
        await nursery.start(child.run)
        with assembly.engines["b"].publish(Up()):
            await trio.testing.wait_all_tasks_blocked()
            with assembly.engines["a"].publish(Up()):
                await trio.testing.wait_all_tasks_blocked()
                route = assembly.models["tiny"].routing.choose(Generate("0" * 32, TokenIds.of([1, 7]), Sampling(3)))
                print(route.name)
                route.end()
        nursery.cancel_scope.cancel()
    print([line for line in metrics.render({{}}).decode().splitlines() if line.startswith("espalier_seen")])

trio.run(main)
"""


def write(folder: Path, policy: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(CLUSTER.format(folder=TINY, policy=policy) + ENGINE.format(name="a") + ENGINE.format(name="b"))
    return file


def test_the_policy_of_a_model_is_named_in_its_section(tmp_path: Path) -> None:
    assert read_cluster(write(tmp_path, "least_loaded")).model["tiny"].policy == "least_loaded"
    unused: Any = None
    made = POLICIES["least_loaded"].make(PolicyContext(lambda: 0.0, lambda: 0.0, pool=unused))
    assert (made.policy, made.feed) == (least_loaded, None)
    with pytest.raises(FileMistakes, match=r'model\.tiny\.policy: must be .*least_loaded.*, got "by_prompt"'):
        read_cluster(write(tmp_path, "by_prompt"))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_with_a_feed_names_it_in_its_row(policy: str) -> None:
    unused: Any = None
    made = POLICIES[policy].make(PolicyContext(lambda: 0.0, lambda: 0.0, pool=unused))
    assert (made.feed is not None) == bool(POLICIES[policy].feed_name)


def test_a_policy_is_added_by_a_file_and_a_row(tmp_path: Path) -> None:
    copy = scratch(tmp_path)
    copy.add("actors/routing/by_prompt.py", DUMMY)
    copy.insert("actors/routing/policies/table.py", '    "least_loaded"', '"by_prompt": stateless(by_prompt),\n')
    copy.insert(
        "actors/routing/policies/table.py",
        "from actors.routing.policies.least_loaded import least_loaded",
        "from actors.routing.by_prompt import by_prompt\n",
    )
    assert copy.touched == {"actors/routing/by_prompt.py", "actors/routing/policies/table.py"}

    file = write(tmp_path, "by_prompt")
    code, shown = copy.run("-m", "supervisor", "--check", str(file))
    assert (code, "chosen by by_prompt" in shown) == (0, True), shown
    names = copy.program(ROUTED.format(file=str(file))).split()
    assert names == ["main/a", "main/b", "main/a", "main/b", "main/b"]


def test_a_policy_with_a_feed_is_added_by_a_file_and_a_row(tmp_path: Path) -> None:
    copy = scratch(tmp_path)
    copy.add("actors/routing/policies/by_watch.py", FED)
    copy.insert("actors/routing/policies/table.py", '    "kv"', '"by_watch": PolicyRow(by_watch, feed_name="seen"),\n')
    copy.insert(
        "actors/routing/policies/table.py",
        "from actors.routing.policies.kv.policy import KvPolicy",
        "from actors.routing.policies.by_watch import by_watch\n",
    )
    assert copy.touched == {"actors/routing/policies/by_watch.py", "actors/routing/policies/table.py"}

    file = write(tmp_path, "by_watch")
    code, shown = copy.run("-m", "supervisor", "--check", str(file))
    assert (code, "seen-tiny" in shown) == (0, True), shown
    taken = tmp_path / "taken.toml"
    taken.write_text(file.read_text().replace("engine.a]", "engine.seen-tiny]"))
    code, shown = copy.run("-m", "supervisor", "--check", str(taken))
    assert (code != 0, "is the name of another part of the tree" in shown) == (True, True), shown
    lines = copy.program(WATCHED.format(file=str(file))).splitlines()
    assert lines == ["main/b", "['espalier_seen_workers{model=\"tiny\"} 2.0']"]
