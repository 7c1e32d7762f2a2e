"""What a terminal shows of a running cluster, and what programs are told of it."""

from __future__ import annotations

import json

from rich.console import Console

from protocol.cluster import Leg, Limb, LinkState, NodeState, Offer, Reloaded, Status
from supervisor import board
from supervisor.operate import as_data

TREE = (
    Limb("one", "starts again", 0, 7300.0, "node on localhost"),
    Limb("one/links", "up", 0, 61.0, "other nodes"),
    Limb("one/a", "up", 0, 3.0, "tiny on cpu"),
    Limb("one/a/engine", "starts again", 2, 1.0, "SGLang", "engine a ended: [red]killed[/]"),
    Limb("one/a/decode", "up", 2, 250_000.0, "one slot a request", "an old story"),
    Limb("one/b", "up", 0, 3.0, "another"),
)
OFFER = Offer("a", "tiny", Leg.DECODE, 16, True, None, 3, 2, 12345, 0.5)
LINKS = (LinkState("two", True, 0.25, 4, 1200, 999, 2_500_000), LinkState("three", up=False))
ONE = Status("one", "r", "1", 7300.0, NodeState((OFFER,)), TREE, LINKS)
SEEN = {"one": ONE, "two": "10.0.0.2:7401 cannot be reached"}


def shown(what, width=110):
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_every_node_engine_and_link_stands_in_its_row():
    lines = shown(board.board("pd", SEEN))
    assert lines[0] == "cluster pd  1 of 2 nodes answer"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "node state since restarts",
        "one starts again 2 h node on localhost",
        "├─ links up 61 s 0 other nodes",
        "├─ a up 3 s 0 tiny on cpu",
        "│ ├─ engine starts again 1 s 2 engine a ended: [red]killed[/]",
        "│ └─ decode up 3 d 2 one slot a request",
        "└─ b up 3 s 0 another",
        "two no answer 10.0.0.2:7401 cannot be reached",
        "",
        "engine node model leg state running waiting slots tokens KV",
        "a one tiny decode up 3 2 16 12,345 50%",
        "",
        "link to state silent streams messages sent received",
        "one two up 0.2 s 4 1,200 999 B 2.5 MB",
        "one three down",
    ]


def test_in_a_narrow_terminal_only_what_is_said_about_a_member_is_cut():
    lines = shown(board.board("pd", {"one": ONE, "two": "why " * 40}), width=60)
    assert all(len(line) <= 60 for line in lines)
    assert any("starts again" in line and "2 h" in line and "…" not in line.partition("node on")[0] for line in lines)
    assert sum("why" in line for line in lines) > 3  # what went wrong is never cut


def test_a_node_that_drains_says_so_with_its_engines():
    draining = Status("one", "r", "1", 1.0, NodeState((OFFER,), draining=True), TREE[:1])
    lines = shown(board.board("pd", {"one": draining}))
    assert sum("draining" in line for line in lines) == 2


def test_json_says_the_same_as_plain_values():
    told = json.loads(json.dumps(as_data("pd", SEEN)))
    assert told["nodes"]["two"] == {"unreachable": "10.0.0.2:7401 cannot be reached"}
    one = told["nodes"]["one"]
    assert one["state"]["offers"][0]["leg"] == "decode"
    assert one["tree"][3]["why"] == "engine a ended: [red]killed[/]"
    assert one["links"][0]["bytes_received"] == 2_500_000


def test_a_reload_is_told_a_sentence_a_line():
    assert shown(board.reloaded("one", Reloaded(("a is 2 now",), ("b stays 3",)))) == [
        "one:",
        "  a is 2 now",
        "  b stays 3",
    ]
    assert shown(board.reloaded("one", Reloaded())) == ["one: nothing has changed"]
