"""A node takes over what can change while it runs, and says of the rest that it takes a restart."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.cluster import Leg, NodeState, Offer, Reloaded
from protocol.errors import InternalError, Overloaded, StartFailed
from supervisor import deadlines
from supervisor.cluster import link_credentials, readiness
from supervisor.cluster.directory import Directory
from supervisor.config import load
from supervisor.engines.kinds import load_cluster, read_cluster
from supervisor.files import reading
from supervisor.files.reading import read_inline
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.keys import key_file_lines
from supervisor.gateway.origins import Origins
from supervisor.node.credentials import read_credentials
from supervisor.node.reload import Reloader
from supervisor.threads.file_threads import THREADS_MAX, FileThreads
from tests.rig import certificate
from tests.rig.assembly import built_assembly

TINY = Path(__file__).parents[3] / "examples" / "tiny"
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

[model.tiny]
path = "{TINY}"

[engine.tiny-1]
node = "one"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""


class Node:
    """A node of the file, as it is after the start; what it reads anew is `text`."""

    def __init__(
        self,
        tmp_path: Path,
        name: str = "front",
        text: str = FILE,
        environment=None,
        ask_launcher=None,
        reads=read_inline,
    ) -> None:
        self.file = tmp_path / "cluster.toml"
        self.file.write_text(text)
        self.text = text
        loaded = load_cluster(self.file)
        self.cluster = loaded.cluster
        self.drain_s = None
        environment = environment or {}
        self.assembly, _ = built_assembly(self.cluster, name, read_credentials(self.cluster, name, environment))
        self.reloader = Reloader(name, loaded, self.assembly, environment, self.set_drain_s, ask_launcher, reads)

    def set_drain_s(self, drain_s: float) -> None:
        self.drain_s = drain_s

    async def reload(self, *replacements: tuple[str, str], text=None) -> Reloaded:
        """Change the file from what it was at the start, and read it anew."""
        text = text or self.text
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        self.file.write_text(text)
        return await self.again()

    async def again(self) -> Reloaded:
        """Read the file anew as it is, as a node that runs does."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reloader.run)
            try:
                return await self.reloader.reload()
            finally:
                nursery.cancel_scope.cancel()


@pytest.fixture
def front(tmp_path: Path) -> partial[Node]:
    return partial(Node, tmp_path)


# What can change ------------------------------------------------------------------------------


async def test_a_file_that_says_the_same_changes_nothing(front: partial[Node], autojump_clock: MockClock) -> None:
    told = await front().reload()
    assert (told.changed, told.not_changed) == ((), ())


