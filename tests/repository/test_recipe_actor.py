"""The recipe of CONTRIBUTING.md for an actor: its messages, its file, and a child that is asked from other nodes."""

from __future__ import annotations

from pathlib import Path

from tests.rig.scratch import CLUSTER, ROOT, scratch

MESSAGES = '''
@frozen
class Echo(Message):
    """Repeat a word; the result is `Echoed`."""

    word: str


@frozen
class Echoed(Message):
    """A word, so many times."""

    words: tuple[str, ...]


'''
KINDS = """
Kind(90, Echo, result=Echoed),
Kind(91, Echoed),
"""
ACTOR = '''
"""Echo: repeat a word."""

from __future__ import annotations

import trio

from actors.kit.calls import BugCounter, Call, Inbox
from protocol.errors import BadRequest
from protocol.messages.generation import Echo, Echoed


async def echo(
    inbox: Inbox[Call[Echo, Echoed, Echoed]], times: int, *, task_status: trio.TaskStatus[None]
) -> None:
    """Repeat the word of each call `times` times."""
    bugs = BugCounter()
    task_status.started()
    while True:
        call = await inbox.receive()
        with call.answering(bugs) as answer:
            if not call.request.word:
                raise BadRequest("there is no word")
            answer.end(Echoed((call.request.word,) * times))
'''
IMPORTS = """
from actors.echo import echo
from actors.kit.calls import mailbox
from protocol.messages.generation import Echo
"""
CHILD = """
address, calls = mailbox(8)
echoes = Child(name="echo", run=echo, args=(calls, 2), about="repeats words")
services["echo", Echo] = address
"""
ROW = """
echoes,
"""

ASKED = """
from pathlib import Path
from random import Random

import trio
from protocol.errors import BadRequest
from protocol.messages.generation import Echo
from protocol.link.peer import Peer
from supervisor.engines.kinds import read_cluster
from supervisor.links.link import Link
from tests.rig.assembly import built_assembly
from tests.rig.network import sim_pair

async def main():
    assembly, _ = built_assembly(read_cluster(Path({file!r})), "main")
    child = next(each for each in assembly.tree.children if each.name == "echo")
    print(child.about)
    near, far = sim_pair(Random(0))
    other, main = Link(near, Peer("other", serves_max=0)), Link(far, Peer("main", serves_max=8), assembly.links.services)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: child.run(*child.args, task_status=task_status))
        nursery.start_soon(main.run)
        nursery.start_soon(other.run)
        await other.wait_ready()
        async with other.ask(Echo("hello"), 0, "echo") as answer:
            print((await answer.result()).words)
        try:
            async with other.ask(Echo(""), 0, "echo") as answer:
                await answer.result()
        except BadRequest as error:
            print(error)
        nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_an_actor_is_added_by_its_messages_its_file_and_a_child(tmp_path: Path) -> None:
    scratch_copy = scratch(tmp_path)
    scratch_copy.insert("protocol/messages/generation.py", "KINDS = (", MESSAGES)
    scratch_copy.insert("protocol/messages/generation.py", "    Kind(20, Embedded),", KINDS)
    scratch_copy.add("actors/echo.py", ACTOR)
    scratch_copy.insert("supervisor/node/assembly.py", "from supervisor.cluster import engine_control", IMPORTS)
    scratch_copy.insert("supervisor/node/assembly.py", "    links = make_mesh(", CHILD)
    scratch_copy.insert("supervisor/node/assembly.py", "                *media.children,", ROW)
    assert scratch_copy.touched == {"protocol/messages/generation.py", "actors/echo.py", "supervisor/node/assembly.py"}

    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(tiny=ROOT / "examples" / "tiny"))
    written = scratch_copy.program(ASKED.format(file=str(file)))
    assert written.splitlines() == ["repeats words", "('hello', 'hello')", "there is no word"]
