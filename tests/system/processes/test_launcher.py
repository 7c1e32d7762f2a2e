"""The nodes of one machine, run by one command: they start in any order, end together, and are restarted."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.node import MODEL, ROOT, Node, free_ports, short_folder, wait_until
from bench.rig.processes import ProcessEntry
from supervisor.gateway.keys.key_sources import key_file_lines
from tests.rig.launched import (
    SIMULATED,
    THIRD,
    check_exit,
    events_logged,
    lines,
    nodes,
    run_cli,
    running_launcher,
    seen,
    simulated_launcher,
    wait_ready,
)

pytestmark = pytest.mark.realtime

WITHIN_S = 90.0
SOON_S = 20.0  # and an answer, or a drain, would take half a minute or more
TINY = ROOT / "examples" / MODEL
NAMES = ["front", "one", "two"]
LISTENS = re.compile(r'listen = "(.*)"')
SECRET = '[cluster]\nsecret = "secret"\n'
JOINING = """\
[node.far-1]
listen = "127.0.0.1:{ports[0]}"
[node.far-2]
listen = "127.0.0.1:{ports[1]}"
[model.tiny]
path = "{tiny}"
[engine.tiny-far-1]
node = "far-1"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
[engine.tiny-far-2]
node = "far-2"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
"""


@pytest.fixture
def running(folder: Path) -> Iterator[Node]:
    """A launcher with a front and two workers, all ready."""
    with simulated_launcher(folder) as target:
        wait_ready(target)
        target.living()
        yield target


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    """The same for tests that leave all nodes ready."""
    with short_folder() as folder, simulated_launcher(folder) as target:
        wait_ready(target)
        yield target
        target.signal(signal.SIGTERM)
        assert target.wait_exit(WITHIN_S) is not None, target.output()
        assert target.process.returncode == 0


def asked(target: Node) -> tuple[int, Any]:
    """Request four tokens over a connection of its own; return status and number of tokens."""
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        body = json.dumps({"model": MODEL, "prompt": "The oak", "max_tokens": 4, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        usage = json.loads(answer.read()).get("usage", {})
        return answer.status, usage.get("completion_tokens")
    finally:
        connection.close()


def stream(target: Node, tokens: int) -> BackgroundReader:
    """Start a stream of so many tokens; return its reader after its first token."""
    chat = Chat(target.port, chat_body("Tell me a long story", tokens, stream_options={"include_usage": True}))
    running = BackgroundReader(chat.read)
    assert wait_until(lambda: chat.outcome.first_at, WITHIN_S) is not None
    return running


def pids(target: dict[str, ProcessEntry]) -> dict[str, int]:
    """Return the process ids of nodes by their names."""
    return {name: each.pid for name, each in target.items()}


def test_all_nodes_start_and_one_line_reports_it(shared: Node) -> None:
    assert list(nodes(shared)) == NAMES
    assert asked(shared) == (200, 4)
    assert all(text.startswith("{") for text in shared.output().splitlines())
    ready = [line["event"] for line in lines(shared) if line["event"].startswith("Ready: ")]
    assert ready == [f"Ready: http://127.0.0.1:{shared.port}  models: tiny  (Ctrl-C drains and stops)"]
    by = {line.get("node") for line in lines(shared)}
    assert by == {None, *NAMES}  # None: the launcher's own
    assert len({seen.session for seen in nodes(shared).values()}) == 3  # a terminal's Ctrl-C reaches the launcher alone


def test_a_stranger_on_the_machine_neither_asks_nor_drains_a_node(shared: Node, tmp_path: Path) -> None:
    assert [node for node in seen(shared).values() if "tree" not in node] == [], "its own user asks all of them"
    # Of another user a command finds no run folder, and so has only the address at which a node listens.
    code, output = run_cli(shared, "drain", "one", temporary=tmp_path)
    assert (code, "another secret, or none" in output) == (1, True), output
    found = LISTENS.search(file_of(shared))
    assert found is not None
    text = JOINING.format(ports=free_ports(2), tiny=TINY)
    with running_launcher(tmp_path, text, 0, "--join", found[1]) as stranger:
        assert wait_until(lambda: "another secret" in stranger.output(), WITHIN_S) is not None, stranger.output()
        assert seen(shared).keys() == set(NAMES)
        stranger.signal(signal.SIGTERM)
        check_exit(stranger)
    assert asked(shared) == (200, 4)


def test_ctrl_c_lets_streams_finish_and_ends_the_front_first(running: Node) -> None:
    answer = stream(running, 40)
    running.signal(signal.SIGINT)
    outcome = answer.wait(WITHIN_S)
    assert outcome.whole
    assert outcome.usage is not None
    assert outcome.usage["completion_tokens"] == 40
    check_exit(running)
    stopped = [event["node"] for event in events_logged(running, "stopped", exit_code=0) if "node" in event]
    assert (stopped[0], sorted(stopped)) == ("front", NAMES)


def test_a_second_signal_ends_all_without_waiting_for_streams(running: Node) -> None:
    answer = stream(running, 4000)
    running.signal(signal.SIGTERM)
    assert wait_until(lambda: events_logged(running, "draining", node="front"), WITHIN_S) is not None
    running.signal(signal.SIGTERM)
    assert running.wait_exit(SOON_S) is not None, running.output()
    assert running.wait_gone(SOON_S) is not None
    assert (running.process.returncode, running.leftovers()) == (128 + signal.SIGTERM, [])
    outcome = answer.wait(WITHIN_S)
    assert not outcome.whole
    assert outcome.error is not None
    assert outcome.error["code"] == "draining"


@pytest.mark.nightly
def test_a_second_signal_does_not_wait_for_a_stopped_node(running: Node) -> None:
    os.kill(nodes(running)["one"].pid, signal.SIGSTOP)
    running.signal(signal.SIGTERM)
    assert wait_until(lambda: events_logged(running, "stopped", node="front"), WITHIN_S) is not None
    running.signal(signal.SIGTERM)
    assert running.wait_exit(SOON_S) is not None, running.output()
    assert (running.process.returncode, running.leftovers()) == (128 + signal.SIGTERM, [])


def test_kill_9_of_the_launcher_leaves_no_process(running: Node) -> None:
    answer = stream(running, 4000)
    running.signal(signal.SIGKILL)
    assert running.wait_gone(SOON_S) is not None, running.leftovers()
    assert not answer.wait(WITHIN_S).whole


@pytest.mark.nightly
def test_ctrl_c_while_nodes_load_ends_all_of_them(folder: Path) -> None:
    with simulated_launcher(folder) as target:
        assert wait_until(lambda: len(nodes(target)) == 3, WITHIN_S) is not None
        target.signal(signal.SIGINT)
        check_exit(target)
        assert not [line for line in lines(target) if line.get("child_event") == "restarting"]


def test_sighup_is_passed_on_to_the_nodes_and_ends_none(folder: Path) -> None:
    keys = folder / "keys.toml"
    keys.write_text(key_file_lines("alice", "alices-secret-of-32-characters-01"))
    with simulated_launcher(folder, change=("[gateway]", f'[gateway]\nkeys = "{keys}"')) as target:
        wait_ready(target)
        before = {seen.pid for seen in nodes(target).values()}
        target.signal(signal.SIGHUP)
        assert wait_until(lambda: events_logged(target, "read the keys", node="front"), WITHIN_S) is not None, (
            target.output()
        )
        assert {seen.pid for seen in nodes(target).values()} == before
        assert not events_logged(target, "draining")


def blocks_sighup(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGHUP - 1) & 1)


@pytest.mark.nightly
def test_sighup_while_a_launcher_and_its_nodes_start_ends_none_and_is_no_less_a_reload(folder: Path) -> None:
    keys = folder / "keys.toml"
    keys.write_text(key_file_lines("alice", "alices-secret-of-32-characters-01"))
    with simulated_launcher(folder, change=("[gateway]", f'[gateway]\nkeys = "{keys}"')) as target:
        assert wait_until(lambda: blocks_sighup(target.process.pid), WITHIN_S) is not None
        target.signal(signal.SIGHUP)  # before it has read anything
        assert wait_until(lambda: len(nodes(target)) == 3, WITHIN_S) is not None
        before = {seen.pid for seen in nodes(target).values()}
        for pid in before:
            os.kill(pid, signal.SIGHUP)
        target.signal(signal.SIGHUP)
        wait_ready(target)
        assert wait_until(lambda: events_logged(target, "read the keys", node="front"), WITHIN_S) is not None
        assert {seen.pid for seen in nodes(target).values()} == before
        assert not any(blocks_sighup(pid) for pid in (target.process.pid, *before))


# A file that changes ----------------------------------------------------------------------


def rewrite(target: Node, text: str) -> None:
    (target.folder / "cluster.toml").write_text(text)


def file_of(target: Node) -> str:
    return (target.folder / "cluster.toml").read_text()


@pytest.mark.parametrize("how", ["reload", "SIGHUP"])
@pytest.mark.nightly
def test_a_node_that_is_new_in_the_file_is_started_and_serves_and_the_others_stay(how: str, running: Node) -> None:
    before, text = nodes(running), file_of(running)
    rewrite(running, text + THIRD.format(port=free_ports(1)[0]))
    if how == "reload":
        code, output = run_cli(running, "reload")
        sentence = "  node three is known now, and the launcher here starts it"
        assert code == 0, output
        assert output.splitlines() == ["front:", sentence, "one:", sentence, "two:", sentence, "three: it runs now"]
    else:
        running.signal(signal.SIGHUP)

    def serves() -> bool:
        statuses = seen(running)
        return all(
            "tree" in status and all(link["up"] for link in status["links"]) for status in statuses.values()
        ) and any(offer["up"] for offer in statuses["three"]["state"]["offers"])

    assert wait_until(lambda: '"three/tiny-3/engine is ready' in running.output(), WITHIN_S) is not None
    assert wait_until(serves, WITHIN_S, every_s=0.1) is not None, running.output()
    after = nodes(running)
    assert list(after) == ["front", "one", "three", "two"]
    assert {name: after[name].pid for name in NAMES} == {name: before[name].pid for name in NAMES}
    assert run_cli(running, "drain", "one")[0] == run_cli(running, "drain", "two")[0] == 0
    assert asked(running) == (200, 4)  # three alone is left
    running.signal(signal.SIGTERM)
    check_exit(running)


@pytest.mark.nightly
def test_a_new_node_that_cannot_start_affects_no_other_and_is_tried_again(running: Node) -> None:
    before, text = nodes(running), file_of(running)
    third = THIRD.format(port=free_ports(1)[0])
    rewrite(running, text + third.replace("[node.three]", '[node.three]\nlogs = "/dev/null/logs"'))
    running.signal(signal.SIGHUP)
    refused = "node three was not started; the others run on"
    assert wait_until(lambda: events_logged(running, refused), WITHIN_S) is not None, running.output()
    assert events_logged(running, refused)[0]["reason"].startswith(
        "node three did not start: the folder for logs cannot be"
    )
    assert pids(nodes(running)) == pids(before)
    assert asked(running) == (200, 4)
    rewrite(running, text + third)
    running.signal(signal.SIGHUP)
    assert (
        wait_until(
            lambda: [
                line
                for line in lines(running)
                if line.get("child") == "three/process" and line["child_event"] == "started"
            ],
            WITHIN_S,
        )
        is not None
    ), running.output()
    assert len(nodes(running)) == 4


@pytest.mark.nightly
def test_a_node_that_was_removed_from_the_file_runs_until_it_ends_and_is_not_restarted(running: Node) -> None:
    text = file_of(running)
    head, _, rest = text.partition("[node.two]")
    without = head + rest.partition("\n")[2].partition("\n")[2]  # its table, and below the engine's
    rewrite(running, without.partition("[engine.tiny-2]")[0])
    code, output = run_cli(running, "reload")
    assert code == 0, output
    assert "front: nothing has changed" in output
    assert "  the file changes nothing: there is no node two in " in output
    assert (
        wait_until(
            lambda: events_logged(running, "node two is in the file no more, and runs until it is drained"), WITHIN_S
        )
        is not None
    )
    os.kill(nodes(running)["two"].pid, signal.SIGKILL)
    last = "node two has ended, and is not started again: the file has it no more"
    assert wait_until(lambda: events_logged(running, last), WITHIN_S) is not None, running.output()
    assert asked(running) == (200, 4)
    assert list(nodes(running)) == ["front", "one"]
    assert not [line for line in lines(running) if line.get("child_event") == "restarting"]


@pytest.mark.nightly
def test_nodes_of_a_second_file_join_serve_leave_and_join_again(folder: Path) -> None:
    place = folder / "second"
    place.mkdir()
    for each in (folder, place):
        (each / "secret").write_text("a-secret-that-nobody-guesses")
    with simulated_launcher(folder, change=("[cluster]\n", SECRET)) as running:
        wait_ready(running)
        join_twice(running, place)


def join_twice(running: Node, place: Path) -> None:
    """Let the nodes of another file join a launcher's cluster, serve and leave, and join again."""
    before, ports = nodes(running), free_ports(2)
    found = LISTENS.search(file_of(running))
    assert found is not None
    text = SECRET + JOINING.format(ports=ports, tiny=TINY)

    def joined() -> bool:
        state = seen(running)
        names = {"far-1", "far-2"}
        return (
            names <= state.keys()
            and all("tree" in state[name] for name in names)
            and {link["node"] for link in state["front"]["links"] if link["up"]} >= names  # the one that routes
        )

    for _ in range(2):
        with running_launcher(place, text, 0, "--join", found[1]) as second:
            wait_ready(second)
            assert wait_until(joined, WITHIN_S, every_s=0.1) is not None, second.output()
            for name in ("one", "two"):
                os.kill(before[name].pid, signal.SIGSTOP)
            try:
                assert wait_until(lambda: asked(running) == (200, 4), WITHIN_S) is not None
            finally:
                for name in ("one", "two"):
                    os.kill(before[name].pid, signal.SIGCONT)
            second.signal(signal.SIGTERM)
            check_exit(second)
        assert asked(running) == (200, 4)
    assert pids(nodes(running)) == pids(before)
    assert not [line for line in lines(running) if line.get("child_event") == "restarting"]