async def test_the_limits_of_gate_door_and_asking_change_at_once(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node = front()
    told = await node.reload(
        (
            "requests_max = 8\n",
            (
                "requests_max = 4\nwaiting_max = 7\nadmit_s = 2\nfirst_token_s = 3\ntotal_s = 4\nprompt_tokens_max = 99\n"
                'allowed_hosts = ["Here"]\nallowed_origins = ["https://app.example"]\n[gateway.limits]\nwebsocket_lanes_max = 5\nhead_s = 2.5\n'
            ),
        ),
        ("drain_s = 30", "drain_s = 12.5"),
    )
    door, live = node.assembly.gateway, node.assembly.reloadable
    assert (door.gate.requests_max, door.gate.waiting_max, door.gate.admit_s) == (4, 7, 2)
    assert (door.runner.first_token_s, door.runner.total_s, live.prompt_tokens_max) == (3, 4, 99)
    assert door.origins == Origins(frozenset({"here"}), frozenset({"https://app.example"}))
    assert (door.limits.websocket_lanes_max, door.limits.head_s, door.limits.body_s) == (5, 2.5, 30)
    assert node.drain_s == 12.5
    assert told.not_changed == ()
    assert "gateway.requests_max is 4 now, and was 8" in told.changed
    assert "gateway.limits.head_s is 2.5 now, and was 10" in told.changed
    assert "node.front.drain_s is 12.5 now, and was 30" in told.changed
    assert len(told.changed) == 11
    assert await node.again() == Reloaded()  # now it is as the file says


async def test_what_was_changed_goes_back_with_the_file(front: partial[Node], autojump_clock: MockClock) -> None:
    node = front()
    await node.reload(("requests_max = 8", "requests_max = 8\nadmit_s = 2"))
    assert await node.reload(("requests_max = 8", "requests_max = 8\nadmit_s = 3")) == Reloaded(
        ("gateway.admit_s is 3 now, and was 2",)
    )
    assert await node.reload() == Reloaded(("gateway.admit_s is 5 now, and was 3",))
    assert node.assembly.gateway.gate.admit_s == 5
    assert await node.reload() == Reloaded()


async def test_more_places_than_at_the_start_take_a_restart(front: partial[Node], autojump_clock: MockClock) -> None:
    node = front()
    told = await node.reload(("requests_max = 8", "requests_max = 9"))
    assert told.changed == ()
    assert told.not_changed == (
        (
            "gateway.requests_max can only be lowered and raised again, to what it was at the start, "
            "until this node is started again"
        ),
    )
    assert node.assembly.gateway.gate.requests_max == 8


async def test_places_that_were_lowered_raised_too_far_and_lowered_again_are_as_the_file_says(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node, gate = front(), lambda: node.assembly.gateway.gate.requests_max
    await node.reload(("requests_max = 8", "requests_max = 2"))
    await node.reload(("requests_max = 8", "requests_max = 99"))
    assert gate() == 8
    told = await node.reload(("requests_max = 8", "requests_max = 2"))
    assert (gate(), told) == (2, Reloaded(("gateway.requests_max is 2 now, and was 8",)))


async def test_the_limits_of_a_router_change_at_once(front: partial[Node], autojump_clock: MockClock) -> None:
    node = front()
    more = f'path = "{TINY}"\nprefill_tokens_min = 100\nresumes_max = 1\nresume_s = 2.5\nejection.failures_max = 9'
    told = await node.reload((f'path = "{TINY}"', more))
    routing = node.assembly.reloadable.routings["tiny"]
    assert (routing.prefill_tokens_min, routing.limits.resumes_max, routing.limits.resume_s) == (100, 1, 2.5)
    assert routing.limits.ejection.failures_max == 9
    assert routing.limits.resume_tokens_max == 65_536
    assert len(told.changed) == 4
    assert told.not_changed == ()


async def test_the_times_of_links_change_for_those_that_are_made_from_then_on(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node = front()
    told = await node.reload(("heartbeat_s = 1.0", "heartbeat_s = 0.5\nretry_max_s = 1"))
    assert (node.assembly.links.section.heartbeat_s, node.assembly.links.section.retry_max_s) == (0.5, 1)
    assert told.changed == ("cluster.heartbeat_s is 0.5 now, and was 1", "cluster.retry_max_s is 1 now, and was 5")


NEW = """
[node.two]
listen = "127.0.0.1:7403"
[engine.tiny-2]
node = "two"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""


async def test_a_new_node_is_known_with_its_engines_and_whoever_dials_is_woken(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node = front()
    woken = []

    async def wait() -> None:
        await node.assembly.directory.wait_changed()
        woken.append(sorted(node.assembly.directory.nodes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        told = await node.reload(text=FILE + NEW)
        assert told == Reloaded(("node two is known now",))
        await wait_all_tasks_blocked()
    assert woken == [["one", "two"]]
    assert node.assembly.directory.nodes["two"].address == "127.0.0.1:7403"
    assert [offer.name for offer in node.assembly.directory.offers("tiny")] == ["tiny-1", "tiny-2"]
    assert await node.reload(text=FILE + NEW) == Reloaded()
    gone = "node two stays known as it was until this node is started again; drain it if it is to go"
    assert await node.reload() == Reloaded((), (gone,))


async def test_a_node_that_moves_is_dialed_where_the_file_says_from_then_on(
    front: partial[Node], autojump_clock: MockClock
) -> None:
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
    deaf = moved.replace('listen = "127.0.0.1:7413"\n', "")
    assert (await node.reload(text=deaf)).not_changed == (
        "node.two.listen stays 127.0.0.1:7413 until this node is started again, though the file says nothing",
    )


async def test_a_launcher_is_asked_each_time_and_starts_nodes_of_its_own_host_that_are_new(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    asked = []
    node = front(ask_launcher=partial(asked.append, "reload"))
    far = NEW.replace("two", "far").replace("tiny-2", "tiny-3").replace("7403", "7404")
    far = far.replace('listen = "127.0.0.1:7404"', 'listen = "127.0.0.1:7404"\nhost = "10.0.0.9"')
    assert await node.reload(text=FILE + NEW + far) == Reloaded(
        ("node two is known now, and the launcher here starts it", "node far is known now"), (), ("two",)
    )
    assert await node.reload(text=FILE + NEW + far) == Reloaded(starts=("two",))  # nobody reaches them yet
    assert (await node.reload(text="nonsense")).refused[0].startswith("the file changes nothing: ")
    assert asked == ["reload"] * 3


async def test_d9_names_are_asked_for_of_the_next_link_where_tls_is_spoken(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key", "-nodes", names="subjectAltName=DNS:front,DNS:one")
    certificate.make(tmp_path / "b.pem", tmp_path / "b.key", "-nodes", names="subjectAltName=DNS:one")
    shown = 'heartbeat_s = 1.0\ntls_certificate = "a.pem"\ntls_key = "a.key"\ntls_authority = "a.pem"\n'
    plain, node = front(), front(text=FILE.replace("heartbeat_s = 1.0\n", shown))
    strict = (shown, f'{shown}tls_names = "nodes"\n')
    told = await plain.reload(("heartbeat_s = 1.0\n", strict[1]))
    assert told.not_changed[-1].startswith("cluster.tls_names stays hosts until")
    assert not plain.assembly.links.section.verifies_node_names
    told = await node.reload(strict)
    assert told.changed == ("cluster.tls_names is nodes now, and was hosts",)
    assert node.assembly.links.section.verifies_node_names
    told = await node.reload(strict, ("a.pem", "b.pem"), ("a.key", "b.key"))
    assert "the file changes nothing: b.pem names DNS:one, and must name node front" in told.refused[0]
    assert node.assembly.links.tls.names == {"DNS:front", "DNS:one"}


async def test_keys_from_another_file_let_others_in(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "a.toml").write_text(key_file_lines("alice", "alices-secret-of-32-characters-01"))
    (tmp_path / "b.toml").write_text(key_file_lines("bob", "bobs-secret-of-32-characters-0002"))
    node = front(text=FILE.replace("requests_max", 'keys = "a.toml"\nrequests_max'))
    told = await node.reload(("a.toml", "b.toml"))
    assert node.assembly.gateway.keys.names(admin=False) == ["bob"]
    assert "gateway.keys is b.toml now, and was a.toml" in told.changed
    assert told.changed[-1] == "keys: 1 are known now"


async def test_a_file_that_could_not_be_started_with_changes_nothing_but_the_keys(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "a.toml").write_text(key_file_lines("alice", "alices-secret-of-32-characters-01"))
    node = front(text=FILE.replace("requests_max", 'keys = "a.toml"\nrequests_max'))
    (tmp_path / "a.toml").write_text(key_file_lines("carol", "carols-secret-of-32-characters-01"))
    for broken, why in [
        (("heartbeat_s = 1.0", "heartbeat_s = "), "is not TOML"),
        (("heartbeat_s = 1.0", "heartbeat_s = 2.0"), "cluster.silent_s: must be at least two beats of 2 s"),
        (("[node.front]", "[node.operator-1]\n[node.front]"), "is an operator's name"),
        (('keys = "a.toml"', 'host = "0.0.0.0"\nnames = ["x"]'), "is not loopback, so clients need keys"),
        (("127.0.0.1:7401", "0.0.0.0:7401"), "links need a secret"),
    ]:
        told = await node.reload(broken, ("requests_max = 8", "admit_s = 1"))
        assert (told.not_changed, len(told.refused)) == ((), 1)
        assert told.refused[0].startswith("the file changes nothing: ")
        assert why in told.refused[0]
        assert told.changed == ("keys: 1 are known now",)
        assert node.assembly.gateway.gate.admit_s == 5
    assert node.assembly.gateway.keys.names(admin=False) == ["carol"]


# What is slow -------------------------------------------------------------------------------


@pytest.fixture
def dead_disk_after(monkeypatch: pytest.MonkeyPatch):
    """Return what lets the disk of the node's file die; it answers again when the test is over."""
    reader, writer = os.pipe()

    def hang(path) -> None:
        reading.note(path)
        os.read(reader, 1)
        raise StartFailed("the disk answers again")

    yield partial(monkeypatch.setattr, load, "_read_text", hang)
    os.close(writer)


async def test_c1_a_file_that_does_not_answer_stalls_no_turn_and_keeps_no_key_from_being_taken_away(
    front: partial[Node], tmp_path: Path, dead_disk_after
) -> None:
    (tmp_path / "a.toml").write_text(key_file_lines("alice", "alices-secret-of-32-characters-01"))
    threads, turns = FileThreads(within_s=0.5), []

    async def reads(function):
        return await (threads if function == node.reloader._read else read_inline)(function)

    node = front(text=FILE.replace("requests_max", 'keys = "a.toml"\nrequests_max'), reads=reads)
    alice = node.assembly.gateway.keys.find([(b"authorization", b"Bearer alices-secret-of-32-characters-01")])
    (tmp_path / "a.toml").write_text(key_file_lines("bob", "bobs-secret-of-32-characters-0002"))
    dead_disk_after()

    async def serve() -> None:
        while True:
            await trio.sleep(0.01)
            turns.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        told = await node.again()
        nursery.cancel_scope.cancel()
    assert len(turns) >= 20
    assert told.refused == (f"the file changes nothing: {node.file} does not answer: nothing was read within 0.5 s",)
    assert alice.revoked


async def test_c1_threads_that_wait_for_a_dead_disk_are_few_and_whoever_finds_none_is_told(
    dead_disk_after, tmp_path: Path
) -> None:
    dead_disk_after()
    threads = FileThreads(within_s=0.2)  # of real time, as threads take
    for _ in range(THREADS_MAX):
        with pytest.raises(StartFailed, match=r"/file does not answer: nothing was read within 0.2 s"):
            await threads(partial(read_cluster, tmp_path / "file"))
    with pytest.raises(StartFailed, match="files that were asked for earlier do not answer"):
        await threads(partial(read_cluster, tmp_path / "file"))


async def test_c1_what_is_applied_has_been_read_before(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        (tmp_path / f"{name}.toml").write_text(key_file_lines(name, f"{name}s-secret-of-32-characters-0001"))
    lines = 'requests_max = 8\nkeys = "{0}.toml"\ntls_certificate = "{0}.pem"\ntls_key = "{0}.key"'

    async def reads(function):
        with reading.recording_paths() as noted:
            result = await read_inline(function)
        counts.append(len(noted))
        return result

    counts = []
    node = front(text=FILE.replace("requests_max = 8", lines.format("a")), reads=reads)
    with reading.recording_paths() as on_the_loop:
        told = await node.reload((lines.format("a"), lines.format("b")))
    assert (on_the_loop, len(told.changed), len(counts)) == ([], 4, 3)
    assert all(counts)
    assert node.assembly.gateway.keys.names(admin=False) == ["b"]


@pytest.fixture
def slow(front: partial[Node]):
    """A node whose files take a second each; `most` is how many were ever read at the same time."""

    async def reads(function):
        made.read.append(function)
        made.at_once += 1
        made.most = max(made.most, made.at_once)
        await trio.sleep(1)
        made.at_once -= 1
        return function()

    def make(**given):
        nonlocal made
        made = front(reads=reads, **given)
        made.read, made.at_once, made.most = [], 0, 0
        return made

    made: Any = None
    return make


async def test_c1_reloads_come_one_after_the_other_and_those_who_wait_share_the_next(
    slow, autojump_clock: MockClock
) -> None:
    node, began, told = slow(), trio.current_time(), []

    async def ask() -> None:
        told.append((await node.reloader.reload(), trio.current_time() - began))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.reloader.run)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        node.file.write_text(FILE.replace("drain_s = 30", "drain_s = 3"))
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert (node.most, len(node.read)) == (1, 4)  # each reads the file and the keys
    assert [round(after) for _, after in told] == [2, 4, 4, 4]
    assert len({id(each) for each, _ in told[1:]}) == 1


async def test_c1_a_reload_ends_what_it_has_begun_though_whoever_asked_has_left(
    slow, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The file was applied, its new keys were not, and the launcher heard nothing of new nodes."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(key_file_lines(name, f"{name}s-secret-of-32-characters-0001"))
    asked = []
    keyed = 'requests_max = 8\nkeys = "{0}.toml"'
    node = slow(text=FILE.replace("requests_max = 8", keyed.format("a")))
    node.reloader.ask_launcher = lambda: asked.append("start what is new")
    node.file.write_text(node.text.replace(keyed.format("a"), keyed.format("b").replace("8", "4")))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.reloader.run)
        with trio.move_on_after(0.5):
            await node.reloader.reload()
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert node.assembly.gateway.gate.requests_max == 4
    assert (node.assembly.gateway.keys.names(admin=False), asked) == (["b"], ["start what is new"])


async def test_o_a_reload_that_waits_for_a_disk_holds_up_no_shutdown(slow, autojump_clock: MockClock) -> None:
    """What had been applied was followed by the keys whatever else was to end: for 11 s."""
    node, asked = slow(), []
    node.reloader.ask_launcher = lambda: asked.append("start what is new")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.reloader.run)
        nursery.start_soon(node.reloader.reload)
        await trio.sleep(1.5)
        assert len(node.read) == 2  # it reads the keys
        ends = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - ends < 0.1
    assert (len(node.read), asked) == (2, [])


async def test_a_bug_in_a_reload_is_told_to_whoever_asked_and_the_next_is_none_the_worse(
    front: partial[Node], caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    node = front()
    node.reloader.set_drain_s = None
    node.file.write_text(FILE.replace("drain_s = 30", "drain_s = 3"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.reloader.run)
        with pytest.raises(InternalError):
            await node.reloader.reload()
        assert "a bug ended a reload" in caplog.messages
        node.file.write_text(FILE)
        assert await node.reloader.reload() == Reloaded()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("waits", ["first", "behind another"])
async def test_o_no_reload_takes_longer_than_whoever_asked_waits(
    front: partial[Node], tmp_path: Path, waits: str, autojump_clock: MockClock
) -> None:
    """A disk that hangs took 30 s of a reload, and whoever had asked heard after 25 s that there was no answer."""
    certificate.make(tmp_path / "a.pem", tmp_path / "a.key")
    lines = 'requests_max = 8\ntls_certificate = "a.pem"\ntls_key = "a.key"'

    async def hangs(function):
        await trio.sleep(deadlines.FILE_READ_TIMEOUT_S)
        raise StartFailed("the disk does not answer")

    node = front(text=FILE.replace("requests_max = 8", lines), reads=hangs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.reloader.run)
        if waits != "first":
            nursery.start_soon(node.reloader.reload)
            await wait_all_tasks_blocked()
        began = trio.current_time()
        told = await node.reloader.reload()
        nursery.cancel_scope.cancel()
    took_s = trio.current_time() - began
    assert len(told.refused) == 3  # the file, the keys, the certificate
    most_s = deadlines.RELOAD_MAX_S if waits == "first" else deadlines.RELOAD_QUEUED_MAX_S
    assert 0.8 * most_s < took_s <= most_s
    assert took_s + deadlines.WAY_S <= deadlines.RELOAD_ANSWER_TIMEOUT_S


async def test_o_nodes_that_were_drained_are_not_said_to_start(front: partial[Node], autojump_clock: MockClock) -> None:
    """Whoever reloaded waited 20 s for two nodes that had been drained when a third one came."""
    node = front(ask_launcher=lambda: None)
    assert (await node.reload(text=FILE + NEW)).starts == ("two",)
    assert (await node.reload(text=FILE + NEW)).starts == ("two",), "it may still be starting, or be tried again"
    node.assembly.directory.linked("two", SimpleNamespace(peer=None))
    assert (await node.reload(text=FILE + NEW)).starts == ()


async def test_a_node_that_was_taken_out_of_the_file_and_put_back_is_new(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node = front(ask_launcher=lambda: None)
    without = FILE.replace('[node.one]\nlisten = "127.0.0.1:7402"\n', "")
    without = without.replace('node = "one"', 'node = "front"')
    assert (await node.reload(text=without)).starts == ()
    assert (await node.reload()).starts == ("one",)


# What cannot ----------------------------------------------------------------------------------


async def test_each_thing_that_takes_a_restart_is_named_once_and_again_the_next_time(
    front: partial[Node], autojump_clock: MockClock
) -> None:
    node = front()
    changed = (
        ("requests_max = 8", "requests_max = 8\nport = 9000\n[gateway.limits]\nsend_buffer_bytes = 1000"),
        ("[cluster]", '[cluster]\nname = "other"'),
        (f'path = "{TINY}"', f'path = "{TINY}"\nqueue_max = 3'),
        ("127.0.0.1:7401", "127.0.0.1:7411"),
    )
    for _ in range(2):
        told = await node.reload(*changed)
        assert told.changed == ()
        assert set(told.not_changed) == {
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
    assert node.assembly.gateway.limits.send_buffer_bytes == 262144


async def test_an_engine_is_its_own_nodes_affair_and_its_settings_are_not_told(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    change = ("kv_tokens_max = 4096", "kv_tokens_max = 8192\nslots = 2")
    assert (await front().reload(change)).not_changed == ()
    one = Node(tmp_path, "one")
    assert (await one.reload(change, ("requests_max = 8", "requests_max = 2"))).not_changed == (
        "engine tiny-1 stays as it is until this node is started again, though the file has another slots, kv_tokens_max",
    )


async def test_a_node_that_has_gone_from_the_file_says_so_itself(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Node(tmp_path, "one")
    told = await one.reload(("[node.one]", "[node.uno]"), ('node = "one"', 'node = "uno"'))
    assert told.not_changed[0].startswith("the file changes nothing: there is no node one in ")


async def test_another_secret_takes_a_restart(front: partial[Node], autojump_clock: MockClock) -> None:
    environment = {link_credentials.SECRET: "one-secret-of-the-cluster"}
    node = front(environment=environment)
    environment[link_credentials.SECRET] = "another-one-of-the-cluster"
    assert (await node.reload()).not_changed == (
        "the cluster's secret stays as it was until this node is started again",
    )


async def test_to_begin_to_speak_tls_takes_a_restart_and_another_certificate_does_not(
    front: partial[Node], tmp_path: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        certificate.make(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    lines = 'requests_max = 8\ntls_certificate = "{0}.pem"\ntls_key = "{0}.key"'
    plain, tls = front(), front(text=FILE.replace("requests_max = 8", lines.format("a")))
    told = await plain.reload(("requests_max = 8", lines.format("a")))
    assert (told.changed, len(told.not_changed), plain.assembly.gateway.tls) == ((), 2, None)
    before = tls.assembly.gateway.tls
    told = await tls.reload(("a.pem", "b.pem"), ("a.key", "b.key"))
    assert (len(told.changed), told.not_changed) == (2, ())
    assert tls.assembly.gateway.tls is not before
    assert tls.assembly.gateway.certificate.certificate.name == "b.pem"
    told = await tls.reload(("a.pem", "b.pem"))  # its key does not belong to it
    assert told.refused[0].startswith("the file changes nothing: ")
    assert "gateway.tls_certificate: the certificate " in told.refused[0]
    assert tls.assembly.gateway.certificate.key.name == "b.key"


# The gate, and who is told ----------------------------------------------------------------------


async def test_a_gate_that_gets_wider_lets_in_as_many_of_its_line_as_it_has_room_for(autojump_clock: MockClock) -> None:
    gate = AdmissionGate(1, 5.0, 10, lambda: None)
    inside = []

    async def enter(number: int) -> None:
        async with gate.admitted():
            inside.append(number)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(enter, number)
            await wait_all_tasks_blocked()
        assert (gate.inside, gate.waiting) == (1, 4)
        gate.change(3, 5.0, 10)
        assert (gate.inside, gate.waiting) == (3, 2)
        await wait_all_tasks_blocked()
        assert sorted(inside) == [0, 1, 2]
        gate.change(1, 0.5, 1)
        assert (gate.inside, gate.waiting) == (3, 2)  # nobody is turned out
        with pytest.raises(Overloaded):
            async with gate.admitted():
                raise AssertionError
        await trio.sleep(0.9)
    assert sorted(inside) == [0, 1, 2, 3, 4]
    assert (gate.inside, gate.waiting) == (0, 0)


def test_ready_says_which_engine_is_on_a_node_that_drains() -> None:
    directory = Directory("front")
    offer = Offer("tiny-1", "tiny", Leg.BOTH, 4, up=True)
    directory.configure("one", None, [offer])
    directory.merge_state("one", NodeState((offer,)))
    assert readiness.unready(directory, ["tiny"]) is None
    directory.merge_state("one", NodeState((offer,), draining=True))
    assert readiness.unready(directory, ["tiny"]) == "engine tiny-1 is on a node that drains"
    directory.configure("two", None)
    directory.merge_state("two", NodeState((Offer("tiny-2", "tiny", Leg.BOTH, 4, up=True),)))
    assert readiness.unready(directory, ["tiny"]) is None
