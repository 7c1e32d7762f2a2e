"""Tools on the real engine: a referee of tool calls, and stock clients, find nothing wrong.

The model has learned what they ask by heart (`tests/rig/tool_model.py`), and chooses each token itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from subprocess import CalledProcessError

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe

from bench.rig.node import MODEL, Node, free_port, short_folder
from tests.rig.launched import running_launcher
from tests.rig.tool_clients import ask_all, make_environment
from tests.rig.tool_model import TEMPLATE, tool_model
from tests.rig.tool_turns import ONE_ANSWER, TOWN_VALUE, TWO_ANSWER

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

CLUSTER = """\
[node.main]
logs = "{folder}/logs"
[gateway]
port = {port}
[model.{model}]
path = "{path}"
template = "{template}"
reasoning = "think"
[engine.{model}-0]
model = "{model}"
device = "cpu"
slots = 8
kv_tokens_max = 16384
"""
CLIENTS, ASKED, WAYS, RECORDS = 10, ("one", "two"), 2, 2


@pytest.fixture(scope="module")
def serving() -> Iterator[Node]:
    """Serve the model that calls tools."""
    port = free_port()
    with short_folder() as folder:
        text = CLUSTER.format(folder=folder, port=port, model=MODEL, path=tool_model(), template=TEMPLATE)
        with running_launcher(folder, text, port) as running:
            running.wait_ready()
            yield running


def test_a_referee_of_tool_calls_finds_nothing_wrong(serving: Node) -> None:
    """Every scenario of `canitoolcall probe`, whole, streamed, and both compared: 27 checks, and none is skipped."""
    report = probe(f"http://127.0.0.1:{serving.port}/v1", MODEL)
    assert report.summary() == {"pass": 3 * len(BUILTIN_SCENARIOS), "fail": 0, "error": 0, "skip": 0}, (
        report.render_text()
    )
    assert not any(each.warnings for each in report.outcomes), report.render_text()
    thoughts = {each.scenario_id for each in report.outcomes if each.observed and each.observed.reasoning_content}
    assert thoughts == {"reasoning-then-call"}


def test_stock_clients_run_the_tools_that_are_called_and_read_the_answer(serving: Node) -> None:
    """One call and two, whole and streamed; and pydantic-ai's typed answers, which are calls that it demands."""
    try:
        make_environment()
    except CalledProcessError:
        pytest.skip("without an index the environment of these clients cannot be made")
    ran = ask_all(serving.port)
    expected = {
        "one": (["Paris"], ONE_ANSWER),
        "two": (["Paris", "Tokyo"], TWO_ANSWER),
        "record": ([], json.dumps(TOWN_VALUE, separators=(",", ":"))),
    }
    assert [each for each in ran if (each.cities, each.answer) != expected[each.asked]] == []
    assert sum(each.asked != "record" for each in ran) == CLIENTS * len(ASKED) * WAYS
    assert sum(each.asked == "record" for each in ran) == RECORDS
