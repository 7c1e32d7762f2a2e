"""An engine over two nodes answers with the tokens of an engine on one, and all of its ranks run or none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from bench.rig.node import MODEL, ROOT, Node, short_folder, wait_until
from bench.rig.processes import ProcessEntry
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from tests.contracts.engine import complete, new_id
from tests.rig.launched import at_free_ports, nodes, running_launcher, wait_ready
from tests.system.sglang.conftest import MakeEngine
from tests.system.sglang.greedy import TOKENS, all_completed, completed, prompts

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

READY_WITHIN_S = 240.0
WITHIN_S = 90.0
SILENT_S = 90.0  # until ranks that wait for another would be ended for that
NOTICED_WITHIN_S = 60.0
AT_ONCE = 8
PROMPTS = prompts(32, longest=200, seed=11)
EXACT = {"dtype": "float32"}  # with fewer bits, adding up in another order changes some likeliest token

EXAMPLE = (ROOT / "examples" / "spanning.toml").read_text()


@pytest.fixture(scope="module")
def spanning() -> Iterator[Node]:
    """The example of an engine over two nodes, at ports of its own."""
    text = EXAMPLE.replace('path = "tiny"', f'path = "{ROOT / "examples" / MODEL}"')
    text, ports = at_free_ports(text, 8000, 7401, 7402, 7403)
    text += f'silent_s = {SILENT_S}\nsettings.dtype = "float32"\n'
    text += "[cluster]\nsilent_s = 10.0\nstalled_s = 60.0\n"  # what a busy machine does is no loss
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target, READY_WITHIN_S)
        target.observe()
        yield target


def schedulers(target: Node) -> dict[int, ProcessEntry]:
    """Return the processes that compute, by their rank."""
    found = [seen for seen in target.living() if seen.command.startswith("sglang::scheduler_TP")]
    return {int(seen.command.removeprefix("sglang::scheduler_TP")): seen for seen in found}


def hosts(target: Node) -> dict[int, ProcessEntry]:
    """Return the parents of the processes that compute, by their rank."""
    alive = {seen.pid: seen for seen in target.living()}
    return {rank: alive[seen.parent] for rank, seen in schedulers(target).items() if seen.parent in alive}


async def test_two_ranks_on_two_nodes_answer_with_the_tokens_of_one(spanning: Node, make_engine: MakeEngine) -> None:
    assert sorted(schedulers(spanning)) == [0, 1]
    info = json.loads(spanning.get("/server_info")[1])
    assert [engine["ranks"] for engine in info["engines"].values()] == [2]
    got = await trio.to_thread.run_sync(all_completed, spanning.port, PROMPTS, AT_ONCE)
    wanted: dict[int, tuple[list[int], str, int]] = {}
    async with make_engine(settings=EXACT) as one, trio.open_nursery() as nursery:
        free = trio.CapacityLimiter(AT_ONCE)

        async def ask(index: int) -> None:
            async with free:
                request = Generate(new_id(), TokenIds.of(PROMPTS[index]), Sampling(TOKENS, temperature=0.0))
                ids, finished = await complete(one, request)
                wanted[index] = ids, finished.reason.value, finished.usage.prompt_tokens

        for index in range(len(PROMPTS)):
            nursery.start_soon(ask, index)
    assert [index for index, answer in enumerate(got) if wanted[index] != answer] == []
    assert max(len(tokens) for tokens, *_ in got) == TOKENS


@pytest.mark.parametrize("what", ["scheduler 1", "host 1", "host 0", "node second", "node first"])
def test_when_any_process_of_it_ends_all_ranks_end_and_start_again_together(what: str, spanning: Node) -> None:
    ready = spanning.output().count("first/tiny-0/engine is ready")
    assert completed(spanning.port, [5, 6, 7])[0]
    kind, _, which = what.partition(" ")
    every = {f"scheduler {rank}": seen for rank, seen in schedulers(spanning).items()}
    every |= {f"host {rank}": seen for rank, seen in hosts(spanning).items()}
    assert len(every) == 4
    find: dict[str, Callable[[Node], Any]] = {"scheduler": schedulers, "host": hosts, "node": nodes}
    os.kill(find[kind](spanning)[int(which) if which.isdigit() else which].pid, signal.SIGKILL)
    gone = wait_until(lambda: not any(seen.lives for seen in every.values()), NOTICED_WITHIN_S)
    assert gone is not None, [name for name, seen in every.items() if seen.lives]
    again = wait_until(lambda: spanning.output().count("first/tiny-0/engine is ready") > ready, READY_WITHIN_S)
    assert again is not None, spanning.output()
    assert wait_until(lambda: spanning.get("/ready")[0] == 200, WITHIN_S) is not None, spanning.output()
    assert completed(spanning.port, [5, 6, 7])[0]
    assert sorted(schedulers(spanning)) == [0, 1]


def test_an_engine_over_two_nodes_leaves_nothing(spanning: Node) -> None:
    spanning.signal(signal.SIGINT)
    assert spanning.wait_exit(WITHIN_S) is not None, spanning.output()
    assert spanning.wait_gone(WITHIN_S) is not None
    assert (spanning.process.returncode, spanning.leftovers()) == (0, [])
