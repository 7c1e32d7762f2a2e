"""The libraries that KV transfers need are looked for before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines.kinds import check_host, read_cluster
from supervisor.engines.sglang import libraries
from supervisor.launcher import preflight
from supervisor.node import preview
from tests.supervisor.config.test_load import ROOT

DISAGG = ROOT / "examples" / "disagg.toml"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The libraries that this machine has, by their names without `lib`."""
    installed: dict[str, str] = {}
    monkeypatch.setattr(libraries, "find_library", installed.get)
    return installed


def test_a_pair_without_mooncakes_libraries_is_refused_with_the_line_that_installs_them(
    installed: dict[str, str],
) -> None:
    cluster = read_cluster(DISAGG)
    for node, engine in (("prefill", "tiny-prefill"), ("decode", "tiny-decode")):
        with pytest.raises(StartFailed, match=re.escape("apt-get install libibverbs1 librdmacm1")) as caught:
            check_host(cluster, node)
        assert engine in cluster.engine
        assert f"engine {engine} " in str(caught.value)
    installed["ibverbs"] = "libibverbs.so.1"
    with pytest.raises(StartFailed, match=r"without librdmacm.so.1: apt-get install librdmacm1$"):
        check_host(cluster, "decode")


def test_an_engine_without_mooncake_needs_no_libraries(tmp_path: Path, installed: dict[str, str]) -> None:
    cluster = read_cluster(DISAGG)
    check_host(cluster, "front")
    check_host(read_cluster(ROOT / "examples" / "quickstart.toml"), "main")
    text = DISAGG.read_text().replace('leg = "', 'transfer = "nixl"\nleg = "')
    (tmp_path / "cluster.toml").write_text(text.replace('path = "', f'path = "{ROOT}/examples/'))
    check_host(read_cluster(tmp_path / "cluster.toml"), "prefill", "decode")
    installed |= {name: f"lib{name}.so.1" for name in libraries.MOONCAKE_LIBRARIES}
    check_host(cluster, "prefill", "decode")


@pytest.mark.usefixtures("installed")
def test_the_check_and_the_start_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_port", lambda *_, **__: None)
    cluster = read_cluster(DISAGG)
    for look in (
        lambda: preview.describe_node(cluster, "decode", {}),
        lambda: preflight.check_can_start(cluster, "decode"),
    ):
        with pytest.raises(StartFailed, match="apt-get install"):
            look()
