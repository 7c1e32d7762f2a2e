"""`python -m bench shutdown`: stop a server, idle or in the middle of answers: how long, what is lost, what is left?"""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from attrs import field, frozen

from bench.load.values import count, positive
from bench.peers import comparison
from bench.peers.peer import Peer
from bench.peers.running import NotReady, Running
from bench.rig.clients import Chat, chat_body
from bench.rig.node import wait_until
from bench.rig.prompts import OAK_PROMPT, PROMPTS, STORY_PROMPT
from bench.rig.result import Cell, Table
from bench.rig.watched_answers import WatchedAnswer, ending_words, endings, wait_begun, wait_ended, whole_texts

DESCRIPTION = """\
Every process that a server was started by gets SIGTERM, as from a service manager, or SIGKILL: until when does each
process of it live, which answers are lost, what is left behind?"""
DEFAULT = ("espalier", "sglang", "dynamo", "smg")
SLOTS = 16
STREAMS_A_PROMPT = 2
TOKENS = 300
PIECES = 20  # of each stream before the signal
ANSWERS_WITHIN_S = 60.0
NEW_AFTER_S = 0.2
POLL_S = 0.1
KILLED_LIMIT_S = 10.0
NOTE = (
    "Eight streams in their middle and an answer in one piece, where answers run. Gone: until no process lived, of the "
    "server and of all that it had started. Exact: the whole text; error: the client was told so; cut: the connection "
    "ended without a word; cut, looks whole: a finish reason, but not all of the text. New request: sent 0.2 s after "
    "the signal."
)


@frozen
class Ended:
    """The result of one stopped server."""

    scene: str
    gone_s: float | None  # None: something lived at the limit
    after_answers_s: float | None  # from the last answer's end until then
    codes: dict[str, int | None]  # by the names of what was started; negative: the signal that killed it
    endings: dict[str, int]
    errors: list[str]  # the first words of different errors
    new_request: str
    processes: list[str]  # left behind
    shared_memory: list[str]
    files: int  # temporary ones
    port_open: bool


@frozen
class Findings:
    """The results of one server."""

    endings: list[Ended]
    notes: list[str] = field(factory=list)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    comparison.add(parser, DEFAULT)
    parser.add_argument("--tries", type=count, default=1, help="of each scene, each on a new server; default: 1")
    parser.add_argument("--limit-s", type=positive, default=30.0, help="of a shutdown; default: 30")
    parser.add_argument("--scenes", default="", help="part of their names")