@pytest.mark.parametrize("name", ["one", "front"])
def test_a_node_that_is_killed_is_restarted_and_requests_continue(name: str, shared: Node) -> None:
    def restarting() -> list[Any]:
        return [line["child"] for line in lines(shared) if line.get("child_event") == "restarting"]

    before, restarted = nodes(shared), restarting()
    os.kill(before[name].pid, signal.SIGKILL)
    if name != "front":  # there is another worker
        assert asked(shared) == (200, 4)

    def again() -> bool:
        with suppress(OSError):
            return len(nodes(shared)) == 3 and shared.get("/ready")[0] == 200 and asked(shared) == (200, 4)
        return False

    assert wait_until(again, WITHIN_S, every_s=0.05) is not None, shared.output()
    after = nodes(shared)
    assert {each for each in NAMES if before[each].pid != after[each].pid} == {name}
    assert wait_until(lambda: len(restarting()) > len(restarted), WITHIN_S) is not None
    assert restarting() == [*restarted, f"{name}/process"]


@pytest.mark.nightly
def test_a_node_that_gets_sigterm_is_not_restarted_and_the_launcher_ends_with_the_last(running: Node) -> None:
    for count, name in enumerate(["one", "front", "two"], start=1):
        os.kill(nodes(running)[name].pid, signal.SIGTERM)
        assert wait_until(lambda: len(nodes(running)) == 3 - count, WITHIN_S) is not None, running.output()  # noqa: B023
    check_exit(running)
    assert not [line for line in lines(running) if line.get("child_event") == "restarting"]


