"""The status of a cluster as tables for a terminal and as JSON for programs."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from attrs import evolve
from rich.console import Console, ConsoleRenderable, RichCast

from protocol.messages.cluster import (
    ChildState,
    EjectionState,
    GateState,
    Leg,
    LinkState,
    NodeState,
    Offer,
    PoolState,
    Reloaded,
    Status,
)
from protocol.weights_record import WeightsRecord
from supervisor.cli import status_view
from supervisor.cli.commands import as_json_object
from supervisor.supervision.registration import OUT_OF_SERVICE

TREE = (
    ChildState("one", "starts again", 0, 7300.0, "node on localhost"),
    ChildState("one/links", "up", 0, 61.0, "other nodes"),
    ChildState("one/a", "up", 0, 3.0, "tiny on cpu"),
    ChildState("one/a/engine", "starts again", 2, 1.0, "SGLang", "engine a ended: [red]killed[/]"),
    ChildState("one/a/decode", "up", 2, 250_000.0, "one slot a request", "an old story"),
    ChildState("one/b", "up", 0, 3.0, "another"),
)
OFFER = Offer("a", "tiny", Leg.DECODE, 16, True, None, 3, 2, 12345, 0.5)
LINKS = (LinkState("two", True, 0.25, 4, 1200, 999, 2_500_000), LinkState("three", up=False))
ONE = Status("one", "r", "1", 7300.0, NodeState((OFFER,)), TREE, LINKS, GateState(3, 8, 1, 4))
SEEN: dict[str, status_view.StatusOrError] = {"one": ONE, "two": "10.0.0.2:7401 cannot be reached"}


def shown(what: ConsoleRenderable | RichCast | str, width: int = 110) -> list[Any]:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_every_node_engine_and_link_has_a_row() -> None:
    lines = shown(status_view.render_status("pd", SEEN))
    assert lines[:5] == [
        "cluster pd  1 of 2 nodes answer, 3 of 8 requests run, 1 of 4 wait",
        "  one/a/engine starts again: engine a ended: [red]killed[/]",
        "  node one has no link to node three",
        "  node two does not answer: 10.0.0.2:7401 cannot be reached",
        "",
    ]
    assert [" ".join(line.split()) for line in lines[5:]] == [
        "node state since restarts about",
        "one starts again 2 h node on localhost",
        "├─ links up 61 s 0 other nodes",
        "├─ a up 3 s 0 tiny on cpu",
        "│ ├─ engine starts again 1 s 2 engine a ended: [red]killed[/]",
        "│ └─ decode up 3 d 2 was started again: an old story",
        "└─ b up 3 s 0 another",
        "two no answer 10.0.0.2:7401 cannot be reached",
        "",
        "engine node model leg state run wait slots tokens KV",
        "a one tiny decode up 3 2 16 12,345 50%",
        "",
        "link to state silent streams messages sent received",
        "one two up 0.2 s 4 1,200 999 B 2.5 MB",
        "one three down",
    ]


def test_an_engine_out_of_service_is_shown_with_the_reason() -> None:
    offer = evolve(OFFER, up=False, why=f"{OUT_OF_SERVICE}: its weights are replaced")
    one = evolve(ONE, state=NodeState((offer, evolve(OFFER, name="b", up=False, why="failed: no GPU"))))
    lines = [" ".join(line.split()) for line in shown(status_view.render_status("pd", {"one": one}))]
    assert "engine one/a is out of service: its weights are replaced" in lines
    assert "a one tiny decode out of service 3 2 16 12,345 50%" in lines
    assert "b one tiny decode starting 3 2 16 12,345 50%" in lines


def test_every_pool_has_a_row_and_waits_at_all_gateways() -> None:
    pools = (
        PoolState("quick", "tiny", Leg.PREFILL, 10, 2, 1, 3, 8, 4),
        PoolState("cheap", "tiny", Leg.PREFILL, 0, 1, 1, 2, 16, 0),
    )
    other = tuple(evolve(pool, waiting=1) for pool in pools)
    seen: dict[str, status_view.StatusOrError] = {"one": evolve(ONE, pools=pools), "two": evolve(ONE, pools=other)}
    lines = [" ".join(line.split()) for line in shown(status_view.render_status("pd", seen))]
    at = lines.index("pool model leg priority up busy slots wait")
    assert lines[at + 1 : at + 3] == ["quick tiny prefill 10 1 of 2 3 8 5", "cheap tiny prefill 0 1 of 1 2 16 1"]
    assert not [line for line in shown(status_view.render_status("pd", SEEN)) if line.startswith("pool ")]


def test_a_node_that_drains_is_shown_so_with_its_engines() -> None:
    draining = Status("one", "r", "1", 1.0, NodeState((OFFER,), draining=True), TREE[:1])
    lines = shown(status_view.render_status("pd", {"one": draining}))
    assert sum("draining" in line for line in lines) == 2
    assert lines[1] == "  node one drains, 5 requests on it"


def test_versions_of_weights_are_shown_once_an_engine_has_new_ones() -> None:
    record = WeightsRecord(3, "step-3")
    updated = Status("one", "r", "1", 1.0, NodeState((evolve(OFFER, weights=record), OFFER)), TREE[:1])
    lines = shown(status_view.render_status("pd", {"one": updated}))
    at = next(number for number, line in enumerate(lines) if line.startswith("engine "))
    assert lines[at].split()[3:6] == ["leg", "weights", "state"]
    assert "step-3" in lines[at + 1]
    assert "step-3" not in lines[at + 2]


def well(name: str, *links: LinkState, version: str = "1", path: str | None = None) -> Status:
    return Status(name, "r", version, 9.0, NodeState(), (ChildState(path or name, "up", 0, 9.0),), links)


def test_the_first_line_reports_that_all_is_up() -> None:
    linked = {"one": well("one", LinkState("two", True)), "two": well("two", LinkState("one", True))}
    assert shown(status_view.render_status("pd", linked))[:2] == ["cluster pd  2 of 2 nodes answer, all is up", ""]
    assert "all is up" not in shown(status_view.render_status("pd", {"one": "gone"}))[0]


def test_an_ejected_worker_is_among_the_problems() -> None:
    bad = EjectionState("tiny", "two/b", "internal", 4.2)
    lines = shown(
        status_view.render_status(
            "pd", {"one": evolve(ONE, tree=(), aside=(bad, evolve(bad, worker="p+d", for_s=0.0)))}
        )
    )
    assert lines[1:3] == [
        "  two/b keeps failing (internal), is ejected by node one and is probed in 4 s",
        "  p+d keeps failing (internal), is ejected by node one and is being probed",
    ]


def test_a_link_that_is_down_and_different_versions_are_among_the_problems() -> None:
    statuses = {"one": well("one", LinkState("two", up=False)), "two": well("two", LinkState("one", True), version="2")}
    assert shown(status_view.render_status("pd", statuses))[:4] == [
        "cluster pd  2 of 2 nodes answer",
        "  node one has no link to node two",
        "  nodes run different versions: 1, 2",
        "",
    ]


@pytest.mark.parametrize(
    "control", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\u202e", "\u2028", "\x00", "a\nb"]
)
def test_text_from_nodes_moves_no_cursor_and_changes_no_colour(control: str) -> None:
    text = f"{control}[bold red]:smile:"
    child = ChildState(f"one/{text}", text, 2, 1.0, text, text)
    offer = Offer(text, text, Leg.BOTH, 1, True)
    tree = (ChildState(text, text, 0, 1.0, text, text), child, ChildState("one/x", "up", 1, 1.0, text, text))
    status = Status(text, text, text, 1.0, NodeState((offer,)), tree, (LinkState(text, True), LinkState("two", False)))
    everything = (
        status_view.render_status(text, {text: status, "two": text}),
        status_view.render_reload(text, Reloaded((text,), (text,))),
    )
    console = Console(width=1000, color_system=None, file=StringIO(), force_terminal=True)
    for each in everything:
        console.print(each)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in shown.split("\n") if "[bold red]:smile:" in line]
    assert all(each.isprintable() for each in shown.replace("\n", ""))
    escaped = control.encode("unicode_escape").decode()
    assert len(lines) >= 10
    assert all(escaped in line for line in lines) or control == "a\nb"  # a reload's sentence may have lines


def test_json_has_the_same_statuses_as_plain_values() -> None:
    decoded = json.loads(json.dumps(as_json_object("pd", SEEN)))
    assert decoded["nodes"]["two"] == {"unreachable": "10.0.0.2:7401 cannot be reached"}
    one = decoded["nodes"]["one"]
    assert one["state"]["offers"][0]["leg"] == "decode"
    assert one["tree"][3]["why"] == "engine a ended: [red]killed[/]"
    assert one["links"][0]["bytes_received"] == 2_500_000
    assert one["gate"] == {"running": 3, "running_max": 8, "waiting": 1, "waiting_max": 4, "unready": ""}
