"""`--check` prints each node with its limits and who may connect, and starts nothing."""

from __future__ import annotations

import sys
from ctypes.util import find_library
from pathlib import Path
from typing import NoReturn

import pytest

from protocol.errors import StartFailed
from supervisor.config.load import Loaded, Misconfigured
from supervisor.engines.kinds import read_cluster
from supervisor.media import filter_check
from supervisor.node import preview, start
from supervisor.runtime import Runtime
from supervisor.telemetry.logs import Terminal
from tests.rig import certificate
from tests.rig.keys import sha
from tests.rig.launched import run_supervisor
from tests.supervisor.config.test_load import GOOD, ROOT, Written
from tests.supervisor.gateway.keys.test_client_keys import gateway


def test_a_preview_shows_the_tree_and_its_limits() -> None:
    lines = preview.describe_node(read_cluster(ROOT / "examples" / "quickstart.toml"), "main", {}).splitlines()
    names = [line.split("─ ")[1].split()[0] for line in lines if "─ " in line]
    checks = ["grammars-tiny-0", "queue", "process"]
    expected = ["gateway", "zygote", "process", "tiny-0", "engine", "decode", *checks, "router-tiny", "processor-tiny"]
    assert [name for name in names if name in expected] == expected  # a node may have more children
    text = " ".join(line.strip("│├└─ ") for line in lines)
    for wanted in (
        "clients at http://127.0.0.1:8000",
        "tiny on cpu",
        "KV tokens 16,384 · slots 16",
        "requests 256 · prompt tokens 262,144",
        "to a worker of tiny, chosen by least_loaded",
        "queue 64 · prefill tokens min 0 · resumes 3",
        "connections max 1,024",
        "body bytes max 4,194,304",
        "backlog bytes max 1,048,576",
        "key connections max 256",
        "history bytes max 8,388,608",
        "permanent · starts within 120 s",
    ):
        assert wanted in " ".join(text.split()), wanted


def test_a_preview_names_who_may_connect_and_no_secret(written: Written) -> None:
    environment = {"ESPALIER_API_KEYS": "bob=quetzalcoatl", "ESPALIER_ADMIN_KEY": "xolotl"}
    text = preview.describe_node(
        gateway(written, 'keys = "keys.toml"\nallowed_origins = ["https://a.b"]'), "main", environment
    )
    assert "clients: alice, bob" in text
    assert "admin: admin" in text
    assert "web pages of: https://a.b; plain" in text
    assert "slots of tiny: 16, and one key has 15 at most" in text
    assert "KV memory" not in text
    assert "quetzalcoatl" not in text
    assert "xolotl" not in text
    alone = preview.describe_node(gateway(written, 'keys = "keys.toml"'), "main", {"ESPALIER_ADMIN_KEY": "xolotl"})
    assert "slots of tiny" not in alone, "all are for the only key"
    assert "clients: everybody, no keys" in preview.describe_node(gateway(written, ""), "main", {})


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('settings = {schedule_policy = "lpm"}', True),
        ('settings = {schedule_policy = "lpm"}\nadmission = "memory"', False),
        ('settings = {schedule_policy = "fcfs"}', False),
    ],
)
def test_a_preview_names_the_engines_whose_memory_one_key_may_fill(
    written: Written, lines: str, *, named: bool
) -> None:
    cluster = read_cluster(written(f"{GOOD}{lines}\n"))
    text = preview.describe_node(cluster, "main", {"ESPALIER_API_KEYS": "bob=quetzalcoatl,alice=xolotl"})
    assert ("KV memory: one key may fill that of tiny-0" in text) is named


def test_a_preview_names_the_keys_of_each_tenant(written: Written) -> None:
    text = 'sha256 = "{}"\ntenant = "{}"\n'
    keys = "".join(
        f"[key.{name}]\n{text.format(sha(name), tenant)}"
        for name, tenant in {"ann": "red", "bea": "blue", "cleo": "red", "dan": ""}.items()
    )
    shown = preview.describe_node(gateway(written, 'keys = "keys.toml"', keys), "main", {})
    assert "tenants: blue of bea; red of ann, cleo; the default one of dan" in shown
    assert "tenants" not in preview.describe_node(gateway(written, 'keys = "keys.toml"'), "main", {})


async def test_processes_that_a_node_starts_do_not_see_its_secrets(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_of_processes: dict[str, str] = {}

    def assemble(_: object, __: object, runtime: Runtime, *___: object) -> NoReturn:
        environment_of_processes.update(runtime.environment)
        raise StartFailed("that is enough")

    monkeypatch.setattr(start, "assemble", assemble)
    environment = {"ESPALIER_API_KEYS": "bob=quetzalcoatl", "ESPALIER_ADMIN_KEY": "xolotl", "HOME": "/root"}
    with pytest.raises(StartFailed, match="that is enough"):
        await start.run(
            Loaded(gateway(written, ""), Path("cluster.toml"), {}),
            "main",
            Terminal(sys.stderr, live=False),
            environment,
        )
    assert environment_of_processes == {"HOME": "/root"}


def test_a_certificate_is_read_by_a_preview_and_refused_if_it_cannot_be_used(written: Written, tmp_path: Path) -> None:
    certificate_file, key = certificate.files()
    lines = f'tls_certificate = "{certificate_file}"\ntls_key = "{key}"'
    assert f"TLS with {certificate_file}" in preview.describe_node(gateway(written, lines), "main", {})
    with pytest.raises(StartFailed, match="cannot be used"):
        preview.describe_node(
            gateway(written, lines.replace(str(key), "keys.toml").replace(str(certificate_file), "keys.toml")),
            "main",
            {},
        )


def test_the_check_command_prints_a_node_or_the_mistakes(written: Written) -> None:
    good = run_supervisor("--check", "examples/quickstart.toml")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("main")
    bad = run_supervisor("--check", written(GOOD + "[gateway]\nport = '8000'\n"))
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("espalier: ")
    assert "gateway.port: expected an integer" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.skipif(find_library("ibverbs") is None, reason="a pair wants Debian's libibverbs1, or is refused")
def test_the_check_command_prints_every_node_or_the_named_one() -> None:
    every = run_supervisor("--check", "examples/disagg.toml")
    assert (every.returncode, every.stderr) == (0, "")
    trees = [text.split(maxsplit=1)[0] for text in every.stdout.split("\n\n")]
    assert trees == ["front", "prefill", "decode"]
    one = run_supervisor("--check", "--node", "decode", "examples/disagg.toml")
    assert (one.returncode, one.stdout.rstrip()) == (0, every.stdout.split("\n\n")[2].rstrip())


@pytest.mark.parametrize(
    ("name", "model", "limits"),
    [("gpu", "qwen3-32b", "KV tokens 400,000 · slots 256"), ("trtllm", "qwen3-8b", "KV tokens 400,000 · slots 128")],
)
def test_an_example_for_gpus_is_a_cluster_without_a_zygote(name: str, model: str, limits: str) -> None:
    text = preview.describe_node(read_cluster(ROOT / "examples" / f"{name}.toml"), "main", {})
    assert f"{model} on cuda" in text
    assert "zygote" not in text
    assert limits in text


def test_a_preview_refuses_a_host_that_cannot_keep_decoders_in_their_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_check, "missing", lambda: "this kernel has none")
    with pytest.raises(Misconfigured, match='is "required", and this kernel has none'):
        preview.describe_node(read_cluster(ROOT / "examples" / "vision.toml"), "front", {})
    preview.describe_node(read_cluster(ROOT / "examples" / "quickstart.toml"), "main", {})
