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

from actors.routing.kv import KvPolicy
from protocol.cluster import Reloaded
from protocol.errors import StartFailed
from supervisor.cluster import link_credentials
from supervisor.cluster.mesh import Mesh
from supervisor.config.certificate import Certificate
from supervisor.engines.kinds import load_cluster
from supervisor.engines.simulated.section import SimulatedSection
from supervisor.files.reading import FileReader
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import key_file_lines
from supervisor.gateway.origins import Origins
from supervisor.node.credentials import read_credentials
from supervisor.node.reload import Reloader
from tests.rig import certificate
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, TINY, engine
from tests.rig.files import read_inline
from tests.rig.links import idle_link
from tests.rig.pools import one_cell, pool

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
        self.drain_s: float | None = None
        environment = environment or {}
        self.assembly, _ = built_assembly(self.cluster, name, read_credentials(self.cluster, name, environment))
        self.reloader = Reloader(name, loaded, self.assembly, environment, self.set_drain_s, ask_launcher, reads)

    @property
    def gateway(self) -> Gateway:
        assert self.assembly.gateway is not None
        return self.assembly.gateway

    @property
    def links(self) -> Mesh:
        assert self.assembly.links is not None
        return self.assembly.links

    def set_drain_s(self, drain_s: float) -> None:
        self.drain_s = drain_s

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


