"""`python -m bench resume`: kill a worker under running streams: when does each go on, and is its text exact?"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from threading import Thread

from attrs import evolve, field, frozen

from bench.cost.groups import APART, groups
from bench.load.values import count
from bench.peers import comparison
from bench.peers.peer import Peer
from bench.peers.running import NotReady, Running
from bench.rig.clients import Chat, chat_body
from bench.rig.node import wait_until
from bench.rig.processes import ProcessEntry
from bench.rig.prompts import OAK_PROMPT, PROMPTS, STORY_PROMPT
from bench.rig.result import Cell, Table
from bench.rig.watched_answers import WatchedAnswer, ending_words, endings, wait_begun, wait_ended, whole_texts

DESCRIPTION = """\
A process of one of two workers is killed (SIGKILL) under running streams. For each stream that was on it: when the next
token came, and whether the text is the one that it has undisturbed; where a server cannot resume, how it ended."""
DEFAULT = ("espalier", "espalier-nodes", "dynamo", "smg", "sglang")
WORKERS = 2
SLOTS = 16
STREAMS_A_PROMPT = 2
TOKENS = 400
PIECES = 20  # of each stream before the death
ANSWERS_WITHIN_S = 90.0
STOPPED_S, STOPPED_MAX_S = 0.6, 2.0  # before its death, which shows the streams that are on it
MOVED = 10  # pieces of each stream that goes on meanwhile: by then one without any is not merely late
SETTLE_S = 0.2  # for the tokens that are on their way
PROBE_S = 5.0  # for which new requests are sent after the death
MIGRATIONS = "3"  # of a request that Dynamo allows; by default it allows none
NOTE = (
    "On it: no token came while the process was stopped before it was killed: for 0.6 s, and until each stream that "
    "went on had ten tokens, or for 2 s more. Times from the kill. Exact: the text that the same prompt had before; "
    "cut: the connection ended without a word; cut, looks whole: a finish reason, but not all of the text. New "
    "requests: one after another, in the 5 s after the kill."
)


def scheduler(processes: Sequence[ProcessEntry]) -> int | None:
    """Return the first process that computes tokens."""
    return next((pid for pid, group in groups(processes).items() if group == APART), None)


def parent(processes: Sequence[ProcessEntry]) -> int | None:
    """Return the process that started it: an engine host, a worker, a server."""
    return next((entry.parent for entry in processes if entry.pid == scheduler(processes)), None)


def node(processes: Sequence[ProcessEntry]) -> int | None:
    """Return a node that has an engine."""
    return next((pid for pid, group in groups(processes).items() if group.startswith("node worker-")), None)


Victim = Callable[[Sequence[ProcessEntry]], int | None]
VICTIMS: dict[str, Victim] = {
    "the engine's scheduler": scheduler,
    "the scheduler's parent": parent,
    "the engine's node": node,
}


@frozen
class Death:
    """The result of one killed process."""

    victim: str
    streams: int
    on_it: int
    next_token_s: list[float]  # of the streams on it that went on
    ended_s: list[float]  # of the streams on it that did not
    endings: dict[str, int]  # of the streams on it
    others: dict[str, int]  # of the other streams
    errors: list[str]  # the first words of different errors
    asked: int  # new requests afterwards
    failed: int
    last_failed_s: float | None  # when the last of them failed


@frozen
class Findings:
    """The results of one server."""

    deaths: list[Death]
    notes: list[str] = field(factory=list)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    comparison.add(parser, DEFAULT)
    parser.add_argument("--tries", type=count, default=1, help="of each death, each on a new server; default: 1")
    parser.add_argument("--victims", default="", help="part of their names: scheduler, parent, node")


def main(_parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure each server, and print one table; return 1 if none could be."""
    return comparison.compare(
        arguments,
        words,
        several=[at_its_best(peer) for peer in comparison.peers(arguments)],
        measured=measured,
        title="From a worker's death to the next token of its streams",
        tables=lambda results: [table(results)],
    )


def at_its_best(peer: Peer) -> Peer:
    """Return a server with what it has for such deaths, where that is off by default."""
    if not peer.name.startswith("dynamo"):
        return peer
    title = f"{peer.title}, {MIGRATIONS} migrations"
    return evolve(comparison.with_variables(peer, DYN_MIGRATION_LIMIT=MIGRATIONS), title=title)


