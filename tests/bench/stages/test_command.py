"""Every stage does its work as often as it is called, and the figures of all are printed and written."""

from __future__ import annotations

import argparse
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
import trio

from bench.rig import result
from bench.stages import command
from bench.stages.measure import Stage
from bench.stages.model import subject
from protocol.messages.engine import Done
from protocol.messages.generation import Tokens

ALL = [stage for several in command.stages().values() for stage in several]


def called(stage: Stage, times: int) -> list[object]:
    async def run() -> list[object]:
        async with trio.open_nursery() as nursery:
            once = stage.prepare(nursery)
            await trio.testing.wait_all_tasks_blocked()
            results = [await once() if iscoroutinefunction(once) else once() for _ in range(times)]
            nursery.cancel_scope.cancel()
        return results

    return trio.run(run)


def named(words: str) -> Stage:
    (found,) = (stage for stage in ALL if words in stage.name)
    return found


def test_a_stage_can_be_called_again_and_again() -> None:
    assert len({stage.name for stage in ALL}) == len(ALL)
    for stage in ALL:
        assert len(called(stage, 300)) == 300


def test_stages_do_what_their_names_say() -> None:
    [steps] = called(named("reading and checking a Step"), 1)
    assert isinstance(steps, list)
    assert [stream for stream, _ in steps[0]] == list(range(1, 65))
    assert called(named("relay through"), 2) == [Tokens((subject().ids[63],))] * 2
    assert called(named("write to a socket"), 2) == [b"x" * 220] * 2
    assert called(named("a call of an actor"), 2) == [Done()] * 2
    assert called(named("admission"), 2) == [1, 1]
    [events] = called(named("first and last events"), 1)
    assert "response.created" in str(events)
    assert "response.incomplete" in str(events)
    assert all('"content":" river"' in str(chunk) for chunk in called(named("a chunk of"), 3))
    [answer] = called(named("read a plain request"), 1)
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"0\r\n\r\n")


def test_the_figures_of_all_stages_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    words = ["--rounds", "2", "--calls", "1", "--json", str(tmp_path / "a.json")]
    assert command.main(parser, parser.parse_args(words), words) == 0
    printed = capsys.readouterr().out
    tables = result.read(tmp_path / "a.json").figures
    assert [table.title for table in tables] == ["Stages of a token", "Stages of a request"]
    rows = [row for table in tables for row in table.rows]
    assert [row[0] for row in rows] == [stage.name for stage in ALL]
    assert all(isinstance(row[1], list) and len(row[1]) == 2 for row in rows)
    assert all(stage.name in printed for stage in ALL)


def test_stages_are_chosen_by_a_word_of_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    words = ["--rounds", "1", "--calls", "1", "--only", "admission"]
    assert command.main(parser, parser.parse_args(words), words) == 0
    printed = capsys.readouterr().out
    assert "admission without a wait" in printed
    assert "access log" not in printed
    with pytest.raises(SystemExit):
        command.main(parser, parser.parse_args(["--only", "no such stage"]), [])