def main(_parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure each server, and print one table; return 1 if none could be."""
    return comparison.compare(
        arguments,
        words,
        several=comparison.peers(arguments),
        measured=measured,
        title="The end of a server: how long, what is lost, what is left",
        tables=lambda results: [table(results, arguments.limit_s)],
    )


def measured(peer: Peer, arguments: argparse.Namespace) -> Findings:
    """End a new server in each scene."""
    findings = Findings([])
    for name in (name for name in SCENES if arguments.scenes in name):
        for _ in range(arguments.tries):
            with comparison.fresh(peer, arguments.environments, slots=SLOTS) as running:
                try:
                    ended = SCENES[name](running, arguments.limit_s)
                except (RuntimeError, OSError) as error:
                    findings.notes.append(f"{name}: {error}")
                    continue
                findings.endings.append(ended)
                comparison.progress(f"{peer.title}: {ended}")
    if not findings.endings:
        raise NotReady("; ".join(findings.notes))
    return findings


# The scenes -------------------------------------------------------------------------------


def idle(running: Running, limit_s: float) -> Ended:
    """Send SIGTERM to a server that has answered and has nothing to do."""
    whole_texts(running.setup.port, [OAK_PROMPT], 8, ANSWERS_WITHIN_S)
    return _end("SIGTERM, idle", running, signal.SIGTERM, limit_s)


def answering(name: str, number: signal.Signals, running: Running, limit_s: float) -> Ended:
    """Send a signal while answers run."""
    port, prompts = running.setup.port, [STORY_PROMPT, *PROMPTS[:3]]
    whole = whole_texts(port, prompts, TOKENS, ANSWERS_WITHIN_S)
    streams = [WatchedAnswer(port, prompt, TOKENS) for prompt in prompts * STREAMS_A_PROMPT]
    one_piece = WatchedAnswer(port, OAK_PROMPT, TOKENS, stream=False)
    answers = [*streams, one_piece]
    try:
        if not wait_begun(streams, PIECES, ANSWERS_WITHIN_S) or one_piece.ended:
            raise RuntimeError("the answers did not begin, or ended too early")
        return _end(name, running, number, limit_s, answers, whole)
    finally:
        for answer in answers:
            answer.leave()


def _end(
    scene: str,
    running: Running,
    number: signal.Signals,
    limit_s: float,
    answers: Sequence[WatchedAnswer] = (),
    whole: dict[str, str] | None = None,
) -> Ended:
    if number == signal.SIGKILL:
        limit_s = min(limit_s, KILLED_LIMIT_S)
    running.processes()
    since = time.perf_counter()
    for process in running.roots.values():
        process.send_signal(number)
    new_request = ""
    if answers:
        time.sleep(NEW_AFTER_S)
        new_request = _new_request(running.setup.port)
    gone = wait_until(lambda: len(running.ended()) == len(running.roots) and not running.processes(), limit_s, POLL_S)
    gone_at = time.perf_counter()
    wait_ended(answers, 1.0)
    left = [entry.command[:80] for entry in running.processes()]
    last_at = max((answer.outcome.ended_at for answer in answers if answer.ended), default=None)
    return Ended(
        scene=scene,
        gone_s=None if gone is None else gone_at - since,
        after_answers_s=None if gone is None or last_at is None else gone_at - last_at,
        codes={name: process.poll() for name, process in running.roots.items()},
        endings=endings(answers, whole or {}),
        errors=sorted({str(answer.outcome.error)[:160] for answer in answers if answer.outcome.error is not None}),
        new_request=new_request,
        processes=left,
        shared_memory=running.shared_memory(),
        files=sum(1 for path in (running.setup.folder / "t").rglob("*") if not path.is_dir()),
        port_open=_port_open(running.setup.port),
    )


def _new_request(port: int) -> str:
    """Return how a new request ended, in a word or two."""
    try:
        outcome = Chat(port, chat_body(OAK_PROMPT, 4)).read()
    except OSError as error:
        return type(error).__name__
    if outcome.whole:
        return "answered"
    return f"{outcome.status or ''} {(outcome.error or {}).get('code', 'cut')}".strip()


def _port_open(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


Scene = Callable[[Running, float], Ended]
SCENES: dict[str, Scene] = {
    "SIGTERM, idle": idle,
    "SIGTERM, answers run": partial(answering, "SIGTERM, answers run", signal.SIGTERM),
    "kill -9, answers run": partial(answering, "kill -9, answers run", signal.SIGKILL),
}


# The table --------------------------------------------------------------------------------


def table(results: dict[str, Findings], limit_s: float) -> Table:
    """Return a row for each scene of each server."""
    columns = (
        "server",
        "gone after s",
        "after the last answer s",
        "exit codes",
        "answers",
        "new request",
        "left behind",
    )
    rows: list[list[Cell]] = [
        [
            f"{title}: {ended.scene}",
            f">= {_limit(ended, limit_s):g}" if ended.gone_s is None else ended.gone_s,
            ended.after_answers_s,
            " ".join(map(str, ended.codes.values())),
            ending_words(ended.endings) if ended.endings else "",
            ended.new_request,
            ", ".join(_left(ended)) or "nothing",
        ]
        for title, findings in results.items()
        for ended in findings.endings
    ]
    return Table(title="The end of a server", columns=columns, rows=rows, note=NOTE)


def _limit(ended: Ended, limit_s: float) -> float:
    return min(limit_s, KILLED_LIMIT_S) if ended.scene.startswith("kill") else limit_s


def _left(ended: Ended) -> Iterator[str]:
    for number, what in (
        (len(ended.processes), "processes"),
        (len(ended.shared_memory), "names of shared memory"),
        (ended.files, "temporary files"),
    ):
        if number:
            yield f"{number} {what}"
    if ended.port_open:
        yield "its port"
