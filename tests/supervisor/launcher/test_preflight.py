"""A host without a free port or enough memory for its nodes is refused before anything starts."""

from __future__ import annotations

import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines.kinds import read_cluster
from supervisor.launcher import preflight
from tests.supervisor.config.test_load import GOOD, ROOT, TINY, Written
from tests.supervisor.config.test_placement import several


def test_a_gateway_port_in_use_is_refused_in_one_sentence(written: Written) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = read_cluster(written(f"{GOOD}[gateway]\nport = {port}\n"))
        with pytest.raises(StartFailed, match=rf"port {port} of 127\.0\.0\.1 cannot be had: .* name another"):
            preflight.check_can_start(cluster, "main")


def test_a_port_is_shared_with_other_gateways_but_not_with_strangers(written: Written) -> None:
    text = f'{GOOD}[gateway]\nnodes = ["a", "b"]\nport = %d\n[node.a]\n[node.b]\n[node.main]\nlisten = "127.0.0.1:0"\n'
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = read_cluster(written(text % taken.getsockname()[1]))
        preflight.check_can_start(cluster, "a")  # beside b, which may be the one that listens
        with pytest.raises(StartFailed, match=r"name another as gateway\.port"):
            preflight.check_can_start(cluster, "a", "b")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = read_cluster(written(text % taken.getsockname()[1]))
        with pytest.raises(StartFailed, match=r"name another as gateway\.port"):
            preflight.check_can_start(cluster, "a")


def test_a_link_port_in_use_is_refused_in_one_sentence(written: Written) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = several(written, port=taken.getsockname()[1])
        with pytest.raises(StartFailed, match=r"port \d+ of 127\.0\.0\.1 cannot be had: .* as node\.main\.listen"):
            preflight.check_can_start(cluster, "a", "main")
        preflight.check_can_start(cluster, "a")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_name_of_an_address_of_either_family_is_a_place_to_listen(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    infos = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    preflight.check_port("front-0.nodes", 0, "node.front.listen")
    with socket.socket(infos[0][0]) as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StartFailed, match=rf"port {port} of front-0\.nodes cannot be had: .* as node\.front\.listen"
        ):
            preflight.check_port("front-0.nodes", port, "node.front.listen")


def test_a_name_without_an_address_is_refused_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(StartFailed, match=r"front-0\.nodes cannot be had: Name or service not known"):
        preflight.check_port("front-0.nodes", 7400, "node.front.listen")


@pytest.mark.parametrize("key", ["listen", "replay"])
def test_a_port_for_events_in_use_is_refused_in_one_sentence(written: Written, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addresses = {"listen": 1026, "replay": 1025} | {key: taken.getsockname()[1]}
        events = ", ".join(f'{name} = "127.0.0.1:{port}"' for name, port in addresses.items())
        cluster = read_cluster(written(f"{GOOD}events = {{ {events} }}\n[gateway]\nport = 0\n"))
        with pytest.raises(StartFailed, match=rf"name another as engine\.tiny-0\.events\.{key}"):
            preflight.check_can_start(cluster, "main")


def test_the_engines_of_all_nodes_on_a_host_must_fit_in_its_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = read_cluster(ROOT / "examples" / "disagg.toml")
    monkeypatch.setattr(preflight, "check_port", lambda *_, **__: None)
    monkeypatch.setattr(preflight, "available_bytes", lambda: preflight.ENGINE_BYTES * 3 // 2)
    preflight.check_can_start(cluster, "prefill")
    with pytest.raises(StartFailed, match="too little memory: 2 engines on the CPU need"):
        preflight.check_can_start(cluster, "front", "prefill", "decode")


@pytest.mark.parametrize(("available", "enough"), [(1 << 40, True), (1 << 20, False), (None, True)])
def test_too_little_memory_is_refused_in_one_sentence(
    written: Written, monkeypatch: pytest.MonkeyPatch, available: int | None, enough: bool
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: available)
    cluster = read_cluster(written(f"{GOOD}[gateway]\nport = 0\n"))
    if enough:
        preflight.check_can_start(cluster, "main")
        return
    with pytest.raises(StartFailed, match=r"too little memory: 1 engines? on the CPU needs? about 0\.7 GiB") as caught:
        preflight.check_can_start(cluster, "main")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [True, False])
def test_a_second_copy_of_the_weights_needs_no_memory(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    whole = folder / "model.safetensors"
    with (folder / "consolidated.safetensors").open("wb") as copy:
        copy.truncate(8 * 2**30)
    if index:
        whole.rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
        )
    cluster = read_cluster(written(GOOD.replace(str(TINY), str(folder))))
    monkeypatch.setattr(preflight, "check_port", lambda *_, **__: None)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2**30)
    preflight.check_can_start(cluster, "main")
    (folder / ("model-00001-of-00001.safetensors" if index else whole.name)).unlink()
    with suppress(FileNotFoundError):
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(StartFailed, match=r"need about 8\.7 GiB"):
        preflight.check_can_start(cluster, "main")
