"""Every stage does its work as often as it is called, and the figures of all are printed and written."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import trio

from bench.rig import result
from bench.stages import command, measure
from bench.stages.measure import AnyStage, TaskStage
from bench.stages.model import subject
from protocol.messages import Done, Tokens

ALL = command.stages(subject())


def called(stage: AnyStage, times: int) -> list[object]:
    async def run(stage: TaskStage) -> list[object]:
        async with trio.open_nursery() as nursery:
            once = await stage.prepare(nursery)
            results = [await once() for _ in range(times)]
            nursery.cancel_scope.cancel()
        return results

    if isinstance(stage, TaskStage):
        return trio.run(run, stage)
    once = stage.prepare()
    return [once() for _ in range(times)]


def named(words: str) -> AnyStage:
    (found,) = (stage for stage in ALL if words in stage.name)
    return found


@pytest.mark.parametrize("stage", ALL, ids=lambda stage: stage.name)
def test_a_stage_can_be_called_again_and_again(stage: AnyStage) -> None:
    assert len(called(stage, 300)) == 300


def test_no_two_stages_have_one_name() -> None:
    names = [stage.name for stage in ALL]
    assert len({*names}) == len(names)


def test_stages_do_what_their_names_say() -> None:
    [steps] = called(named("reading and checking a Step"), 1)
    assert isinstance(steps, list)
    assert [stream for stream, _ in steps[0]] == list(range(1, 65))
    assert called(named("relay through"), 2) == [Tokens((subject().ids[63],))] * 2
    assert called(named("write to a socket"), 2) == [b"x" * 220] * 2
    assert called(named("a call of an actor"), 2) == [Done()] * 2
    assert called(named("admission"), 2) == [1, 1]
    [events] = called(named("first and last events"), 1)
    assert b"response.created" in str(events).encode()
    assert "response.incomplete" in str(events)
    assert all(b'"content":" river"' in bytes(str(chunk), "utf-8") for chunk in called(named("a chunk of"), 3))
    for words in ("h11 reads a request, and writes", "read a plain request, and write"):
        [answer] = called(named(words), 1)
        assert isinstance(answer, bytes)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"0\r\n\r\n")
    assert "".join(str(text.text) for text in called(named("detokenise with"), 30) if text is not None).startswith("the old oak")  # type: ignore[attr-defined]  # fmt: skip


def test_the_figures_of_all_stages_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    words = ["--rounds", "2", "--calls", "1", "--json", str(tmp_path / "a.json")]
    assert command.main(parser, parser.parse_args(words), words) == 0
    printed = capsys.readouterr().out
    rows = [row for table in result.read(tmp_path / "a.json").figures for row in table.rows]
    assert [row[0] for row in rows] == [stage.name for stage in ALL]
    assert all(isinstance(row[1], list) and len(row[1]) == 2 for row in rows)
    assert all(stage.name in printed for stage in ALL)


def test_stages_are_chosen_by_a_word_of_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    words = ["--rounds", "1", "--calls", "1", "--only", "scope"]
    assert command.main(parser, parser.parse_args(words), words) == 0
    assert "a scope with a deadline" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(parser, parser.parse_args(["--only", "no such stage"]), [])


def test_the_parts_of_the_table_are_those_of_the_stages() -> None:
    costs = [measure.Cost(stage, measure.Memory(1, 2, 3), [5.0, 4.0]) for stage in ALL]
    tables = command.tables(costs)
    assert [table.title for table in tables] == ["Stages of a token", "Stages of a request"]
    assert list(tables[0].rows[0][1:]) == [[5.0, 4.0], 1, 2, 3]
