"""A reload applies what can change while a node runs, and reports that the rest takes a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import StartFailed
from protocol.messages.cluster import Reloaded
from supervisor.cluster import link_credentials
from supervisor.cluster.mesh import Mesh
from supervisor.config.certificate import Certificate
from supervisor.engines.kinds import load_cluster
from supervisor.files.reading import FileReader
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys.key_sources import key_file_lines
from supervisor.gateway.origins import Origins
from supervisor.node.credentials import read_credentials
from supervisor.node.reload.reload import Reloader
from tests.rig import certificate
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, TINY, engine
from tests.rig.files import read_inline
from tests.rig.links import idle_link

FILE = f"""
[node.front]
listen = "127.0.0.1:7401"
drain_s = 30
[node.one]
listen = "127.0.0.1:7402"

[cluster]
heartbeat_s = 1.0

[gateway]
node = "front"
requests_max = 8

{MODEL}
{engine("tiny-1", "one")}"""
KEYED = FILE.replace("requests_max", 'keys = "a.toml"\nrequests_max')


TWO_GATEWAYS = FILE.replace('[node.front]\nlisten = "127.0.0.1:7401"', "[node.front]").replace(
    'node = "front"\n', 'node = "front"\nprocesses = 2\nkeys = "a.toml"\n'
)


def restart(parts: str, name: str = "front") -> str:
    """Return the sentence that names the parts of the file that take a restart."""
    rest = "what is new there takes effect once this node is restarted"
    return f"{parts}: {rest} (`restart {name}`; node by node, that loses no request)"


def write_keys(file: Path, name: str) -> list[tuple[bytes, bytes]]:
    """Write a file with one client key; return the headers of a request with its secret."""
    secret = f"{name}s-secret-of-32-characters-01"
    file.write_text(key_file_lines(name, secret))
    return [(b"authorization", f"Bearer {secret}".encode())]


class Node:
    """An assembled node of the file `text`, with its reloader."""

    def __init__(
        self,
        tmp_path: Path,
        name: str = "front",
        text: str = FILE,
        environment: dict[str, str] | None = None,
        ask_launcher: Callable[[], None] | None = None,
        reads: FileReader = read_inline,
    ) -> None:
        self.file = tmp_path / "cluster.toml"
        self.file.write_text(text)
        self.text = text
        loaded = load_cluster(self.file)
        self.cluster = loaded.cluster
        environment = environment or {}
        self.assembly, _ = built_assembly(self.cluster, name, read_credentials(self.cluster, name, environment))
        self.reloader = Reloader(name, loaded, self.assembly, environment, ask_launcher, reads)

    @property
    def gateway(self) -> Gateway:
        assert self.assembly.gateway is not None
        return self.assembly.gateway

    @property
    def links(self) -> Mesh:
        assert self.assembly.links is not None
        return self.assembly.links

    async def reload(self, *replacements: tuple[str, str], text: str | None = None) -> Reloaded:
        """Replace parts of the first version of the file, or all of it, and reload."""
        text = text or self.text
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        self.file.write_text(text)
        return await self.again()

    async def again(self) -> Reloaded:
        """Reload the file as it is."""
        async with self.running():
            return await self.reloader.reload()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[trio.Nursery]:
        """Run the reloader in the body, as a node does; yields the nursery."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reloader.run)
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()


Front: TypeAlias = partial[Node]


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return partial(Node, tmp_path)


# What is applied ------------------------------------------------------------------------------


async def test_an_unchanged_file_changes_nothing(front: Front, autojump_clock: MockClock) -> None:
    assert await front().reload() == Reloaded()


