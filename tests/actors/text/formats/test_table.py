"""Formats of answers: a new one costs a file and a row, and follows the law of cuts."""

from __future__ import annotations

import inspect
from pathlib import Path

from actors.text.formats.table import TOOLS
from tests.rig import marked_calls
from tests.rig.scratch import scratch

IMPORT = """
from actors.text.formats.marked import Marked
"""
ROW = """
"marked": Marked(),
"""
CUT = """
import random

from actors.text.formats.answer import Expected
from actors.text.formats.stage import CallPiece
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.test_table import LINE

def pieces(parts):
    stage, out = make_stage(AnswerFormat("marked", "think"), Expected(ToolTable({"f": {}}))), []
    for piece in [*(piece for part in parts for piece in stage.feed(part)), *stage.end()]:
        call = isinstance(piece, CallPiece)
        key = type(piece).__name__, piece.index if call else None
        text = piece.name + piece.arguments if call else piece.text
        if out and out[-1][0] == key and not (call and piece.name):
            out[-1] = key, out[-1][1] + text
        else:
            out.append((key, text))
    assert stage.held == 0
    return out

whole, rng = pieces([LINE]), random.Random(0)
assert pieces(LINE) == whole
for _ in range(1000):
    cuts = [0, *sorted(rng.sample(range(1, len(LINE)), rng.randint(0, 20))), len(LINE)]
    assert pieces(LINE[begin:end] for begin, end in zip(cuts, cuts[1:])) == whole
print(*(f"{kind} {text!r}" for (kind, _), text in whole), sep="\\n")
"""
ANSWERED = """
import trio
from attrs import evolve
from functools import partial

from actors.kit.fast_path import FastPath
from actors.kit.offload import run_inline
from actors.processor import processor
from actors.text.limits import PromptLimits
from actors.text.formats.table import AnswerFormat
from protocol.messages.text import Rendering, Respond, Role, Turn
from protocol.messages.tools import Tool
from tests.actors.text.formats.test_table import LINE
from tests.rig.calls import mailbox
from tests.rig.gateway import INFO, TINY, Worker, ids
from tests.rig.tools import SHOWING

async def main():
    address, inbox = mailbox(1)
    count, fast, replies = len(ids(LINE)), [], []
    turns = Turn(Role.USER, f"n={count}"),

    def receive(text, _):
        fast.append(text.text)
        replies.append(text)

    async with trio.open_nursery() as nursery:
        limits = PromptLimits(INFO, 500, 500)
        model = evolve(TINY, template=SHOWING, answers=AnswerFormat("marked", "think"))
        arguments = inbox, model, Worker(line=LINE), lambda: limits, run_inline, 1
        await nursery.start(partial(processor, *arguments))
        async with address.ask(Respond("0" * 32, turns, Rendering(tools=(Tool("f"),))), 500) as answer:
            await answer.relay(replies.append, fast_path=FastPath(receive))
        nursery.cancel_scope.cancel()
    kinds = {}
    for reply in replies:
        part = getattr(reply, "text", "") + getattr(reply, "name", "") + getattr(reply, "arguments", "")
        kinds[type(reply).__name__] = kinds.get(type(reply).__name__, "") + part
    print(kinds["Text"], kinds["Reasoning"], kinds["CallPart"], sep="|")
    print(len(fast) > 10, set("".join(fast)) & {"[", "{", "<", "I"})

trio.run(main)
"""
LINE = '<think>Is [t it?</think>An oak. Yes. [call f]{"a": [1]}[/call] An oak is a tree.'
WHOLE = [
    "ReasoningPiece 'Is [t it?'",
    "TextPiece 'An oak. Yes. '",
    "CallPiece 'f{\"a\": [1]}'",
    "TextPiece ' An oak is a tree.'",
]


def test_a_format_is_added_by_a_file_and_a_row(tmp_path: Path) -> None:
    assert "marked" not in TOOLS, "the recipe is carried out in a copy"
    scratch_copy = scratch(tmp_path)
    scratch_copy.add("actors/text/formats/marked.py", inspect.getsource(marked_calls))
    scratch_copy.insert("actors/text/formats/table.py", "from actors.text.formats.hermes", IMPORT)
    scratch_copy.insert("actors/text/formats/table.py", '    "hermes": ', ROW)
    assert scratch_copy.touched == {"actors/text/formats/marked.py", "actors/text/formats/table.py"}
    assert scratch_copy.program(CUT).splitlines() == WHOLE
    answered = scratch_copy.program(ANSWERED).splitlines()
    assert answered == ['An oak. Yes.  An oak is a tree.|Is [t it?|f{"a": [1]}', "True set()"]