@pytest.mark.parametrize(
    ("always", "keys", "applied"), [(True, "", True), (False, "", False), (False, "events.publish = false\n", True)]
)
async def test_a_policy_that_hears_of_blocks_waits_for_engines_that_were_not_started_to_tell_of_them(
    always: bool, keys: str, applied: bool, front: Front, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(SimulatedSection, "publishes_always", always)
    text = FILE.replace('node = "one"', f'node = "front"\n{keys}').replace(MODEL, f'{MODEL}policy = "random_two"\n')
    node = front(text=text)
    reloaded = await node.reload(('policy = "random_two"', 'policy = "kv"'))
    told = [any("policy" in each for each in sentences) for sentences in (reloaded.changed, reloaded.not_changed)]
    assert told == [applied, not applied]
    assert isinstance(node.assembly.reloadable.routings["tiny"].policy, KvPolicy) == applied


async def test_a_policy_that_is_replaced_hears_of_no_blocks_any_more(front: Front, autojump_clock: MockClock) -> None:
    node = front(text=FILE.replace(MODEL, f'{MODEL}policy = "kv"\n'))
    index, routing = node.assembly.reloadable.policies["tiny"].index, node.assembly.reloadable.routings["tiny"]
    heard = [index.on_stored]
    await node.reload(('policy = "kv"', 'policy = "random_two"'))
    heard.append(index.on_stored)
    await node.reload()
    assert isinstance(routing.policy, KvPolicy)
    assert heard[0] is not None
    assert heard[1] is None
    assert index.on_stored == routing.policy.recent.told


async def test_the_limits_of_admission_gateway_and_requests_change_at_once(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    reloaded = await node.reload(
        (
            "requests_max = 8\n",
            (
                "requests_max = 4\nwaiting_max = 7\nadmit_s = 2\nfirst_token_s = 3\ntotal_s = 4\nprompt_tokens_max = 99\n"
                'allowed_hosts = ["Here"]\nallowed_origins = ["https://app.example"]\n[gateway.limits]\nconnections_max = 5\nbody_s = 2.5\n'
            ),
        ),
        ("drain_s = 30", "drain_s = 12.5"),
    )
    gateway = node.gateway
    assert (gateway.gate.requests_max, gateway.gate.waiting_max, gateway.gate.admit_s) == (4, 7, 2)
    assert (gateway.runner.first_token_s, gateway.runner.total_s, node.assembly.reloadable.prompt_tokens_max) == (
        3,
        4,
        99,
    )
    assert gateway.origins == Origins(frozenset({"here"}), frozenset({"https://app.example"}))
    assert (gateway.limits.connections_max, gateway.limits.body_s, gateway.limits.idle_s) == (5, 2.5, 75)
    assert node.drain_s == 12.5
    assert reloaded.not_changed == ()
    assert "gateway.requests_max is 4 now, and was 8" in reloaded.changed
    assert "gateway.limits.body_s is 2.5 now, and was 30" in reloaded.changed
    assert "node.front.drain_s is 12.5 now, and was 30" in reloaded.changed
    assert len(reloaded.changed) == 11
    assert await node.again() == Reloaded()  # the file is in force now


async def test_a_changed_value_returns_with_the_file(front: Front, autojump_clock: MockClock) -> None:
    node = front()
    await node.reload(("requests_max = 8", "requests_max = 8\nadmit_s = 2"))
    assert await node.reload(("requests_max = 8", "requests_max = 8\nadmit_s = 3")) == Reloaded(
        ("gateway.admit_s is 3 now, and was 2",)
    )
    assert await node.reload() == Reloaded(("gateway.admit_s is 5 now, and was 3",))
    assert node.gateway.gate.admit_s == 5
    assert await node.reload() == Reloaded()


async def test_a_requests_max_above_that_of_the_start_takes_a_restart(front: Front, autojump_clock: MockClock) -> None:
    node = front()
    reloaded = await node.reload(("requests_max = 8", "requests_max = 9"))
    assert reloaded.changed == ()
    (sentence,) = reloaded.not_changed
    assert sentence.startswith("gateway.requests_max can only be lowered and raised again, to what it was at the start")
    assert node.gateway.gate.requests_max == 8


async def test_a_requests_max_that_was_lowered_raised_too_far_and_lowered_again_is_in_force(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    await node.reload(("requests_max = 8", "requests_max = 2"))
    await node.reload(("requests_max = 8", "requests_max = 99"))
    assert node.gateway.gate.requests_max == 8
    reloaded = await node.reload(("requests_max = 8", "requests_max = 2"))
    assert node.gateway.gate.requests_max == 2
    assert reloaded == Reloaded(("gateway.requests_max is 2 now, and was 8",))


async def test_the_limits_of_a_router_change_at_once(front: Front, autojump_clock: MockClock) -> None:
    node = front()
    more = f'path = "{TINY}"\nprefill_tokens_min = 100\nresumes_max = 1\nresume_s = 2.5'
    reloaded = await node.reload((f'path = "{TINY}"', more))
    routing = node.assembly.reloadable.routings["tiny"]
    assert (routing.prefill_tokens_min, routing.limits.resumes_max, routing.limits.resume_s) == (100, 1, 2.5)
    assert routing.limits.resume_tokens_max == 65_536
    assert len(reloaded.changed) == 3
    assert reloaded.not_changed == ()


async def test_the_times_of_links_change_for_links_that_are_made_later(front: Front, autojump_clock: MockClock) -> None:
    node = front()
    reloaded = await node.reload(("heartbeat_s = 1.0", "heartbeat_s = 0.5\nsilent_s = 4"))
    assert (node.links.section.heartbeat_s, node.links.section.silent_s) == (0.5, 4)
    assert reloaded.changed == ("cluster.heartbeat_s is 0.5 now, and was 1", "cluster.silent_s is 4 now, and was 3")


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
    gone = "node two stays known as it was until this node is started again; drain it if it is to go"
    assert await node.reload() == Reloaded((), (gone,))


async def test_a_node_with_another_address_is_dialed_there(front: Front, autojump_clock: MockClock) -> None:
    node = front()
    await node.reload(text=FILE + NEW)
    moved = (FILE + NEW).replace("7402", "7412").replace("7403", "7413")
    assert await node.reload(text=moved) == Reloaded(
        (
            "node.one.listen is 127.0.0.1:7412 now, and was 127.0.0.1:7402",
            "node.two.listen is 127.0.0.1:7413 now, and was 127.0.0.1:7403",
        )
    )
    nodes = node.assembly.directory.nodes
    assert (nodes["one"].address, nodes["two"].address) == ("127.0.0.1:7412", "127.0.0.1:7413")
    assert await node.reload(text=moved) == Reloaded()
    without_address = moved.replace('listen = "127.0.0.1:7413"\n', "")
    assert (await node.reload(text=without_address)).not_changed == (
        "node.two.listen stays 127.0.0.1:7413 until this node is started again, though the file says nothing",
    )


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
    assert await node.reload(text=FILE + NEW + far) == Reloaded(starts=("two",))  # neither has a link yet
    assert (await node.reload(text="nonsense")).refused[0].startswith("the file changes nothing: ")
    assert asked == ["reload"] * 3


async def test_certificates_must_name_nodes_from_the_next_link_on_if_links_use_tls(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key", "-nodes", names="subjectAltName=DNS:front,DNS:one")
    certificate.make(tmp_path / "b.pem", tmp_path / "b.key", "-nodes", names="subjectAltName=DNS:one")
    shown = 'heartbeat_s = 1.0\ntls_certificate = "a.pem"\ntls_key = "a.key"\ntls_authority = "a.pem"\n'
    plain, node = front(), front(text=FILE.replace("heartbeat_s = 1.0\n", shown))
    strict = (shown, f'{shown}tls_names = "nodes"\n')
    reloaded = await plain.reload(("heartbeat_s = 1.0\n", strict[1]))
    assert reloaded.not_changed[-1].startswith("cluster.tls_names stays hosts until")
    assert not plain.links.section.verifies_node_names
    reloaded = await node.reload(strict)
    assert reloaded.changed == ("cluster.tls_names is nodes now, and was hosts",)
    assert node.links.section.verifies_node_names
    reloaded = await node.reload(strict, ("a.pem", "b.pem"), ("a.key", "b.key"))
    assert "the file changes nothing: b.pem names DNS:one, and must name node front" in reloaded.refused[0]
    assert node.links.tls is not None
    assert node.links.tls.names == frozenset({"DNS:front", "DNS:one"})


async def test_another_file_of_keys_replaces_the_client_keys(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    write_keys(tmp_path / "a.toml", "alice")
    write_keys(tmp_path / "b.toml", "bob")
    node = front(text=KEYED)
    reloaded = await node.reload(("a.toml", "b.toml"))
    assert node.gateway.keys.names(admin=False) == ["bob"]
    assert "gateway.keys is b.toml now, and was a.toml" in reloaded.changed
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
    assert [sentence.partition(" until")[0] for sentence in reloaded.not_changed] == ["gateway.keys stays a.toml"]
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
        reloaded = await node.reload(broken, ("requests_max = 8", "admit_s = 1"))
        assert (reloaded.not_changed, len(reloaded.refused)) == ((), 1)
        assert reloaded.refused[0].startswith("the file changes nothing: ")
        assert reason in reloaded.refused[0]
        assert reloaded.changed == (f"keys: 1 are known now{next(counts, '')}",)
        assert node.gateway.gate.admit_s == 5
    assert node.gateway.keys.names(admin=False) == ["carol"]


async def test_o_nodes_that_were_drained_are_not_reported_as_starting(front: Front, autojump_clock: MockClock) -> None:
    node = front(ask_launcher=lambda: None)
    assert (await node.reload(text=FILE + NEW)).starts == ("two",)
    assert (await node.reload(text=FILE + NEW)).starts == ("two",), "it may be starting still"
    node.assembly.directory.linked("two", idle_link())
    assert (await node.reload(text=FILE + NEW)).starts == ()


async def test_a_node_that_was_removed_from_the_file_and_added_again_is_new(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front(ask_launcher=lambda: None)
    without = FILE.replace('[node.one]\nlisten = "127.0.0.1:7402"\n', "")
    without = without.replace('node = "one"', 'node = "front"')
    assert (await node.reload(text=without)).starts == ()
    assert (await node.reload()).starts == ("one",)


# What takes a restart ----------------------------------------------------------------------------


async def test_each_key_that_takes_a_restart_is_named_once_by_each_reload(
    front: Front, autojump_clock: MockClock
) -> None:
    node = front()
    changed = (
        ("requests_max = 8", "requests_max = 8\nport = 9000\n[gateway.limits]\nsend_buffer_bytes = 1000"),
        ("[cluster]", '[cluster]\nname = "other"'),
        (f'path = "{TINY}"', f'path = "{TINY}"\nqueue_max = 3'),
        ("127.0.0.1:7401", "127.0.0.1:7411"),
    )
    for _ in range(2):
        reloaded = await node.reload(*changed)
        assert reloaded.changed == ()
        assert set(reloaded.not_changed) == {
            "model tiny stays as it is until this node is started again, though the file has another queue_max",
            *(
                f"{key} stays {old} until this node is started again, though the file says {new}"
                for key, old, new in [
                    ("gateway.port", 8000, 9000),
                    ("gateway.limits.send_buffer_bytes", 262144, 1000),
                    ("cluster.name", "espalier", "other"),
                    ("node.front.listen", "127.0.0.1:7401", "127.0.0.1:7411"),
                ]
            ),
        }
    assert node.gateway.limits.send_buffer_bytes == 262144


async def test_a_changed_engine_is_reported_by_its_node_alone_without_its_values(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    change = ("kv_tokens_max = 4096", "kv_tokens_max = 8192\nslots = 2")
    assert (await front().reload(change)).not_changed == ()
    one = Node(tmp_path, "one")
    assert (await one.reload(change, ("requests_max = 8", "requests_max = 2"))).not_changed == (
        "engine tiny-1 stays as it is until this node is started again, though the file has another slots, kv_tokens_max",
    )


async def test_pools_and_grids_take_a_restart_of_gateways_and_concern_no_other_node(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    text = FILE + pool("all", "tiny-1", priority=5) + one_cell("all")
    assert set((await front().reload(text=text)).not_changed) == {
        "pool.all stays nothing until this node is started again, though the file says tiny-1 (priority 5)",
        "model tiny stays as it is until this node is started again, though the file has another grid.both",
    }
    assert (await Node(tmp_path, "one").reload(text=text)).not_changed == ()


async def test_a_node_that_is_no_longer_in_the_file_reports_that(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Node(tmp_path, "one")
    reloaded = await one.reload(("[node.one]", "[node.uno]"), ('node = "one"', 'node = "uno"'))
    assert reloaded.not_changed[0].startswith("the file changes nothing: there is no node one in ")


async def test_another_secret_takes_a_restart(front: Front, autojump_clock: MockClock) -> None:
    environment = {link_credentials.SECRET: "one-secret-of-the-cluster"}
    node = front(environment=environment)
    environment[link_credentials.SECRET] = "another-one-of-the-cluster"
    assert (await node.reload()).not_changed == (
        "the cluster's secret stays as it was until this node is started again",
    )


async def test_turning_tls_on_takes_a_restart_and_another_certificate_does_not(
    front: Front, tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    lines = 'requests_max = 8\ntls_certificate = "{0}.pem"\ntls_key = "{0}.key"'
    plain, tls = front(), front(text=FILE.replace("requests_max = 8", lines.format("a")))
    reloaded = await plain.reload(("requests_max = 8", lines.format("a")))
    assert (reloaded.changed, len(reloaded.not_changed), plain.gateway.tls) == ((), 2, None)
    before = tls.gateway.tls
    reloaded = await tls.reload(("a.pem", "b.pem"), ("a.key", "b.key"))
    assert (len(reloaded.changed), reloaded.not_changed) == (2, ())
    assert tls.gateway.tls is not before
    assert tls.gateway.certificate == Certificate(tmp_path / "b.pem", tmp_path / "b.key")
    reloaded = await tls.reload(("a.pem", "b.pem"))  # its key does not belong to it
    assert reloaded.refused[0].startswith("the file changes nothing: ")
    assert "gateway.tls_certificate: the certificate " in reloaded.refused[0]
    assert tls.gateway.certificate == Certificate(tmp_path / "b.pem", tmp_path / "b.key")


# Several gateways -----------------------------------------------------------------------------------

TWO_GATEWAYS = FILE.replace('[node.front]\nlisten = "127.0.0.1:7401"', "[node.front]").replace(
    'node = "front"\n', 'node = "front"\nprocesses = 2\nkeys = "a.toml"\n'
)


async def test_a_process_more_divides_the_rates_of_keys_again_and_is_known_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    headers = write_keys(tmp_path / "a.toml", "alice")
    with (tmp_path / "a.toml").open("a") as file:
        file.write("\nrate_per_s = 12\n")
    (tmp_path / "a.toml").chmod(0o600)
    front, one = Node(tmp_path, "front-0", TWO_GATEWAYS), Node(tmp_path, "one", TWO_GATEWAYS)
    assert front.gateway.keys.find(headers).rate_per_s == 6
    assert one.assembly.directory.should_link("front-1")
    assert not front.assembly.directory.should_link("front-1")
    reloaded = await front.reload(("processes = 2", "processes = 3"))
    assert front.gateway.keys.find(headers).rate_per_s == 4
    assert reloaded.not_changed == ()
    assert "gateway.nodes is front-0, front-1, front-2 now, and was front-0, front-1" in reloaded.changed
    assert front.assembly.directory.routers == (3, 0)
    reloaded = await one.reload(("processes = 2", "processes = 3"))
    assert reloaded.not_changed == ()
    assert one.assembly.directory.should_link("front-2")


async def test_a_gateway_that_has_its_port_alone_cannot_begin_to_share_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    headers = write_keys(tmp_path / "a.toml", "alice")
    with (tmp_path / "a.toml").open("a") as file:
        file.write("\nrate_per_s = 12\nburst = 20\n")
    (tmp_path / "a.toml").chmod(0o600)
    (tmp_path / "b.toml").write_text((tmp_path / "a.toml").read_text())
    (tmp_path / "b.toml").chmod(0o600)
    alone = FILE.replace('node = "front"\n', 'nodes = ["front"]\nkeys = "a.toml"\n')
    node = Node(tmp_path, "front", alone)
    more = alone.replace('["front"]', '["front", "two"]') + '[node.two]\nlisten = "127.0.0.1:7403"\n'
    reloaded = await node.reload(text=more)
    assert [sentence for sentence in reloaded.not_changed if sentence.startswith("gateway.nodes")] == [
        "gateway.nodes stays front until this node is started again, though the file says front, two"
    ]
    key = node.gateway.keys.find(headers)
    assert (key.rate_per_s, key.burst_max) == (12, 20), "it still has the whole rate"
    reloaded = await node.reload(text=more.replace('"a.toml"', '"b.toml"'))
    assert any("b.toml" in sentence for sentence in reloaded.changed)
    key = node.gateway.keys.find(headers)
    assert (key.rate_per_s, key.burst_max) == (12, 20), "beside another change, too"


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
