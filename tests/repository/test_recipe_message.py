"""The recipe of CONTRIBUTING.md for a message between nodes: its class and row, who serves it, and who asks it."""

from __future__ import annotations

from pathlib import Path

from tests.rig.scratch import CLUSTER, ROOT, scratch

CLASSES = '''
@frozen
class GetZone(Message):
    """Ask in which zone a node is; the result is `Zone`."""


@frozen
class Zone(Message):
    """The zone of a node."""

    name: str


@frozen
class Unlisted(Message):
    """A message without a row."""


'''
ROWS = """
Kind(90, GetZone, result=Zone),
Kind(91, Zone),
"""
IMPORTS = """
from actors.kit.calls import Function
from protocol.messages.cluster import GetZone, Zone
"""
SERVED = """
answers = [Zone("north"), GetZone()]

async def zone(_: Message) -> Message:
    return answers.pop(0)

services["", GetZone] = Function(zone)
"""
CALLER = '''
"""Ask a node for its zone."""

from __future__ import annotations

from protocol.messages.cluster import GetZone, Zone
from supervisor.links.link import Link


async def zone_of(link: Link) -> str:
    """Return the zone of the node at the other end."""
    async with link.ask(GetZone(), 0) as answer:
        result = await answer.result()
    assert isinstance(result, Zone)
    return result.name
'''
ASKED = """
from pathlib import Path
from random import Random

import trio
from protocol.messages.cluster import Unlisted
from protocol.errors import LinkLost, PeerViolation
from protocol.link.peer import Peer
from supervisor.cli.zone import zone_of
from supervisor.engines.kinds import read_cluster
from supervisor.links.link import Link
from tests.rig.assembly import built_assembly
from tests.rig.network import sim_pair

async def run(link):
    try:
        await link.run()
    except PeerViolation as error:
        print(error)

async def main():
    assembly, _ = built_assembly(read_cluster(Path({file!r})), "main")
    near, far = sim_pair(Random(0))
    other, main = Link(near, Peer("other", serves_max=0)), Link(far, Peer("main", serves_max=8), assembly.links.services)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(main.run)
        nursery.start_soon(run, other)
        await other.wait_ready()
        try:
            other.open(Unlisted(), 0)
        except TypeError as error:
            print(error)
        print(await zone_of(other))
        try:
            await zone_of(other)
        except LinkLost:
            pass
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

import trio.testing
trio.run(main)
"""
UNLISTED = "a Unlisted has no row in `KINDS`, so it crosses no link"


def test_a_message_is_added_by_its_class_with_a_row_its_service_and_its_caller(tmp_path: Path) -> None:
    scratch_copy = scratch(tmp_path)
    scratch_copy.insert("protocol/messages/cluster.py", "KINDS = (", CLASSES)
    scratch_copy.insert("protocol/messages/cluster.py", "    Kind(40, LoadUpdate),", ROWS)
    scratch_copy.insert("supervisor/node/assembly.py", "from supervisor.cluster import engine_control", IMPORTS)
    scratch_copy.insert("supervisor/node/assembly.py", "    links = make_mesh(", SERVED)
    scratch_copy.add("supervisor/cli/zone.py", CALLER)
    assert scratch_copy.touched == {
        "protocol/messages/cluster.py",
        "supervisor/node/assembly.py",
        "supervisor/cli/zone.py",
    }
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(tiny=ROOT / "examples" / "tiny"))
    written = scratch_copy.program(ASKED.format(file=str(file))).splitlines()
    assert written == [UNLISTED, "north", "a GetZone ends an answer that ends in a Zone"]
