"""The links of a node with a transfer engine: it is there, or its key is a mistake that says what to install."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from supervisor.config.load import Misconfigured
from supervisor.engines.kinds import read_cluster
from supervisor.tensors import transfer_agent
from tests.rig.assembly import built_assembly
from tests.supervisor.config.test_load import GOOD, Written

NIXL = '[node.main]\n[node.other]\nlisten = "127.0.0.1:7401"\n[cluster]\ntensors = "nixl"\n'


def test_a_transfer_engine_that_is_not_installed_is_a_mistake_at_its_key(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    monkeypatch.setattr(transfer_agent, "MODULES", ("no_such_module",))
    with pytest.raises(Misconfigured, match=r'"nixl" needs the package nixl-cu12: pip install') as raised:
        built_assembly(read_cluster(written(f"{GOOD}\n{NIXL}")), "main")
    assert raised.value.path == "cluster.tensors"


@pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
def test_its_memory_is_that_of_the_links_and_nothing_runs_yet(written: Written) -> None:
    links = built_assembly(read_cluster(written(f"{GOOD}\n{NIXL}")), "main")[0].links
    assert links is not None
    assert links.memory is links.carried.memory
    assert links.memory is not None
    assert links.memory.transfers.description == b""


def test_tensors_are_attached_by_default(written: Written) -> None:
    links = built_assembly(read_cluster(written(GOOD + NIXL.replace('"nixl"', '"attached"'))), "main")[0].links
    assert links is not None
    assert links.memory is None
