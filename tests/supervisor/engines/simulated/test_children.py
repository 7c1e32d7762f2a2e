"""The children of simulated engines: what a host needs for them, and which have sockets for their events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines import kinds
from supervisor.engines.simulated import children
from supervisor.supervision.tree import Tree
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine

FILE = f"[gateway]\nport = 0\n{MODEL}{engine('quiet')}{engine('one')}"
EVENTS = 'events.listen = "127.0.0.1:5557"\n'


def test_without_pyzmq_only_engines_that_publish_their_events_cannot_start(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "find_spec", lambda _: None)
    kinds.check_host(kinds.read_cluster(written(FILE)), "main")
    with pytest.raises(StartFailed, match=r"engine one publishes .* pyzmq is missing"):
        kinds.check_host(kinds.read_cluster(written(FILE + EVENTS)), "main")


def test_only_engines_that_publish_their_events_have_sockets(written: Callable[[str], Path]) -> None:
    def sockets(text: str) -> list[str]:
        assembly, _ = built_assembly(kinds.read_cluster(written(text)), "main")
        trees = [child for child in assembly.tree.children if isinstance(child, Tree) and child.name == "event-sockets"]
        return [child.name for tree in trees for child in tree.children]

    assert sockets(FILE) == []
    assert sockets(FILE + EVENTS) == ["zmq-one"]
