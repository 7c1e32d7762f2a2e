"""Certificates that bind names: a node may use no name but those in its certificate."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import PeerRefused, StartFailed
from protocol.link import greeting
from protocol.link.greeting import Greeter
from supervisor.cluster import link_credentials
from supervisor.cluster.link_settings import LinkSettings
from supervisor.config import placement
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.links import websocket
from supervisor.links.tls import load_link_tls
from supervisor.node import preview
from tests.rig import certificate
from tests.rig.gateway import FOLDER
from tests.rig.nodes import QUICK, WITHIN_S, Node, Reasons, all_linked, linked_nodes, until

HOST = "IP:127.0.0.1"
STRICT = evolve(QUICK, tls_names="nodes")

Files = tuple[Path, Path, Path]  # a certificate, its key and its authority
Shows = Callable[..., Files]
Read = Callable[..., Cluster]


@pytest.fixture(scope="module")
def shows(tmp_path_factory: pytest.TempPathFactory) -> Shows:
    """Make one certificate for each set of names, all signed by one authority, and return how each is shown."""
    certificate.files()  # it skips where there is no openssl
    folder = tmp_path_factory.mktemp("certificates")
    authority, key = folder / "authority.pem", folder / "authority.key"
    certificate.make(authority, key)
    shown: dict[tuple[str, ...], Files] = {}

    def files(*names: str) -> Files:
        if names not in shown:
            stem = folder / str(len(shown))
            shown[names] = stem.with_suffix(".pem"), stem.with_suffix(".key"), authority
            _sign(stem, authority, key, ",".join((HOST, *names)))
        return shown[names]

    return files


def _sign(stem: Path, authority: Path, key: Path, names: str) -> None:
    run = partial(subprocess.run, check=True, capture_output=True, timeout=120)
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", stem.with_suffix(".key"))
    run(["openssl", "req", *new, "-subj", "/CN=x", "-out", stem.with_suffix(".csr")])
    stem.with_suffix(".ext").write_text(f"subjectAltName={names}\n")
    signed = ("-CA", authority, "-CAkey", key, "-set_serial", "7", "-days", "2", "-extfile", stem.with_suffix(".ext"))
    run(["openssl", "x509", "-req", "-in", stem.with_suffix(".csr"), *signed, "-out", stem.with_suffix(".pem")])


def node(name: str, files: Files, section: LinkSettings = STRICT) -> Node:
    return Node(name, section=section, tls=load_link_tls(*files))


# Between nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["DNS:{0}", "DNS:{0}.grove", "DNS:{0}.GROVE", "URI:espalier:{0}"])
async def test_nodes_whose_certificates_name_them_link(shows: Shows, form: str, rather_slow: MockClock) -> None:
    a, b = (node(name, shows(form.format(name))) for name in "ab")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        assert await a.ask(b) == await b.ask(a) == [0, 1, 2]


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")], ids=["it listens", "it dials"])
async def test_a_node_under_a_name_of_another_is_refused_and_both_ends_log_it(
    shows: Shows, reasons: Reasons, first: str, second: str, rather_slow: MockClock
) -> None:
    honest, liar = node(first, shows(f"DNS:{first}")), node(second, shows("DNS:mallory"))
    async with linked_nodes(honest, liar):
        await until(lambda: len(reasons()) >= 2)
        assert honest.linked == liar.linked == set()
    reason = f"its certificate must name it, as DNS:{second}, and names DNS:mallory, IP Address:127.0.0.1 (tls_names)"
    assert set(reasons()) == {
        f"node {second} of cluster grove was refused: {reason}",
        f"node {second} was refused by node {first} of cluster grove: {reason}",
    }


async def test_where_hosts_are_named_a_certificate_of_the_cluster_is_enough(
    shows: Shows, rather_slow: MockClock
) -> None:
    a, b = (node(name, shows("DNS:mallory"), QUICK) for name in "ab")
    async with linked_nodes(a, b):
        await all_linked(a, b)


async def test_a_link_without_tls_has_no_names(reasons: Reasons, rather_slow: MockClock) -> None:
    a, b = (Node(name, section=STRICT) for name in "ab")
    async with linked_nodes(a, b):
        await until(lambda: len(reasons()) >= 2)
        assert a.linked == b.linked == set()
    assert all("and names nobody (tls_names)" in reason for reason in reasons())


async def test_an_operator_needs_no_name_and_the_node_that_it_dials_does(shows: Shows, rather_slow: MockClock) -> None:
    a, mallory = node("a", shows("DNS:a")), node("b", shows("DNS:mallory"))
    async with linked_nodes(a, mallory, know=False):
        assert await greeted(a, shows("DNS:x")) == "a"
        with pytest.raises(PeerRefused, match="its certificate must name it, as DNS:b, and names DNS:mallory"):
            await greeted(mallory, shows("DNS:x"))


async def greeted(node: Node, files: Files) -> str:
    """Greet a node as an operator does, and return the name that it has proved."""
    peers = []

    async def talk(wire: websocket.WebSocketTransport) -> None:
        greeter = Greeter(
            "dials", "grove", "operator-1", node.secret, bytes(31) + b"1", certified=wire.certificate_names()
        )
        peers.append(await websocket.greet(wire, greeter, WITHIN_S))

    await websocket.dial(node.endpoint, load_link_tls(*files).dials, WITHIN_S, talk)
    return peers[0]


# The greeting alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        (), ("DNS:*",), ("DNS:*.grove",), ("DNS:oak2",), ("DNS:oak.other",), ("URI:oak",), ("URI:espalier:OAK",),
        ("IP Address:oak",), ("email:oak",), ("dns:oak",), ("DNS:oak ",), ("DNS:oak.grove.evil",), ("oak",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["dials", "listens"])
def test_a_name_that_is_not_in_the_certificate_is_refused_before_anything_is_proved(
    names: tuple[str, ...], role: Literal["dials", "listens"]
) -> None:
    other = Greeter("listens" if role == "dials" else "dials", "grove", "oak", b"s", b"2" * 32)
    own = Greeter(role, "grove", "elm", b"s", b"1" * 32, certified=frozenset(names))
    [hello] = other.start()
    with pytest.raises(PeerRefused, match="its certificate must name it"):
        own.receive(hello)
    assert own.peer is None
    refusal = greeting.decode(own.final_message)
    assert isinstance(refusal, greeting.LinkRefusal)
    assert refusal.code == "node"
    with pytest.raises(PeerRefused, match=r"node oak was refused by the other end: its certificate must name it"):
        other.receive(own.final_message)


def test_an_end_that_listens_is_no_operator() -> None:
    own = Greeter("dials", "grove", "elm", b"s", b"1" * 32, certified=frozenset())
    with pytest.raises(PeerRefused, match="its certificate must name it"):
        own.receive(*Greeter("listens", "grove", "operator-1", b"s", b"2" * 32).start())


# The file ------------------------------------------------------------------------------------------------

TWO = f"""[cluster]
name = "grove"
{{}}
[model.oak]
path = "{FOLDER}"
[node.main]
listen = "127.0.0.1:7401"
[node.far]
host = "{{}}"
listen = "127.0.0.1:7402"
[engine.one]
model = "oak"
kind = "simulated"
kv_tokens_max = 4096
node = "far"
"""


@pytest.fixture
def read(written: Callable[[str], Path]) -> Read:
    return lambda lines, host="localhost": read_cluster(written(TWO.format(lines, host)))


def lines(files: Files, names: str = "nodes") -> str:
    keys = ("tls_certificate", "tls_key", "tls_authority")
    return "\n".join([f'tls_names = "{names}"', *(f'{key} = "{file}"' for key, file in zip(keys, files, strict=True))])


def test_tls_names_needs_certificates_and_is_hosts_or_nodes(read: Read) -> None:
    with pytest.raises(StartFailed, match=r"line 3: cluster.tls_names: means nothing without"):
        read('tls_names = "nodes"')
    with pytest.raises(StartFailed, match=r'line 3: cluster.tls_names: expected "hosts" or "nodes"'):
        read('tls_names = "keys"')


def test_a_node_named_like_the_host_of_others_is_refused(read: Read, shows: Shows) -> None:
    with pytest.raises(StartFailed, match=r"node.main: is the host of other nodes, whose certificates name main"):
        read(lines(shows("DNS:main")), host="main")
    with pytest.raises(StartFailed, match=r"node.main: is the host of other nodes, whose certificates name main.grove"):
        read(lines(shows("DNS:main")), host="main.grove")
    read(lines(shows("DNS:main"), "hosts"), host="main")


def test_a_node_whose_own_certificate_does_not_name_it_does_not_start(read: Read, shows: Shows) -> None:
    cluster = read(lines(shows("DNS:main", "URI:x")))
    tls = link_credentials.link_tls(cluster)
    assert tls is not None
    assert tls.names == frozenset({"DNS:main", "URI:x", "IP Address:127.0.0.1"})
    link_credentials.check_certificate_names(cluster, "main", tls)
    with pytest.raises(Misconfigured, match=r"names DNS:main, IP Address:127.0.0.1, URI:x, and must name node far"):
        link_credentials.check_certificate_names(cluster, "far", tls)
    link_credentials.check_certificate_names(read(lines(shows("DNS:main"), "hosts")), "far", tls)


def test_the_names_of_a_certificate_that_no_handshake_accepts_are_unknown(shows: Shows, tmp_path: Path) -> None:
    _, _, authority = shows("DNS:a")
    _sign(tmp_path / "a", authority, authority.with_suffix(".key"), "DNS:a\nextendedKeyUsage=clientAuth")
    assert load_link_tls(tmp_path / "a.pem", tmp_path / "a.key", authority).names is None


def test_a_preview_shows_which_names_certificates_must_have(
    read: Read, shows: Shows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "is_local_host", lambda _: True)
    files = shows("DNS:main", "DNS:far")
    line = f"links: TLS with {files[0]}; certificates must name the"
    assert f"{line} nodes that show them (tls_names)" in preview.describe_node(read(lines(files)), "main", {})
    assert f"{line} hosts that are dialed (tls_names)" in preview.describe_node(read(lines(files, "hosts")), "main", {})
    assert "links: plain; without a secret any user" in preview.describe_node(read(""), "far", {})
    with pytest.raises(Misconfigured, match="must name node far"):
        preview.describe_node(read(lines(shows("DNS:main"))), "far", {})
