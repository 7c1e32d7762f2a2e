"""One run of a load tool, played by a small program: what is read, and what is no result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.agree.run import Failed, Watch, answered, run, server_figures
from bench.agree.tools import Figures, Load, Tool
from bench.peers.peer import Setup
from bench.peers.running import Running
from bench.peers.table import SERVERS
from bench.rig.processes import process_entry

LOAD = Load(url="http://127.0.0.1:18999", model="tiny", tokenizer=Path("/model"), clients=2, requests=3)
PLAYED = """\
import json, os, sys, time
log, results, lines = sys.argv[1:]
with open(log, "a") as file:
    for line in json.loads(lines):
        file.write(json.dumps(line) + "\\n")
open(results + "/figures.json", "w").write(json.dumps({"requests/s": 20.0, "child": os.getpid()}))
print("the end of what the tool wrote")
sys.exit(int(os.environ.get("PLAYED_CODE", "0")))
"""


def line(first_token_s: float = 0.012, **fields: object) -> dict[str, object]:
    """Return a line of the access log about one whole answer."""
    whole = {"event": "request ended", "api": "chat", "outcome": "length", "completion_tokens": 64}
    return {**whole, "duration_s": 0.4, "first_token_s": first_token_s, "prompt_tokens": 136, **fields}


def text(lines: list[dict[str, object]]) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in lines).encode()


def played(lines: list[dict[str, object]], log: Path, **variables: str) -> Tool:
    """Return a tool that makes the server log these lines."""

    def words(_load: Load, folder: Path, python: str) -> list[str]:
        return [python, "-c", PLAYED, str(log), str(folder), json.dumps(lines)]

    def read(folder: Path) -> Figures:
        figures: Figures = json.loads((folder / "figures.json").read_text())
        return figures

    return Tool(name="played", title="a played tool", words=words, read=read, variables=variables)


@pytest.fixture
def server(tmp_path: Path) -> Running:
    """Return a server that is not started, whose log has requests of an earlier load."""
    (tmp_path / "node.log").write_bytes(text([line(first_token_s=9.0)] * 5))
    return Running(SERVERS["espalier-simulated-node"], Setup(folder=tmp_path, port=18999))


def test_a_run_has_the_tools_figures_and_the_servers_of_the_same_requests(server: Running, tmp_path: Path) -> None:
    lines = [line(first_token_s=5.0), line(0.010), line(0.012), line(0.020)]  # the first is of the warm-up
    result = run(played(lines, tmp_path / "node.log"), LOAD, server, tmp_path / "results", tmp_path)
    assert result.figures["requests/s"] == 20.0
    assert result.server["first token p50 ms"] == pytest.approx(12.0)
    assert result.server["request p50 ms"] == pytest.approx(400.0)
    assert (result.clients, result.prompt_tokens) == (2, 136.0)
    assert process_entry(int(result.figures["child"])) is None, "a tool ends with its run"


def test_a_tool_that_fails_is_shown_with_its_last_words(server: Running, tmp_path: Path) -> None:
    tool = played([line()] * 3, tmp_path / "node.log", PLAYED_CODE="3")
    with pytest.raises(Failed, match=r"exited with 3\n[^$]*the end of what the tool wrote"):
        run(tool, LOAD, server, tmp_path / "results", tmp_path)


def test_a_tool_that_measured_fewer_requests_or_shorter_answers_has_no_figures() -> None:
    assert len(answered(text([line()] * 4), LOAD)) == 3
    for lines in ([line()] * 2, [line(), line(completion_tokens=32), line()], [line(outcome="cancelled")] * 3):
        with pytest.raises(Failed, match="3 whole answers of 64 tokens"):
            answered(text(lines), LOAD)


def test_a_log_line_that_is_no_answer_is_passed_over() -> None:
    others = [line(api="models", outcome=""), {"event": "a turn took too long", "count": 2}]
    log = text([line(), *others, line(), line()]) + b"some text of a library\n"
    assert len(answered(log, LOAD)) == 3


def test_the_servers_figures_are_in_milliseconds() -> None:
    figures = server_figures(answered(text([line(0.010), line(0.012), line(0.014)]), LOAD))
    assert figures["first token p50 ms"] == pytest.approx(12.0)
    assert figures["first token p99 ms"] == pytest.approx(13.96)


def test_cpu_time_counts_while_the_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock, used = tmp_path / "node.log", iter([10.0, 12.0]), iter([1.0, 5.0, 6.0, 9.0])
    log.write_text("")
    monkeypatch.setattr("bench.agree.run.cpu_s", lambda _pid: next(used))
    monkeypatch.setattr("bench.agree.run.family", lambda _table, _pids: [process_entry(1)])
    monkeypatch.setattr("bench.agree.run.time.perf_counter", lambda: next(clock))
    watch = Watch(1, log)
    watch.look()  # it imports
    log.write_text("a")
    watch.look()
    log.write_text("ab")
    watch.look()
    watch.look()  # it writes its results
    assert watch.cores == pytest.approx(0.5)


def test_a_log_that_did_not_grow_shows_no_cpu_time(tmp_path: Path) -> None:
    (tmp_path / "node.log").write_text("")
    assert Watch(1, tmp_path / "node.log").cores == 0.0
