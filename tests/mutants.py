"""Plant one bug at a time in a copy of the code, and say which suites notice: `python -m tests.mutants [WORD ...]`.

A checker that never fails proves nothing. A mutant that survives everything is either harmless, and says here why, or
shows that an oracle is weak. Run by hand or weekly, not on every commit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parent.parent
SEEDS = "test_nothing_false_is_said_and_everything_comes_home"
SUITES = {
    "streams": ["tests/test_streams.py", "tests/test_frames.py"],
    "contract": ["tests/test_engine_contract.py"],
    "examples": ["tests/test_kit.py", "tests/test_link.py", "tests/test_decode.py"],
    "sweep": ["tests/test_sweep.py"],
    "simulation": [f"tests/test_simulation.py::{SEEDS}[{tens}]" for tens in range(6)],
}
PATIENCE_S = 60  # a suite that hangs has noticed, too


@frozen
class Mutant:
    """One planted bug."""

    name: str
    path: str
    old: str
    new: str
    harmless: str = ""  # why nothing need notice it


KIT, DECODE, LINK = "actors/_kit.py", "actors/decode.py", "supervisor/link.py"
ADAPTER, STREAMS, FRAMES = "actors/engines/sglang/adapter.py", "protocol/streams.py", "protocol/frames.py"

MUTANTS = (
    Mutant(
        "the asker's answer is dropped before its call is cancelled",
        KIT,
        """            call.scope.cancel(reason="the asker left")
            call.answer.enough()
""",
        """            call.answer.enough()
            call.scope.cancel(reason="the asker left")
""",
        harmless="both happen in one turn, and what is put in between is dropped either way",
    ),
    Mutant("leaving does not cancel the answerer", KIT, 'call.scope.cancel(reason="the asker left")', "pass"),
    Mutant(
        "an answerer that ends leaves its asker waiting",
        KIT,
        'self.answer.fail(ActorLost("whoever was answering ended"))',
        "pass",
    ),
    Mutant(
        "a relay ignores the replies that waited",
        KIT,
        "self._deliver(self._waiting.popleft())",
        "self._waiting.popleft()",
    ),
    Mutant("the credit of an answer is not counted", KIT, "self.credit -= units", "pass"),
    Mutant("an error in a relay's function reaches whoever put", KIT, "self._broken = error\n", "raise\n"),
    Mutant("the first reply does not renew a relay's deadline", KIT, "self._first_wakes = until is not None", "pass"),
    Mutant("bugs are never too many", KIT, "if len(self._seen) > self.most:", "if False:"),
    Mutant(
        "an actor's error beside a request's is forgotten",
        KIT,
        "if _first(error, ActorError) is not None:",
        "if failure is None and _first(error, ActorError) is not None:",
    ),
    Mutant("no abort", DECODE, "engine.abort(request.id)", "pass"),
    Mutant("abort without waiting for the slot", DECODE, "await engine.wait_released(request.id)", "pass"),
    Mutant(
        "an unshielded wait for the slot", DECODE, "move_on_after(release_s, shield=True)", "move_on_after(release_s)"
    ),
    Mutant("an engine that keeps a slot is forgiven", DECODE, "if waiting.cancelled_caught:", "if False:"),
    Mutant(
        "a slot is lost with each request that is left",
        DECODE,
        "        free.release()",
        "        if not call.scope.cancel_called:\n            free.release()",
    ),
    Mutant("work is begun for an asker who left", DECODE, "await trio.lowlevel.checkpoint_if_cancelled()", "pass"),
    Mutant(
        "a call is taken before there is a slot for it",
        DECODE,
        """            await free.acquire()  # the slot first: a call that must wait had better wait where others can take it
            call = await inbox.receive()
""",
        """            call = await inbox.receive()
            await free.acquire()
""",
    ),
    Mutant(
        "no deadline for the first token",
        DECODE,
        "self.started_at + self.deadlines.first_token_s)",
        "self.started_at + 1e9)",
    ),
    Mutant(
        "no deadline between tokens", DECODE, "return min(total, self.last_at + self.deadlines.gap_s)", "return total"
    ),
    Mutant("no Cancel frame on leaving", LINK, 'self._send(Cancel(stream, "the asker left"))', "pass"),
    Mutant("a stream is closed before its answerer let go", LINK, "if serving.answer is not None:\n", "if False:\n"),
    Mutant(
        "a Cancel from the other end is ignored", LINK, 'serving.scope.cancel(reason=f"peer: {frame.reason}")', "pass"
    ),
    Mutant("a lost link forgets its askers", LINK, 'answer.fail(self.lost_as("the link went down"))', "pass"),
    Mutant("a closed stream wakes nobody who waits for one", LINK, "self._permits.unpark()\n", "pass\n"),
    Mutant(
        "Hello wakes nobody who asked before it",
        LINK,
        """                    self._permits.unpark_all()
                    task_status""",
        "                    task_status",
    ),
    Mutant(
        "an End that lies loses its asker",
        LINK,
        """                result = messages.decode(frame.body) if frame.body else None
                self._closed(frame.stream).end(result)