def measured(peer: Peer, arguments: argparse.Namespace) -> Findings:
    """Kill each process that the server has, on a new server each time."""
    workers = min(WORKERS, peer.workers_max)
    findings = Findings([], ["it has one worker"] if workers == 1 else [])
    for name in (name for name in VICTIMS if arguments.victims in name):
        for _ in range(arguments.tries):
            with comparison.fresh(peer, arguments.environments, slots=SLOTS, workers=workers) as running:
                pid = VICTIMS[name](running.processes())
                if pid is None:
                    break
                try:
                    death = killed(running, name, pid)
                except (RuntimeError, OSError) as error:
                    findings.notes.append(f"{name}: {error}")
                    continue
                findings.deaths.append(death)
                comparison.progress(f"{peer.title}: {death}")
    if not findings.deaths:
        raise NotReady("; ".join(findings.notes) or "it has no such process")
    return findings


def killed(running: Running, name: str, pid: int) -> Death:
    """Kill a process under streams, and observe them; raises `RuntimeError` if they did not run."""
    port = running.setup.port
    prompts = [STORY_PROMPT, *PROMPTS[:3]]
    whole = whole_texts(port, prompts, TOKENS, ANSWERS_WITHIN_S)
    answers = [WatchedAnswer(port, prompt, TOKENS) for prompt in prompts * STREAMS_A_PROMPT]
    try:
        if not wait_begun(answers, PIECES, ANSWERS_WITHIN_S):
            raise RuntimeError("the streams did not begin, or ended too early")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SETTLE_S)
        settled_at = time.perf_counter()
        time.sleep(STOPPED_S - SETTLE_S)
        wait_until(lambda: told_apart(_moved(answers, settled_at)), STOPPED_MAX_S)
        silent = [answer for answer in answers if not answer.ended and answer.next_after(settled_at) is None]
        since = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        failures: list[tuple[float, bool]] = []
        prober = Thread(target=_probe, args=(port, since, failures), daemon=True)
        prober.start()
        wait_ended(answers, ANSWERS_WITHIN_S)
        prober.join()
        return _death(name, answers, silent, whole, since, failures)
    finally:
        for answer in answers:
            answer.leave()


def _moved(answers: Sequence[WatchedAnswer], since: float) -> list[int]:
    """Return how many pieces each stream has had; one that has ended could have no more."""
    return [MOVED if answer.ended else answer.pieces_after(since) for answer in answers]


def told_apart(moved: Sequence[int]) -> bool:
    """Whether the streams that go on have moved so far that those which have not moved are the stopped ones.

    A busy machine keeps all of them from moving: time alone would count those as stopped that were only late.
    """
    going = [pieces for pieces in moved if pieces]
    return bool(going) and min(going) >= MOVED


def _probe(port: int, since: float, failures: list[tuple[float, bool]]) -> None:
    """Send one short request after another, and note when each ended and whether it failed."""
    while time.perf_counter() - since < PROBE_S:
        try:
            failed = not Chat(port, chat_body(OAK_PROMPT, 4)).read().whole
        except OSError:
            failed = True
        failures.append((time.perf_counter() - since, failed))
        time.sleep(0.05)


def _death(
    name: str,
    answers: Sequence[WatchedAnswer],
    silent: Sequence[WatchedAnswer],
    whole: dict[str, str],
    since: float,
    probes: Sequence[tuple[float, bool]],
) -> Death:
    nexts = {answer: answer.next_after(since) for answer in silent}
    errors = {str(answer.outcome.error)[:160] for answer in silent if answer.outcome.error is not None}
    failed = [at_s for at_s, was_failed in probes if was_failed]
    return Death(
        victim=name,
        streams=len(answers),
        on_it=len(silent),
        next_token_s=[next_s for next_s in nexts.values() if next_s is not None],
        ended_s=[answer.outcome.ended_at - since for answer in silent if nexts[answer] is None and answer.ended],
        endings=endings(silent, whole),
        others=endings((answer for answer in answers if answer not in silent), whole),
        errors=sorted(errors),
        asked=len(probes),
        failed=len(failed),
        last_failed_s=max(failed, default=None),
    )


def table(results: dict[str, Findings]) -> Table:
    """Return a row for each killed process of each server."""
    rows: list[list[Cell]] = [
        [
            f"{title}: {death.victim}",
            f"{death.on_it} of {death.streams}",
            death.next_token_s,
            ending_words(death.endings),
            death.ended_s,
            ending_words(death.others),
            f"{death.failed} of {death.asked}",
            death.last_failed_s,
        ]
        for title, findings in results.items()
        for death in findings.deaths
    ]
    columns = (
        "killed",
        "streams on it",
        "next token s",
        "they ended",
        "s, without another token",
        "the other streams",
        "new requests that failed",
        "the last of them s",
    )
    return Table(title="The death of a worker under streams", columns=columns, rows=rows, note=NOTE)
