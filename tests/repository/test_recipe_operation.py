"""The recipe of CONTRIBUTING.md for an operation of an engine: its row, and a handler in each kind of engine."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rig.scratch import ROOT, scratch

CLASSES = '''
@frozen
class Stir(Message):
    """Stir the memory of an engine, several times; the result is `Stirred`."""

    times: int = 1


@frozen
class Stirred(Message):
    """How often the memory was stirred."""

    times: int


'''
ROW = """
EngineOperation(
    kind=Kind(90, Stir, result=Stirred),
    result_kind=Kind(91, Stirred),
    name="stir",
    participle="stirred",
    summary="Stir the memory of every engine.",
    within_s=10.0,
    path="/stir",
    leaves_service=True,
    example={"times": 2},
),
"""
IMPORTS = """
from protocol.messages.operations import Stir, Stirred
"""
HANDLED = """
Stir: self._stir,
"""
SIMULATED = """
async def _stir(self, request: Message) -> Stirred:
    assert isinstance(request, Stir)
    await trio.sleep(0.2)
    if request.times > 9:
        raise Overloaded("the memory is dizzy")
    return Stirred(request.times)

"""
HOST = """
async def _stir(self, request: Message) -> Stirred:
    assert isinstance(request, Stir)
    return Stirred(request.times)

"""
FILE = """
[gateway]
port = 0
[model.tiny]
path = "{tiny}"
[engine.one]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
[engine.two]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""
ASKED = """
import argparse, json, random
from contextlib import suppress
from pathlib import Path

import trio
from protocol.errors import PeerLost, RequestError
from protocol.link.peer import Peer
from protocol.messages.cluster import GetStatus
from protocol.messages.operations import Stir, Stirred
from supervisor.cli import engine
from supervisor.cli.output import CommandConsole
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.http.routes import ROUTES
from supervisor.links.link import Link
from supervisor.supervision.supervise import supervise
from tests.rig.assembly import built_assembly
from tests.rig.fake_host import far_engine
from tests.rig.gateway import Client, head, post
from tests.rig.network import sim_pair
from tests.system.fuzz import bodies

def show(*words):
    print(*words, flush=True)

async def run(link):
    with suppress(PeerLost):
        await link.run()

async def over_a_link(worker):
    near, far = sim_pair()
    services = {{("one", Stir): worker.services[Stir]}}
    asker, served = Link(near, Peer("b", serves_max=0)), Link(far, Peer("a", serves_max=8), services)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, asker)
        nursery.start_soon(run, served)
        await asker.wait_ready()
        async with asker.ask(Stir(2), 0, "one") as answer:
            show(await answer.result())
        nursery.cancel_scope.cancel()

async def over_http(gateway, engines):
    async def stir():
        reply = await client.ask(post({{"times": 3}}, "/stir"))
        show(reply.status, reply.body.decode())

    client = Client(await trio.open_tcp_stream("127.0.0.1", gateway.port.number))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stir)
        await trio.sleep(0.1)
        show(engines["one"].current, engines["one"].status_text)
    show(engines["one"].in_service, engines["one"].live is not None)
    for path, body in (("/stir?engine=two", {{}}), ("/stir?engine=one", {{"times": 10}}), ("/stir?engine=x", {{}})):
        reply = await client.ask(post(body, path))
        show(reply.status, reply.body.decode())
    for asked in (post({{"time": 3}}, "/stir"), head("POST", "/stir", sec_fetch_site="cross-site")):
        show((await client.ask(asked)).error["message"])
    described = (await client.ask(head("GET", "/openapi.json"))).json["paths"]["/stir"]["post"]
    show(described["summary"], described["description"], described["requestBody"]["content"]["application/json"])

class Nodes:
    routes = {{}}

    def __init__(self, controls):
        self.controls = controls

    async def poll(self):
        return {{"main": await self.ask("main", GetStatus("main"))}}

    async def ask(self, name, request):
        async with self.controls.services["", type(request)].ask(request, 0) as answer:
            return await answer.result()

async def by_the_command_line(controls):
    parser = argparse.ArgumentParser()
    engine.add_operations(parser)
    for words in ("all stir --times 4", "two stir --times 10", "two stir --times much"):
        options, console = parser.parse_args(words.split()), CommandConsole(width=200)
        try:
            show(await engine.operate(Nodes(controls), console, options.engine, engine.read_request(options)))
        except RequestError as error:
            show(error)

async def main():
    async with far_engine() as far:
        show(await far.engine.operate(Stir(5)))
    assembly, _ = built_assembly(read_cluster(Path({file!r})), "main")
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: supervise(assembly.tree, rng=random.Random(0), task_status=task_status))
        await over_a_link(assembly.directory.local["one"])
        await over_http(assembly.gateway, assembly.engines)
        await by_the_command_line(assembly.controls)
        nursery.cancel_scope.cancel()
    (described,) = [each for each in ROUTES.operations if each.path == "/stir"]
    show(bodies.body(random.Random(0), described))

trio.run(main)
"""
IN_THE_HOST = """
import asyncio, sys
from types import ModuleType, SimpleNamespace

for name in ("sglang.srt.managers.io_struct", "sglang.srt.managers.tokenizer_manager"):  # which takes long to import
    module = sys.modules[name] = ModuleType(name)
    module.__getattr__ = lambda name: object
from actors.engines.blocks.block_log import BlockLog
from actors.engines.sglang.host.operations import Operations
from protocol.messages.operations import Stir, operation_names

operations = Operations(SimpleNamespace(), list, None, BlockLog("a"))
print("stir" in operation_names(operations.handlers), asyncio.run(operations.operate(Stir(6))))
"""
DIZZY = "engine main/one was not stirred: the memory is dizzy"


