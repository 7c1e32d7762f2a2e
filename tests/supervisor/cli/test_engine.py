"""The command `engine`: the words and options of the operations, and an outcome of each engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
import trio
from attrs import evolve, frozen
from rich.console import Console
from trio.testing import MockClock

from protocol.errors import BadRequest, Overloaded, PeerLost
from protocol.messages.adapters import UnloadAdapter
from protocol.messages.cluster import Leg, NodeState, Offer, Operate, Operated, Status
from protocol.messages.engine import Done, encoder_info
from protocol.messages.kind import Kind, Message
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_NAMED, OPERATION_OF, OPERATIONS, FlushCache, GetMetrics
from protocol.messages.role import SetRole
from supervisor.cli import client, engine
from supervisor.cli.status_view import StatusOrError
from supervisor.cluster.mesh import OPERATORS_MAX
from supervisor.config import schema
from tests.rig.encoders import MEDIA
from tests.rig.gateway import INFO

FLUSHES = evolve(INFO, operations=("flush-cache", "metrics"))
ENGINE = Offer("tiny-0", "tiny", Leg.BOTH, 4, up=True, engine=FLUSHES)
EYES = Offer("eyes", "tiny", Leg.ENCODE, 4, up=True, engine=encoder_info("x", "1", MEDIA, 8))
OLD = evolve(ENGINE, name="old", engine=INFO)
STARTS = evolve(ENGINE, name="starts", engine=None)
RANKS = tuple(evolve(ENGINE, name=f"wide#{rank}") for rank in range(2))


class Nodes(client.ClusterClient):
    """A client of nodes with these offers; an engine in `errors` answers with its error."""

    def __init__(self, errors: Mapping[str, Exception] | None = None, **offers: tuple[Offer, ...] | str) -> None:
        super().__init__(schema.Cluster(model={}, engine={}), b"", None, bytes)
        self.offers, self.errors = offers, errors or {}
        self.asked: list[Message] = []
        self.result = '{"text":"x 1"}'

    async def poll(self) -> dict[str, StatusOrError]:
        await trio.lowlevel.checkpoint()
        return {
            node: offers if isinstance(offers, str) else Status(node, "r", "1", 1.0, NodeState(offers), ())
            for node, offers in self.offers.items()
        }

    async def ask(self, name: str, request: Message) -> Message:
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        assert isinstance(request, Operate)
        if (error := self.errors.get(f"{name}/{request.engine}")) is not None:
            raise error
        return Operated(self.result if request.operation == "metrics" else "{}")


async def operate(nodes: Nodes, name: str, request: Message) -> tuple[int, list[str]]:
    """Return the exit code and what is printed."""
    written = StringIO()
    code = await engine.operate(nodes, Console(file=written, width=200), name, request)
    return code, written.getvalue().splitlines()


async def test_every_engine_has_an_outcome_of_its_own() -> None:
    nodes = Nodes(
        {"b/tiny-0": Overloaded("requests run"), "c/tiny-0": PeerLost("the link is lost")},
        a=(ENGINE, EYES, *RANKS),
        b=(ENGINE, OLD, STARTS),
        c=(ENGINE,),
        d="nobody listens",
    )
    code, lines = await operate(nodes, "all", FlushCache())
    assert code == 1
    assert sorted(lines) == [
        "a/eyes was flushed",
        "a/tiny-0 was flushed",
        "a/wide was flushed",
        "b/old was not flushed: it does not carry out flush-cache",
        "b/starts was not flushed: it is starting",
        "b/tiny-0 was not flushed: requests run",
        "c/tiny-0 was not flushed: the link is lost",
        "d was not asked: nobody listens",
    ]
    assert {(request.node, request.engine) for request in nodes.asked if isinstance(request, Operate)} == {
        *(("a", "eyes"), ("a", "tiny-0"), ("a", "wide"), ("b", "tiny-0"), ("c", "tiny-0"))
    }, "a node of an older version would end the link"


async def test_one_engine_is_named_and_its_result_is_printed() -> None:
    nodes = Nodes(a=(ENGINE, EYES), b=(ENGINE,))
    assert await operate(nodes, "b/tiny-0", GetMetrics()) == (0, ['b/tiny-0 was read: {"text": "x 1"}'])
    assert nodes.asked == [Operate("tiny-0", "metrics", "{}", "b")]
    nodes.result = r'{"text": "# TYPE x\nx{a=\"\u001b\"} 1\n", "left_out": 2}'
    lines = ['b/tiny-0 was read: {"left_out": 2}', "# TYPE x", r'x{a="\x1b"} 1']
    assert await operate(nodes, "b/tiny-0", GetMetrics()) == (0, lines), "a text of several lines is printed as such"
    assert await operate(nodes, "eyes", FlushCache()) == (0, ["a/eyes was flushed"])
    several = (1, ["Several engines are named tiny-0: a/tiny-0, b/tiny-0."])
    assert await operate(nodes, "tiny-0", FlushCache()) == several
    missing = (1, ["There is no engine eyes; there is a/tiny-0, b/tiny-0."])
    assert await operate(nodes, "eyes", GetMetrics()) == missing, "encoders have none"
    assert await operate(Nodes(), "x", FlushCache()) == (1, ["There is no engine x; there is none."])


async def test_a_silent_node_that_may_have_the_engine_is_named_with_its_reason() -> None:
    nodes, silent = Nodes(a=(ENGINE,), d="nobody listens"), "d was not asked: nobody listens"
    assert await operate(nodes, "d/tiny-0", FlushCache()) == (1, [silent])
    assert await operate(nodes, "a/tiny-0", FlushCache()) == (0, ["a/tiny-0 was flushed"])
    assert await operate(nodes, "tiny-0", FlushCache()) == (0, ["a/tiny-0 was flushed", silent])
    assert await operate(nodes, "oak", FlushCache()) == (1, ["There is no engine oak; there is a/tiny-0.", silent])


async def test_a_node_is_not_asked_by_more_operators_than_it_takes(autojump_clock: MockClock) -> None:
    class Counting(Nodes):
        open = most = 0

        async def ask(self, name: str, request: Message) -> Message:
            self.open += 1
            self.most = max(self.most, self.open)
            await trio.sleep(1)
            self.open -= 1
            return await super().ask(name, request)

    nodes = Counting(a=tuple(evolve(ENGINE, name=f"e{number}") for number in range(40)), b=(ENGINE,))
    nodes.routes = {"a": Path("a"), "b": Path("b")}
    code, lines = await operate(nodes, "all", FlushCache())
    assert (code, len(lines), nodes.most) == (0, 41, engine.ASKED_MAX + 1)
    assert 2 * engine.ASKED_MAX <= OPERATORS_MAX


async def test_an_operation_for_one_engine_is_not_asked_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = evolve(OPERATION_OF[FlushCache], scope=OperationScope.ONE)
    monkeypatch.setitem(OPERATION_OF, FlushCache, alone)
    nodes = Nodes(a=(ENGINE,))
    assert await operate(nodes, "all", FlushCache()) == (1, ["flush-cache is for one engine: name it."])
    assert await operate(nodes, "tiny-0", FlushCache()) == (0, ["a/tiny-0 was flushed"])


async def test_a_role_that_leaves_a_model_without_answers_is_refused_where_every_engine_is_known() -> None:
    one = evolve(ENGINE, engine=evolve(INFO, operations=("set-role",)))
    two, away = evolve(one, name="tiny-1"), evolve(one, name="tiny-1", up=False)
    prefill = SetRole(role=Leg.PREFILL)
    why = "a/tiny-0 was not given the role: no engine in service would be left for answers of its model"
    for nodes in (Nodes(a=(one,)), Nodes(a=(one,), b=(away,)), Nodes(a=(one,), b=(evolve(two, model="other"),))):
        assert await operate(nodes, "tiny-0", prefill) == (1, [why])
        assert nodes.asked == []
    assert await operate(Nodes(a=(one,), b=(two,)), "tiny-0", prefill) == (0, ["a/tiny-0 was given the role"])
    code, lines = await operate(Nodes(a=(one,), b="it is silent"), "tiny-0", prefill)
    assert (code, lines[0]) == (0, "a/tiny-0 was given the role")


async def test_an_operation_of_a_model_is_asked_of_its_engines_alone() -> None:
    pine = evolve(ENGINE, name="pine-0", model="pine")
    nodes = Nodes(a=(ENGINE, pine))
    model = ENGINE.model
    several = sorted((model, "pine"))
    assert await operate(nodes, "all", UnloadAdapter("x")) == (
        1,
        [f"Several models are served: {', '.join(several)}. Name one by --model."],
    )
    assert await operate(nodes, "all", UnloadAdapter("x", model="oak")) == (
        1,
        [f"There is no engine of a model 'oak'; there is {', '.join(several)}."],
    )
    code, (line,) = await operate(nodes, "all", UnloadAdapter("x", model="pine"))
    assert code == 1
    assert line.startswith("a/pine-0 was not freed of the adapter: it does not carry out unload-adapter: it needs")


async def test_a_result_is_printed_as_a_whole_and_controls_no_terminal() -> None:
    nodes = Nodes(a=(ENGINE,))
    nodes.result = '{"text": "' + "x" * 5000 + '\u009b2J\\n"}'
    code, (_, line) = await operate(nodes, "tiny-0", GetMetrics())
    assert (code, line) == (0, "x" * 5000 + r"\x9b2J")
    nodes.result = "{nothing"
    assert await operate(nodes, "tiny-0", GetMetrics()) == (
        1,
        ["a/tiny-0 was not read: its node answered with something else"],
    )


# The command line ---------------------------------------------------------------------


@frozen
class Resize(Message):
    """An operation with fields of several types."""

    label: str
    share: float = 1.0
    level_count: int | None = None
    forced: bool = False
    names: tuple[str, ...] = ()
    note: str | None = None


def read(*words: str) -> Message:
    """Return the request of a command line."""
    parser = argparse.ArgumentParser()
    engine.add_operations(parser)
    return engine.read_request(parser.parse_args(["all", *words]))


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> EngineOperation:
    row = evolve(OPERATION_OF[FlushCache], kind=Kind(90, Resize, result=Done), name="resize")
    monkeypatch.setattr(engine, "OPERATIONS", (*OPERATIONS, row))
    monkeypatch.setitem(OPERATION_NAMED, "resize", row)
    return row


@pytest.mark.usefixtures("resize")
def test_the_options_of_a_word_are_the_fields_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("flush-cache") == FlushCache()
    assert read("resize", "--label", "12") == Resize("12"), "text stays text"
    options = ("--label", "", "--share", "0.5", "--level-count", "3", "--forced", "true")
    assert read("resize", *options) == Resize("", 0.5, 3, forced=True)
    lists = ("--label", "x", "--names", '["a", "b"]', "--note", "null")
    assert read("resize", *lists) == Resize("x", names=("a", "b"), note="null")
    with pytest.raises(BadRequest) as caught:
        read("resize", "--label", "x", "--share", "half", "--level-count", "2.5")
    assert caught.value.detail.count("expected") == 2
    with pytest.raises(SystemExit):
        read("resize")
    assert "--label" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read("juggle")
