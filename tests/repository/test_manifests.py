"""The examples for Slurm and Kubernetes agree with the cluster files that they run and with what a node does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from protocol.messages.operations import OPERATIONS
from supervisor import command_line
from supervisor.cli import commands
from supervisor.cluster import link_credentials
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.keys import client_keys
from supervisor.launcher.node_process import time_limits
from supervisor.node import preview

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "tiny"
MANIFESTS = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "espalier.yaml").read_text()))
PODS = {
    manifest["metadata"]["name"]: manifest["spec"]["template"]
    for manifest in MANIFESTS
    if manifest["kind"] == "StatefulSet"
}
SBATCH = EXAMPLES / "slurm" / "espalier.sbatch"
SECRETS = {
    "ESPALIER_CLUSTER_SECRET": "s" * 32,
    "ESPALIER_ADMIN_KEY": "a" * 32,
    "ESPALIER_API_KEYS": "alice=" + "b" * 32,
}


def manifest(kind: str, name: str) -> Any:
    (found,) = (manifest for manifest in MANIFESTS if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name))
    return found


def container(name: str) -> Any:
    (found,) = PODS[name]["spec"]["containers"]
    return found


def stop_s(cluster: Cluster, name: str) -> float:
    """For how long a node may take to end after a signal, its engines included."""
    return time_limits(cluster, name)[1].term_s


def with_model(text: str) -> str:
    return re.sub(r'path = "/models/[^"]*"', f'path = "{TINY}"', text)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The cluster file of the manifests, with a model that is there."""
    file = tmp_path / "cluster.toml"
    file.write_text(with_model(manifest("ConfigMap", "espalier-cluster")["data"]["cluster.toml"]))
    return read_cluster(file)


# Kubernetes -------------------------------------------------------------------------------


def test_each_node_of_the_file_has_a_pod_that_runs_it(cluster: Cluster) -> None:
    assert set(cluster.node) == set(PODS)
    for name in PODS:
        command = container(name)["command"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
        assert command == ["python", "-m", "supervisor", f"{mounts['cluster']}/cluster.toml", "--node", name]
        assert manifest("StatefulSet", name)["spec"]["replicas"] == 1, "a node of the file is one process"


def test_the_secrets_that_a_node_needs_are_in_its_pod_alone(cluster: Cluster) -> None:
    for name in PODS:
        given = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in container(name)["env"]}
        assert {each["name"] for each in given.values()} == {"espalier-secrets"}
        assert ("ESPALIER_API_KEYS" in given) == (name in cluster.gateway_nodes)
        environment = {key: SECRETS[key] for key in given}
        assert preview.describe_node(cluster, name, environment)
        assert link_credentials.cluster_secret(cluster, environment)
        assert client_keys.metrics_keys(cluster, name, environment).names(admin=True)


def test_the_grace_period_is_longer_than_a_node_takes_to_end(cluster: Cluster) -> None:
    for name in PODS:
        hook = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {"command": ["sleep", "0"]})
        (word, seconds) = hook["command"]
        assert word == "sleep"
        grace_s = PODS[name]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > int(seconds) + cluster.node[name].drain_s
        assert grace_s >= int(seconds) + stop_s(cluster, name)


def test_ports_and_names_are_those_of_the_file(cluster: Cluster) -> None:
    for name, node in cluster.node.items():
        ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
        assert node.listen is not None
        assert node.metrics is not None
        wanted = {"link": node.listen.port, "metrics": node.metrics.port}
        if name in cluster.gateway_nodes:
            wanted["http"] = cluster.gateway.port
        bootstraps = [engine.bootstrap_port for engine in cluster.engines_on(name).values()]  # type: ignore[attr-defined]
        wanted.update(("bootstrap", port) for port in bootstraps if port is not None)
        assert ports == wanted
        service = manifest("StatefulSet", name)["spec"]["serviceName"]
        assert node.listen.host == f"{name}-0.{service}.espalier.svc.cluster.local"
        assert manifest("Service", service)["spec"]["publishNotReadyAddresses"] is True


def test_a_service_leads_to_pods_and_ports_that_exist(cluster: Cluster) -> None:
    for service, pods in {"espalier": ["front"], "nodes": [*PODS]}.items():
        spec = manifest("Service", service)["spec"]
        chosen = [name for name, pod in PODS.items() if spec["selector"].items() <= pod["metadata"]["labels"].items()]
        assert chosen == pods
        for name in chosen:
            ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
            assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
    names = {"espalier", "espalier.espalier", "espalier.espalier.svc.cluster.local"}
    assert names <= set(cluster.gateway.allowed_hosts)