""",
        "                self._closed(frame.stream).end(messages.decode(frame.body))\n",
    ),
    Mutant(
        "the end of a link is told when its answerers have let go",
        LINK,
        """                finally:
                    self._end()  # at once: the tasks that serve may take their time, and must not send any more
                nursery""",
        """                nursery""",
    ),
    Mutant("credit that comes while the inbox is full is lost", LINK, "answer.credit += serving.granted", "pass"),
    Mutant(
        "nothing limits what a sleeping peer leaves unread",
        LINK,
        "self.peer.queued_bytes > self.queued_bytes_max",
        "False",
    ),
    Mutant("the writer stops after its first message", LINK, "await self._writer.park()", "return"),
    Mutant(
        "a Step loses the tokens of an answer's last step",
        LINK,
        "asked[stream].put(Tokens(ids), len(ids))",
        "ended_now = {end.stream for end in step.ended}\n            if stream not in ended_now:\n                asked[stream].put(Tokens(ids), len(ids))",
    ),
    Mutant(
        "the adapter forgets which stream a request has",
        ADAPTER,
        "self._streams[request.id] = stream, generation",
        "pass",
    ),
    Mutant("the adapter never forgets a request", ADAPTER, "self._streams.pop(request_id, None)", "pass"),
    Mutant("an empty prompt reaches the engine", ADAPTER, "if not request.tokens:", "if False:"),
    Mutant("one token too many reaches the engine", ADAPTER, "if total > most:", "if total > most + 1:"),
    Mutant("replies after a Cancel are a violation", STREAMS, '"leaving": {Item: "leaving", End', '"leaving": {End'),
    Mutant(
        "a Cancel that crosses an End is a violation",
        STREAMS,
        '"closed": {Credit: "closed", Cancel: "closed"}',
        '"closed": {Credit: "closed"}',
    ),
    Mutant("a left stream is forgotten at once", STREAMS, "self._leaving.add(stream)", "self._close(stream)"),
    Mutant("credit may go below zero", STREAMS, "if not 0 <= units <= left:", "if False:"),
    Mutant(
        "a Step's arrays are not compared",
        STREAMS,
        "if len(frame.streams) != len(frame.counts) or sum(frame.counts) != len(frame.tokens):",
        "if False:",
    ),
    Mutant("more streams than a peer serves", STREAMS, "if len(self._credit) >= self.open_max:", "if False:"),
    Mutant("half a frame is read as a whole one", FRAMES, "if size - body < length:", "if size - body < length - 1:"),
    Mutant("bytes stay behind in the buffer", FRAMES, "del buffer[:at]", "del buffer[: max(at - 1, 0)]"),
    Mutant(
        "deep nesting breaks the decoder",
        "protocol/messages.py",
        "UnicodeDecodeError, RecursionError)",
        "UnicodeDecodeError)",
    ),
)


def planted(mutant: Mutant, folder: Path) -> Path:
    """Copy what is needed, with the bug in it."""
    for name in ("protocol", "actors", "supervisor", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cpu"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"{mutant.name}: what it replaces occurs {text.count(mutant.old)} times in {mutant.path}")
    path.write_text(text.replace(mutant.old, mutant.new))
    return folder


def noticed(folder: Path, files: list[str]) -> bool:
    """Run a suite up to its first failure; a suite that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Try each mutant whose name has one of the words in it; fail if a harmful one survives."""
    words = sys.argv[1:] or [""]
    survived = 0
    for mutant in MUTANTS:
        if not any(word in mutant.name for word in words):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = planted(mutant, Path(place))
            by = [name for name, files in SUITES.items() if noticed(folder, files)]
        verdict = ", ".join(by) or (f"harmless: {mutant.harmless}" if mutant.harmless else "SURVIVED")
        survived += not by and not mutant.harmless
        print(f"{mutant.name:62s} {verdict}", flush=True)  # noqa: T201
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
