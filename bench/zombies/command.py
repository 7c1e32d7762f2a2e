"""`python -m bench zombies`: leave requests of each server at every stage, and print how long it computes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from attrs import define, field, frozen

from bench.load.values import count, positive
from bench.peers import comparison
from bench.peers.peer import Peer
from bench.peers.running import NotReady, Running
from bench.rig.result import Cell, Table
from bench.zombies.activity import Activity, Afterwards, EngineEnded, Unobservable, calibrate
from bench.zombies.scenes import SCENES, SLOTS, Refused, Stage

DESCRIPTION = """\
Clients leave their requests at every stage, in several ways: for how long does the engine compute on for nobody?
Seen from outside, by the CPU time of the engine's process, in steps of 0.1 s: the same for every server."""
DEFAULT = ("espalier", "sglang", "dynamo", "smg")
STARTS_MAX = 4  # of one server, which is started again when it did not become idle or died
NOTE = (
    "Seconds from the client's leaving (queued: from the end of the requests before it) to the last 0.1 s in which the "
    "engine's processes used more CPU time than the threshold between idle and busy. 0: it was idle at once. A try "
    "whose client left in another stage, for instance when its answer had ended, has no time."
)


@frozen
class Try:
    """One client that has left."""

    scene: str
    reached: bool  # it left in that stage
    after: Afterwards | None  # None: the server refuses such requests, as `refused` says
    refused: str = ""
    counted: dict[str, float] = field(factory=dict)  # requests that the server counted afterwards


@define
class Findings:
    """The results of one server."""

    tries: list[Try] = field(factory=list)
    idle: float = 0.0  # of a core, the engine's processes, without a request
    busy: float = 0.0  # with one client
    long_first_token_s: float = 0.0  # of the prompt in whose prefill clients leave
    starts: int = 0
    notes: list[str] = field(factory=list)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    comparison.add(parser, DEFAULT)
    parser.add_argument("--tries", type=count, default=3, help="of each scene; default: 3")
    parser.add_argument("--limit-s", type=positive, default=30.0, help="of the computing of one try; default: 30")
    parser.add_argument("--scenes", default="", help="part of their names")


def main(_parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure each server, and print one table; return 1 if none could be."""
    return comparison.compare(
        arguments,
        words,
        several=comparison.peers(arguments),
        measured=measured,
        title="The computing of engines for clients that have left",
        tables=lambda results: tables(results, arguments.limit_s),
    )


def measured(peer: Peer, arguments: argparse.Namespace) -> Findings:
    """Try each scene so often, on a new server where the last did not become idle."""
    findings = Findings()
    left = [name for name in SCENES if arguments.scenes in name for _ in range(arguments.tries)]
    while left and findings.starts < STARTS_MAX:
        findings.starts += 1
        with comparison.fresh(peer, arguments.environments, slots=SLOTS) as running:
            try:
                _try_on(running, left, findings, arguments.limit_s)
            except (Refused, Unobservable) as error:
                findings.notes.append(str(error))
                break
            except (OSError, AssertionError, EngineEnded) as error:
                findings.notes.append(f"it could not be asked any more ({error}); {running.ended()} had ended")
    if left:
        findings.notes.append(f"{len(left)} tries were not made after {findings.starts} starts")
    if not findings.tries:
        raise NotReady("; ".join(findings.notes))
    return findings


def _try_on(running: Running, left: list[str], findings: Findings, limit_s: float) -> None:
    """Try scenes on one server until it does not become idle; `left` loses each that has been tried."""
    activity = calibrate(running)
    findings.idle, findings.busy = activity.idle, activity.busy
    activity.computing(limit_s)
    stage = Stage(running.setup.port)
    stage.measure()
    findings.long_first_token_s = stage.long_first_token_s
    while left:
        name = left.pop(0)
        result = tried(name, stage, activity, limit_s)
        if result.after is None:
            left[:] = (each for each in left if each != name)
        findings.tries.append(result)
        comparison.progress(f"{running.peer.title}: {name}: {_words(result)}")
        if result.after is not None and result.after.limited and activity.computing(limit_s).limited:
            break


def tried(name: str, stage: Stage, activity: Activity, limit_s: float) -> Try:
    """Try one scene, and observe the engine from the moment that the request should have been over.

    Raises `EngineEnded`, with the scene in which it did.
    """
    try:
        left = SCENES[name](stage)
    except Refused as error:
        return Try(name, reached=False, after=None, refused=str(error))
    finally:
        if "half" not in name:
            stage.close()
    late_s = time.perf_counter() - left.since
    try:
        after = activity.computing(limit_s)
    except EngineEnded as ended:
        raise EngineEnded(f"{name}: {ended}") from ended
    counted = activity.counts()
    stage.close()
    if after.computed_s:
        after = Afterwards(after.computed_s + late_s, after.cpu_s, limited=after.limited)
    return Try(name, left.reached, after, counted=counted)


def _words(result: Try) -> str:
    if result.after is None:
        return f"refused: {result.refused}"
    seconds = f"{'>= ' if result.after.limited else ''}{result.after.computed_s:.2f} s"
    counted = f", counted {result.counted}" if result.counted else ""
    return f"{seconds}{'' if result.reached else ', left in another stage'}{counted}"


def tables(results: dict[str, Findings], limit_s: float) -> list[Table]:
    """Return the times of all servers in one table, and the conditions in another."""
    names = [name for name in SCENES if any(each.scene == name for found in results.values() for each in found.tries)]
    times = [[name, *(_cell(findings, name, limit_s) for findings in results.values())] for name in names]
    conditions = [_conditions(title, findings) for title, findings in results.items()]
    heads = (
        "server",
        "engine's CPU, idle",
        "with one client",
        "first token of a long prompt s",
        "CPU s after a client left",
        "starts",
        "left in the stage",
        "tries after which requests were still counted",
    )
    return [
        Table(title="Computing for nobody, s", columns=("a client leaves", *results), rows=times, note=NOTE),
        Table(title="Conditions: CPU in cores", columns=heads, rows=conditions),
    ]


def _conditions(title: str, findings: Findings) -> list[Cell]:
    made = [(each, each.after) for each in findings.tries if each.after is not None]
    return [
        title,
        findings.idle,
        findings.busy,
        findings.long_first_token_s,
        [after.cpu_s for _, after in made],
        float(findings.starts),
        f"{sum(each.reached for each, _ in made)} of {len(made)}",
        f"{sum(bool(each.counted) for each, _ in made)} of {len(made)}",
    ]


def _cell(findings: Findings, name: str, limit_s: float) -> Cell:
    tries = [each for each in findings.tries if each.scene == name]
    made = [each for each in tries if each.after is not None]
    if not made:
        return f"refused: {tries[0].refused}" if tries else None
    times = [each.after for each in made if each.after is not None and each.reached]
    if not times:
        return f"left in another stage, {len(made)} of {len(made)}"
    if limited := sum(each.limited for each in times):
        return f">= {limit_s:g} in {limited} of {len(times)}"
    return [each.computed_s for each in times]