def test_a_node_that_cannot_start_ends_all_with_its_reason(folder: Path) -> None:
    with simulated_launcher(folder, change=("[node.two]", '[node.two]\nlogs = "/dev/null/logs"')) as target:
        check_exit(target, 1)
        assert lines(target)[-1]["event"].startswith(
            "espalier: node two did not start: the folder for logs cannot be made: "
        )


def test_a_port_in_use_is_reported_before_any_node_starts(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [*free_ports(2), taken.getsockname()[1]]
        with running_launcher(folder, SIMULATED.format(ports=ports, tiny=TINY), ports[0]) as target:
            assert target.wait_exit(WITHIN_S) is not None
            assert target.process.returncode == 1
            assert target.output().startswith(f"espalier: port {ports[2]} of 127.0.0.1 cannot be had: ")
            assert target.output().rstrip().endswith("name another as node.two.listen")


@pytest.mark.nightly
def test_a_terminal_shows_what_all_nodes_log_and_one_line_when_they_are_ready(folder: Path) -> None:
    ports = free_ports(3)
    (folder / "cluster.toml").write_text(SIMULATED.format(ports=ports, tiny=TINY))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor", str(folder / "cluster.toml")],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # the last writer has closed it
            while data := os.read(ours, 4096):
                shown.extend(data)

    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        assert wait_until(lambda: b"Ready: " in shown, WITHIN_S) is not None, shown.decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 0
    finally:
        process.kill()
        reader.join(WITHIN_S)
        os.close(ours)
    text = shown.decode()
    assert text.count("Ready: ") == 1
    for wanted in ("front: front/gateway is ready", "one: stopped  exit_code=0", "two/process has stopped"):
        assert wanted in text
    assert '"event"' not in text


@pytest.mark.nightly
def test_a_stopped_node_is_killed_and_restarted_and_its_status_has_the_reason(folder: Path) -> None:
    with simulated_launcher(folder, change=("[node.one]", "[node.one]\nwatchdog_s = 8.0")) as target:
        wait_ready(target)
        before = pids(nodes(target))
        os.kill(before["one"], signal.SIGSTOP)
        assert wait_until(lambda: events_logged(target, "node one hangs, and is ended"), WITHIN_S) is not None

        def is_back() -> bool:
            return pids(nodes(target)).get("one", before["one"]) != before["one"] and "tree" in seen(target)["one"]

        assert wait_until(is_back, WITHIN_S, every_s=0.1) is not None, target.output()
        after = pids(nodes(target))
        assert {name: after[name] for name in ("front", "two")} == {name: before[name] for name in ("front", "two")}
        root = seen(target)["one"]["tree"][0]
        assert (root["restarts"], root["why"]) == (1, "its event loop did not turn for 8 s")
        assert asked(target) == (200, 4)