def test_probes_ask_for_paths_that_every_node_serves_without_a_key() -> None:
    asked = {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    for name in PODS:
        probes = {kind: container(name)[f"{kind}Probe"]["httpGet"] for kind in asked}
        assert {kind: probe["path"] for kind, probe in probes.items()} == asked
        assert all(ROUTES.probes().find(probe["path"]) and probe["port"] == "metrics" for probe in probes.values())


def test_an_engine_has_its_gpus_and_every_node_its_memory(cluster: Cluster) -> None:
    for name in PODS:
        limits = container(name)["resources"]["limits"]
        engines = cluster.engines_on(name).values()
        gpus = sum(engine.tensor_parallel for engine in engines if engine.device == "cuda")  # type: ignore[attr-defined]
        assert limits.get("nvidia.com/gpu", 0) == gpus
        assert "memory" in limits
        volumes = {volume["name"] for volume in PODS[name]["spec"]["volumes"]}
        assert volumes == {mount["name"] for mount in container(name)["volumeMounts"]}


# Commands ---------------------------------------------------------------------------------

DOCUMENTED = [ROOT / "docs" / "operating.md", *sorted(EXAMPLES.glob("*/README.md")), SBATCH]
OUR_COMMAND = re.compile(r"(?:-m|\"-m\",) \"?supervisor\"?([^\n`#|>;)]*)")


def helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help of both command lines: that of nodes, and that of operators."""
    monkeypatch.setattr(sys, "argv", ["supervisor", "--help"])
    with pytest.raises(SystemExit):
        command_line.main()
    with pytest.raises(SystemExit):
        commands.main(["cluster.toml", "status", "--help"], {}, bytes)
    return capsys.readouterr().out


def test_every_command_of_the_readme_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = {"hash-key", *command_line.OPERATOR_COMMANDS, *re.findall(r"--[a-z-]+", helps(monkeypatch, capsys))}
    of_operations = {field.name for row in OPERATIONS for field in attrs.fields(row.request)}  # type: ignore[arg-type]  # every message is an attrs class
    existing |= {"--to", *(row.name for row in OPERATIONS)}
    existing |= {f"--{name.replace('_', '-')}" for name in of_operations}
    typed = [words.split() for file in DOCUMENTED for words in OUR_COMMAND.findall(file.read_text())]
    flags = {re.sub(r"[^a-z-]", "", word) for words in typed for word in words if re.match(r"\W*--", word)}
    verbs = {word for words in typed for word in words[1:2] if re.fullmatch("[a-z-]+", word)} - {"alice"}
    assert {"--check", "--node", "--json", "status", "drain", "restart", "reload"} <= flags | verbs <= existing


def test_the_pod_of_a_command_for_kubernetes_exists_and_has_its_file() -> None:
    text = (EXAMPLES / "kubernetes" / "README.md").read_text()
    for pod, file in re.findall(r"exec (\S+)-0 -- python -m supervisor (\S+)", text):
        assert file == container(pod)["command"][3]
    for name in re.findall(r"scale statefulset (\S+)", text):
        assert name in PODS
    keys = {variable["valueFrom"]["secretKeyRef"]["key"] for name in PODS for variable in container(name)["env"]}
    assert set(re.findall(r"--from-literal=(\w+)=", text)) == keys


# Slurm ------------------------------------------------------------------------------------


def test_the_batch_script_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


def placed(folder: Path, **hosts: str) -> Cluster:
    text = with_model((EXAMPLES / "slurm" / "cluster.toml").read_text())
    for name, host in hosts.items():
        text = text.replace(f"@{name.upper()}@", host)
    folder.joinpath("secret").write_text("s" * 32)
    folder.joinpath("keys.toml").write_text("")
    file = folder / "placed.toml"
    file.write_text(text)
    return read_cluster(file)


def test_the_script_starts_the_nodes_of_its_file_one_a_host(tmp_path: Path) -> None:
    cluster, text = placed(tmp_path, front="a", prefill="b", decode="c"), SBATCH.read_text()
    (names,) = re.findall(r"^names=\(([^)]*)\)", text, re.MULTILINE)
    assert names.split() == list(cluster.node)
    assert names.split()[0] in cluster.gateway_nodes
    assert f"#SBATCH --nodes={len(cluster.node)}" in text
    (gpus,) = map(int, re.findall(r"--gpus-per-node=(\d+)", text))
    assert {engine.tensor_parallel for engine in cluster.engine.values()} == {gpus}  # type: ignore[attr-defined]


def test_the_signal_comes_early_enough_for_the_gateway_and_then_for_the_others(tmp_path: Path) -> None:
    cluster, text = placed(tmp_path, front="a", prefill="b", decode="c"), SBATCH.read_text()
    (early_s,) = map(int, re.findall(r"^#SBATCH --signal=B:TERM@(\d+)", text, re.MULTILINE))
    (drain_s,) = map(int, re.findall(r"timeout (\d+) .* drain", text))
    assert drain_s >= stop_s(cluster, "front")
    # Once the gateway has gone the others have nothing to drain, but their engines to stop.
    assert early_s >= drain_s + max(stop_s(cluster, name) - cluster.node[name].drain_s for name in cluster.node)