async def test_allowed_hosts_origins_and_the_time_of_a_drain_change_at_once(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    hosts = 'allowed_hosts = ["Here"]\nallowed_origins = ["https://app.example"]\nkeepalive_s = 3\n'
    reloaded = await node.reload(
        ("requests_max = 8\n", f"requests_max = 8\n{hosts}"), ("drain_s = 30", "drain_s = 12.5")
    )
    assert node.gateway.origins == Origins(frozenset({"here"}), frozenset({"https://app.example"}))
    assert node.gateway.keepalive_s == 3
    assert node.reloader.drain_s == 12.5
    assert reloaded == Reloaded(
        (
            "node.front.drain_s is 12.5 now",
            "gateway.allowed_hosts is here now",
            "gateway.allowed_origins is https://app.example now",
            "gateway.keepalive_s is 3 now",
        )
    )
    turned_off = await node.reload(("requests_max = 8\n", "requests_max = 8\nkeepalive_s = 0\n"))
    assert turned_off.changed == (
        "node.front.drain_s is 30 now",
        "gateway.allowed_hosts is 127.0.0.1, ::1, localhost now",
        "gateway.allowed_origins is nothing now",
        "gateway.keepalive_s is 0 now",
    )


NEW = f"""
[node.two]
listen = "127.0.0.1:7403"
{engine("tiny-2", "two")}"""


async def test_a_new_node_is_known_with_its_engines_and_the_task_that_dials_is_woken(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    woken = []

    async def wait() -> None:
        await node.assembly.directory.wait_changed()
        woken.append(sorted(node.assembly.directory.nodes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        reloaded = await node.reload(text=FILE + NEW)
        assert reloaded == Reloaded(("node two is known now",))
        await wait_all_tasks_blocked()
    assert woken == [["one", "two"]]
    assert node.assembly.directory.nodes["two"].address == "127.0.0.1:7403"
    assert [offer.name for offer in node.assembly.directory.offers("tiny")] == ["tiny-1", "tiny-2"]
    assert await node.reload(text=FILE + NEW) == Reloaded()
    assert await node.reload() == Reloaded(), "whether it is still needed, its drain says"


async def test_each_reload_asks_the_launcher_which_starts_the_new_nodes_of_its_host(
    front: Front, autojump_clock: MockClock
) -> None:
    asked: list[str] = []
    node = front(ask_launcher=partial(asked.append, "reload"))
    far = NEW.replace("two", "far").replace("tiny-2", "tiny-3").replace("7403", "7404")
    far = far.replace('listen = "127.0.0.1:7404"', 'listen = "127.0.0.1:7404"\nhost = "10.0.0.9"')
    assert await node.reload(text=FILE + NEW + far) == Reloaded(
        ("node two is known now, and the launcher here starts it", "node far is known now"), (), ("two",)
    )
    assert await node.reload(text=FILE + NEW + far) == Reloaded()
    assert (await node.reload(text="nonsense")).refused[0].startswith("the file changes nothing: ")
    assert asked == ["reload"] * 3


async def test_the_certificates_of_links_are_read_again_and_a_wrong_one_changes_nothing(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key", "-nodes", names="subjectAltName=DNS:front,DNS:one")
    certificate.make(tmp_path / "b.pem", tmp_path / "b.key", "-nodes", names="subjectAltName=DNS:one")
    shown = 'heartbeat_s = 1.0\ntls_certificate = "a.pem"\ntls_key = "a.key"\ntls_authority = "a.pem"\n'
    node = front(text=FILE.replace("heartbeat_s = 1.0\n", f'{shown}tls_names = "nodes"\n'))
    before = node.links.tls
    assert await node.reload() == Reloaded()
    assert node.links.tls is not before
    reloaded = await node.reload(("a.pem", "b.pem"), ("a.key", "b.key"))
    assert "the file changes nothing: b.pem names DNS:one, and must name node front" in reloaded.refused[0]
    assert node.links.tls is not None
    assert node.links.tls.names == frozenset({"DNS:front", "DNS:one"})
    (tmp_path / "c.pem").write_text((tmp_path / "a.pem").read_text())
    assert await node.reload(('e = "a.pem"', 'e = "c.pem"')) == Reloaded(("cluster.tls_certificate is c.pem now",))


async def test_another_file_of_keys_replaces_the_client_keys(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    write_keys(tmp_path / "a.toml", "alice")
    write_keys(tmp_path / "b.toml", "bob")
    node = front(text=KEYED)
    reloaded = await node.reload(("a.toml", "b.toml"))
    assert node.gateway.keys.names(admin=False) == ["bob"]
    assert "gateway.keys is b.toml now" in reloaded.changed
    assert reloaded.changed[-1] == "keys: 1 are known now (1 new, 1 revoked)"


async def test_a_file_of_keys_that_is_emptied_revokes_none_and_the_answer_says_so(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    headers = write_keys(tmp_path / "a.toml", "alice")
    node = front(text=KEYED)
    (tmp_path / "a.toml").write_text("")
    reloaded = await node.reload()
    assert reloaded.changed == ()
    assert [sentence.partition(": ")[0] for sentence in reloaded.refused] == [
        "the file changes nothing",
        "the keys stay as they were",
    ]
    assert all("there is no key in" in sentence for sentence in reloaded.refused)
    assert node.gateway.keys.find(headers).name == "alice"


async def test_keys_that_are_taken_out_of_the_file_stay_until_a_restart(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    headers = write_keys(tmp_path / "a.toml", "alice")
    node = front(text=KEYED)
    reloaded = await node.reload(('keys = "a.toml"\n', ""))
    assert reloaded.not_changed == (restart("gateway"),)
    assert reloaded.changed == ("keys: 1 are known now",)
    assert node.gateway.keys.find(headers).name == "alice"


async def test_a_file_with_a_mistake_changes_nothing_but_the_keys(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    write_keys(tmp_path / "a.toml", "alice")
    node = front(text=KEYED)
    write_keys(tmp_path / "a.toml", "carol")
    counts = iter([" (1 new, 1 revoked)"])  # of the first reload; nothing has changed at the others
    for broken, reason in [
        (("heartbeat_s = 1.0", "heartbeat_s = "), "is not TOML"),
        (("heartbeat_s = 1.0", "heartbeat_s = 2.0"), "cluster.silent_s: must be at least two beats of 2 s"),
        (("[node.front]", "[node.operator-1]\n[node.front]"), "is an operator's name"),
        (('keys = "a.toml"', 'host = "0.0.0.0"\nnames = ["x"]'), "is not loopback, so clients need keys"),
        (("127.0.0.1:7401", "0.0.0.0:7401"), "links need a secret"),
    ]:
        reloaded = await node.reload(broken, ("drain_s = 30", "drain_s = 1"))
        assert (reloaded.not_changed, len(reloaded.refused)) == ((), 1)
        assert reloaded.refused[0].startswith("the file changes nothing: ")
        assert reason in reloaded.refused[0]
        assert reloaded.changed == (f"keys: 1 are known now{next(counts, '')}",)
        assert node.reloader.drain_s == 30
    assert node.gateway.keys.names(admin=False) == ["carol"]


# What takes a restart ----------------------------------------------------------------------------


async def test_each_reload_names_the_parts_that_take_a_restart_in_one_sentence(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    changed = (
        ("requests_max = 8", "requests_max = 9\nadmit_s = 1"),
        ("heartbeat_s = 1.0", "heartbeat_s = 0.5"),
        (f'path = "{TINY}"', f'path = "{TINY}"\nqueue_max = 3'),
        ("127.0.0.1:7401", "127.0.0.1:7411"),
    )
    for _ in range(2):
        assert await node.reload(*changed) == Reloaded((), (restart("cluster, node.front, gateway, model.tiny"),))
    assert (node.gateway.gate.requests_max, node.links.section.heartbeat_s) == (8, 1.0)


@pytest.mark.parametrize("name", ["front", "one"])
async def test_a_changed_engine_is_reported_by_its_node_alone(
    name: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    reloaded = await Node(tmp_path, name).reload(
        ("kv_tokens_max = 4096", "kv_tokens_max = 8192\nslots = 2"), ("127.0.0.1:7402", "127.0.0.1:7412")
    )
    parts = {"front": (restart("node.one"),), "one": (restart("node.one, engine.tiny-1", "one"),)}
    assert reloaded == Reloaded((), parts[name])


async def test_the_address_of_a_node_is_named_by_those_that_may_dial_it(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    await node.reload(text=FILE + NEW)
    moved = FILE + NEW.replace("7403", "7413")
    assert await node.reload(text=moved) == Reloaded((), (restart("node.two"),))
    assert node.assembly.directory.nodes["two"].address == "127.0.0.1:7403"


async def test_a_node_without_links_names_each_new_node_until_it_is_restarted(
    front: Front, autojump_clock: MockClock
) -> None:
    alone = f"[node.main]\n{MODEL}{engine('tiny-1', 'main')}"
    node = front("main", alone)
    for _ in range(2):
        assert await node.reload(text=alone + NEW) == Reloaded((), (restart("node.two", "main"),))


async def test_a_node_that_is_to_have_a_gateway_needs_a_restart(tmp_path: Path, autojump_clock: MockClock) -> None:
    reloaded = await Node(tmp_path, "one").reload(('node = "front"\n', 'node = "one"\n'))
    assert reloaded == Reloaded((), (restart("gateway", "one"),))


async def test_another_secret_takes_a_restart(front: Front, autojump_clock: MockClock) -> None:
    environment = {link_credentials.SECRET: "one-secret-of-the-cluster"}
    node = front(environment=environment)
    environment[link_credentials.SECRET] = "another-one-of-the-cluster"
    assert (await node.reload()).not_changed == (restart("the cluster's secret"),)


async def test_turning_tls_on_takes_a_restart_and_another_certificate_does_not(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    lines = 'requests_max = 8\ntls_certificate = "{0}.pem"\ntls_key = "{0}.key"'
    plain, tls = front(), front(text=FILE.replace("requests_max = 8", lines.format("a")))
    reloaded = await plain.reload(("requests_max = 8", lines.format("a")))
    assert (reloaded.changed, reloaded.not_changed, plain.gateway.port.tls) == ((), (restart("gateway"),), None)
    before = tls.gateway.port.tls
    reloaded = await tls.reload(("a.pem", "b.pem"), ("a.key", "b.key"))
    assert (len(reloaded.changed), reloaded.not_changed) == (2, ())
    assert tls.gateway.port.tls is not before
    assert tls.gateway.port.certificate == Certificate(tmp_path / "b.pem", tmp_path / "b.key")
    reloaded = await tls.reload(("a.pem", "b.pem"))  # its key does not belong to it
    assert reloaded.refused[0].startswith("the file changes nothing: ")
    assert "gateway.tls_certificate: the certificate " in reloaded.refused[0]
    assert tls.gateway.port.certificate == Certificate(tmp_path / "b.pem", tmp_path / "b.key")


async def test_a_process_more_of_the_gateway_is_known_at_once_and_the_rates_of_keys_take_a_restart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    headers = write_keys(tmp_path / "a.toml", "alice")
    with (tmp_path / "a.toml").open("a") as file:
        file.write("\nrate_per_s = 12\n")
    (tmp_path / "a.toml").chmod(0o600)
    front, one = Node(tmp_path, "front-0", TWO_GATEWAYS), Node(tmp_path, "one", TWO_GATEWAYS)
    reloaded = await front.reload(("processes = 2", "processes = 3"))
    assert front.gateway.keys.find(headers).rate_per_s == 6
    assert reloaded.not_changed == (restart("gateway", "front-0"),)
    assert front.assembly.directory.routers == (3, 0)
    assert (await one.reload(("processes = 2", "processes = 3"))).not_changed == ()
    assert one.assembly.directory.should_link("front-2")


async def test_a_gateway_that_cannot_have_its_port_is_not_said_to_be_started(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    write_keys(tmp_path / "a.toml", "alice")
    (tmp_path / "a.toml").chmod(0o600)
    one = Node(tmp_path, "one", TWO_GATEWAYS, ask_launcher=lambda: None)
    one.assembly.directory.linked("front-0", link := idle_link())
    assert (await one.reload(("processes = 2", "processes = 3"))).starts == ("front-2",)
    for _ in range(2):
        reloaded = await one.reload(("processes = 2", "processes = 1"))
        assert (reloaded.changed, reloaded.starts) == (("node front is known now",), ())
        assert reloaded.refused[0].startswith("node front is not started: port 8000 is held by front-0, ")
    one.assembly.directory.unlinked("front-0", link)
    assert (await one.reload(("processes = 2", "processes = 1"))).starts == ("front",)


async def test_a_node_is_not_started_again_with_a_file_that_is_wrong_or_without_it(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    await node.reloader.check_start()
    node.file.write_text(node.text.replace("requests_max = 8", "requests_max = 0"))
    with pytest.raises(StartFailed, match="has 1 mistake"):
        await node.reloader.check_start()
    node.file.write_text(node.text.replace("[node.front]", "[node.fore]").replace('"front"', '"fore"'))
    with pytest.raises(StartFailed, match="there is no node front"):
        await node.reloader.check_start()
