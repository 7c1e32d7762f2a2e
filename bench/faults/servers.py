"""The ends of this server and of others under streams, observed in the same way, from outside.

`resume` kills a process of one of two workers, and measures the gap and the exactness of each stream. `shutdown` sends
SIGTERM, as a service manager does, or SIGKILL to every root process of a server, and measures the end of each process,
the lost answers and the remains.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from attrs import evolve

from bench.cost.groups import APART, groups
from bench.faults.scenario import Run, check
from bench.peers.peer import ENVIRONMENTS, Command, Peer, Setup
from bench.peers.running import NotReady, NotStarted, Running, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder, wait_until
from bench.rig.processes import ProcessEntry
from bench.rig.prompts import OAK_PROMPT, PROMPTS, STORY_PROMPT
from bench.rig.watched_answers import WatchedAnswer, endings, wait_begun, wait_ended, whole_texts

SLOTS = 16
STREAMED = (STORY_PROMPT, *PROMPTS[:3])
TOKENS, TOKENS_AT_END = 400, 300  # of each answer; at the end of a server as many as its drain is long enough for
PIECES = 20  # of each stream before anything happens
ANSWERS_WITHIN_S = 90.0
STOPPED_S, STOPPED_MAX_S = 0.6, 2.0  # before a death, which shows the streams that are on the process
MOVED = 10  # pieces of each stream that goes on meanwhile: by then one without any is not merely late
SETTLE_S = 0.2  # for the tokens that are on their way
MIGRATIONS = "3"  # of a request that Dynamo allows; by default it allows none
POLL_S = 0.1
LIMIT_S, KILLED_LIMIT_S = 30.0, 10.0  # of a shutdown
ENDINGS = (
    "Exact: the whole text; error: the client was told so; cut: the connection ended without a word; cut, looks whole: "
    "a finish reason, but not all of the text."
)
RESUME_COLUMNS = (
    *("server", "killed", "streams on it", "next token s", "they ended", "s, without another token"),
    "the other streams",
)
RESUME_NOTE = (
    "On it: no token came while the process was stopped before it was killed: for 0.6 s, and until each stream that "
    "went on had ten tokens, or for 2 s more. Times from the kill. "
    f"{ENDINGS}"
)
SHUTDOWN_COLUMNS = (
    *("server", "scene", "gone after s", "after the last answer s", "exit codes", "answers", "left behind"),
)
SHUTDOWN_NOTE = (
    "Eight streams in their middle and an answer in one piece, where answers run. Gone: until no process lived, of the "
    f"server and of all that it had started. {ENDINGS}"
)

Scene = Callable[[Run, Running], None]


# Servers ---------------------------------------------------------------------------------


def each_server(run: Run, measure: Callable[[Run, Peer], None]) -> None:
    """Measure each chosen server; one that is not installed, or does not start, is named."""
    for name in run.options.servers:
        try:
            measure(run, SERVERS[name])
        except NotStarted as error:
            run.notes.append(f"{SERVERS[name].title} was not measured: {error}")


@contextmanager
def fresh(peer: Peer, *, slots: int, workers: int = 1) -> Iterator[Running]:
    """Start a server in a folder of its own, and end it; raises `NotStarted`."""
    with short_folder() as folder:
        setup = Setup(folder=folder, port=free_port(), slots=slots, workers=workers, environments=ENVIRONMENTS)
        with started(peer, setup) as running:
            yield running


def in_each_scene(run: Run, peer: Peer, scenes: dict[str, Scene], workers: int = 1) -> None:
    """Try the chosen scenes, each on a new server; raises `NotReady` if none of them added a row."""
    rows = len(run.rows)
    for name in run.chosen(scenes):
        for _ in range(run.options.tries):
            with fresh(peer, slots=SLOTS, workers=workers) as running:
                try:
                    scenes[name](run, running)
                except (RuntimeError, AssertionError, OSError) as error:
                    run.notes.append(f"{peer.title}: {name}: {error}")
    if len(run.rows) == rows:
        raise NotReady("nothing could be done to it while it answered")


@contextmanager
def streams(run: Run, running: Running, *, one_piece: bool) -> Iterator[tuple[list[WatchedAnswer], dict[str, str]]]:
    """Run eight streams past their beginnings, perhaps an answer in one piece; yield the answers, and whole texts."""
    port, tokens = running.setup.port, TOKENS_AT_END if one_piece else TOKENS
    whole = whole_texts(port, STREAMED, tokens, ANSWERS_WITHIN_S)
    answers = [WatchedAnswer(port, prompt, tokens) for prompt in STREAMED * 2]
    begin = tuple(answers)
    if one_piece:
        answers.append(WatchedAnswer(port, OAK_PROMPT, tokens, stream=False))
    try:
        begun = wait_begun(begin, PIECES, ANSWERS_WITHIN_S) and not any(answer.ended for answer in answers)
        check(begun, "the answers did not begin, or ended too early")
        yield answers, whole
    finally:
        for answer in answers:
            answer.leave()
        errors = {str(answer.outcome.error)[:160] for answer in answers if answer.outcome.error is not None}
        run.notes += [f"{running.peer.title}: {error}" for error in sorted(errors)]


# The death of a process of a worker ------------------------------------------------------


def scheduler(processes: Sequence[ProcessEntry]) -> int | None:
    """Return the first process that computes tokens."""
    return next((pid for pid, group in groups(processes).items() if group == APART), None)


def parent(processes: Sequence[ProcessEntry]) -> int | None:
    """Return the process that started it: an engine host, a worker, a server."""
    return next((entry.parent for entry in processes if entry.pid == scheduler(processes)), None)


def node(processes: Sequence[ProcessEntry]) -> int | None:
    """Return a node that has an engine."""
    return next((pid for pid, group in groups(processes).items() if group.startswith("node worker-")), None)


def killed(name: str, victim: Callable[[Sequence[ProcessEntry]], int | None], run: Run, running: Running) -> None:
    """Kill a process under streams, and add what became of them."""
    pid = victim(running.processes())
    check(pid is not None, "it has no such process")
    assert pid is not None
    with streams(run, running, one_piece=False) as (answers, whole):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SETTLE_S)
        settled_at = time.perf_counter()
        time.sleep(STOPPED_S - SETTLE_S)
        wait_until(lambda: distinguishable(_moved(answers, settled_at)), STOPPED_MAX_S)
        silent = [answer for answer in answers if not answer.ended and answer.next_after(settled_at) is None]
        since = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        wait_ended(answers, ANSWERS_WITHIN_S)
        nexts = {answer: answer.next_after(since) for answer in silent}
        run.row(
            running.peer.title,
            name,
            f"{len(silent)} of {len(answers)}",
            [next_s for next_s in nexts.values() if next_s is not None],
            endings(silent, whole),
            [answer.outcome.ended_at - since for answer in silent if nexts[answer] is None and answer.ended],
            endings((answer for answer in answers if answer not in silent), whole),
        )


def _moved(answers: Sequence[WatchedAnswer], since: float) -> list[int]:
    """Return how many pieces each stream has had; one that has ended could have no more."""
    return [MOVED if answer.ended else answer.pieces_after(since) for answer in answers]


def distinguishable(moved: Sequence[int]) -> bool:
    """Whether the moving streams have moved so far that the others must be stopped.

    A busy machine delays all streams: by time alone late streams would count as stopped.
    """
    going = [pieces for pieces in moved if pieces]
    return bool(going) and min(going) >= MOVED


VICTIMS: dict[str, Scene] = {
    name: partial(killed, name, victim)
    for name, victim in {
        "the engine's scheduler": scheduler,
        "the scheduler's parent": parent,
        "the engine's node": node,
    }.items()
}


def with_migrations(peer: Peer) -> Peer:
    """Return a server all of whose processes may migrate requests."""

    def commands(setup: Setup) -> list[Command]:
        more = {"DYN_MIGRATION_LIMIT": MIGRATIONS}
        return [evolve(command, variables={**command.variables, **more}) for command in peer.commands(setup)]

    return evolve(peer, commands=commands, title=f"{peer.title}, {MIGRATIONS} migrations")


def resume(run: Run) -> None:
    """Kill each process that a server has, on a new server each time."""

    def measured(run: Run, peer: Peer) -> None:
        if peer.name.startswith("dynamo"):  # it migrates no request by default
            peer = with_migrations(peer)
        in_each_scene(run, peer, VICTIMS, min(2, peer.workers_max))

    each_server(run, measured)


# The end of a server ---------------------------------------------------------------------


def idle(run: Run, running: Running) -> None:
    """Send SIGTERM to a server that has answered and has nothing to do."""
    whole_texts(running.setup.port, [OAK_PROMPT], 8, ANSWERS_WITHIN_S)
    end(run, running, "SIGTERM, idle", signal.SIGTERM, [], {})


def answering(name: str, number: signal.Signals, run: Run, running: Running) -> None:
    """Send a signal while answers run."""
    with streams(run, running, one_piece=True) as (answers, whole):
        end(run, running, name, number, answers, whole)


def end(
    run: Run,
    running: Running,
    name: str,
    number: signal.Signals,
    answers: Sequence[WatchedAnswer],
    whole: dict[str, str],
) -> None:
    """Send the signal, and add what happened."""
    limit_s = LIMIT_S if number == signal.SIGTERM else KILLED_LIMIT_S
    running.processes()
    since = time.perf_counter()
    for process in running.roots.values():
        process.send_signal(number)
    gone = wait_until(lambda: len(running.ended()) == len(running.roots) and not running.processes(), limit_s, POLL_S)
    gone_at = time.perf_counter()
    wait_ended(answers, 1.0)
    last_at = max((answer.outcome.ended_at for answer in answers if answer.ended), default=None)
    run.row(
        running.peer.title,
        name,
        f">= {limit_s:g}" if gone is None else gone_at - since,
        None if gone is None or last_at is None else gone_at - last_at,
        " ".join(str(process.poll()) for process in running.roots.values()),
        endings(answers, whole) if answers else "",
        ", ".join(_left(running)) or "nothing",
    )


def _left(running: Running) -> Iterator[str]:
    files = [path for path in (running.setup.folder / "t").rglob("*") if not path.is_dir()]
    kinds: dict[str, Sequence[object]]
    kinds = {"processes": running.processes(), "names of shared memory": running.shared_memory(), "files": files}
    yield from (f"{len(found)} {what}" for what, found in kinds.items() if found)
    with closing(socket.socket()) as probe:
        if probe.connect_ex(("127.0.0.1", running.setup.port)) == 0:
            yield "its port"


ENDS: dict[str, Scene] = {
    "SIGTERM, idle": idle,
    "SIGTERM, answers run": partial(answering, "SIGTERM, answers run", signal.SIGTERM),
    "kill -9, answers run": partial(answering, "kill -9, answers run", signal.SIGKILL),
}


def shutdown(run: Run) -> None:
    """End a new server in each scene."""
    each_server(run, partial(in_each_scene, scenes=ENDS))