def test_an_operation_is_added_by_its_row_and_a_handler_in_each_kind_of_engine(tmp_path: Path) -> None:
    copy = scratch(tmp_path)
    row, simulated, host = (
        "protocol/messages/operations.py",
        "actors/engines/simulated/engine.py",
        "actors/engines/sglang/host/operations.py",
    )
    copy.insert(row, "OPERATIONS = (", CLASSES)
    copy.insert(row, "    EngineOperation(\n        kind=Kind(9, FlushCache", ROW)
    for engine, handler in ((simulated, SIMULATED), (host, HOST)):
        copy.insert(engine, "from protocol.messages.operations import", IMPORTS)
        copy.insert(engine, "            FlushCache: self._flush_cache,", HANDLED)
        copy.insert(engine, "    async def _flush_cache(self", handler)
    assert copy.touched == {row, simulated, host}
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.format(tiny=ROOT / "examples" / "tiny"))
    written = copy.program(ASKED.format(file=str(file))).splitlines()
    adapter, link, out_of_service, answered, in_service, one, failed, unknown, mistake, foreign, described, *rest = (
        written
    )
    assert (adapter, link) == ("Stirred(times=5)", "Stirred(times=2)")
    assert out_of_service == "None is out of service: stir runs"
    assert answered == '200 {"main/one":{"times":3},"main/two":{"times":3}}'
    assert in_service == "True True"
    assert one == '200 {"main/two":{"times":1}}'
    assert failed.startswith("503 ")
    body = json.loads(failed.partition(" ")[2])
    assert body["error"]["message"] == DIZZY
    assert body["engines"]["main/one"]["error"]["code"] == "overloaded"
    assert unknown.startswith("404 ")
    assert mistake == "time: is not a key here; did you mean times?"
    assert foreign == "other sites' pages may not use this server"
    assert described.startswith("Stir the memory of every engine. Requires an admin key, if the server requires keys.")
    assert "'$ref': '#/components/schemas/Stir'" in described
    assert sorted(rest[:2]) == ['main/one was stirred: {"times": 4}', 'main/two was stirred: {"times": 4}']
    assert rest[2:] == [
        *("0", "main/two was not stirred: the memory is dizzy", "1", 'times: expected an integer, got "much"'),
        "{'times': 2}",
    ]
    assert copy.program(IN_THE_HOST) == "True Stirred(times=6)\n"
