"""The command `engine`: an engine of the cluster, or every one, carries out an operation.

The words and their options are the rows of `protocol.messages.operations`. The node of each engine is asked, so an
operator needs no gateway, and each engine has an outcome of its own.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import attrs
import trio
from attrs import frozen
from rich.console import Console

from protocol.dialects.operations import of_file, outcome_json, parse
from protocol.errors import BadRequest, EspalierError
from protocol.messages.cluster import Leg, Offer, Operate, Operated, Status, engine_and_rank
from protocol.messages.engine_files import ReadFile
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_NAMED, OPERATION_OF, OPERATIONS
from protocol.messages.role import SetRole, left_unserved
from supervisor.cli.client import ClusterClient
from supervisor.cli.output import print_sentence
from supervisor.cli.saved_file import saved_file
from supervisor.cli.status_view import StatusOrError
from supervisor.printable import escaped, printable

EVERY = "all"  # in the place of an engine's name
ASKED_MAX = 8  # engines at a time by one route: a node takes twice as many operators


def add_operations(parser: argparse.ArgumentParser) -> None:
    """Add the words of all operations to a parser, each with an option for each field of its request."""
    parser.add_argument("engine", metavar="NAME", help=f"its name, alone or as NODE/NAME; {EVERY!r} for every engine")
    words = parser.add_subparsers(dest="operation", required=True, metavar="OPERATION")
    for operation in OPERATIONS:
        word = words.add_parser(operation.name, help=operation.summary)
        for field in attrs.fields(operation.request):  # type: ignore[arg-type]  # every message is an attrs class
            option = f"--{field.name.replace('_', '-')}"
            word.add_argument(option, dest=f"field {field.name}", required=field.default is attrs.NOTHING)
        if operation.saves:
            word.add_argument("--to", type=Path, default=Path(), help="the file, or its folder; by default this one")


def read_request(options: argparse.Namespace) -> Message:
    """Return the request that the options have; raises the `RequestError` that lists all mistakes in them."""
    operation = OPERATION_NAMED[options.operation]
    types = get_type_hints(operation.request)
    given = {name.removeprefix("field "): value for name, value in vars(options).items() if name.startswith("field ")}
    if operation.takes_file:
        (path,) = given.values()
        try:
            return of_file(operation, Path(path).read_bytes())
        except OSError as error:
            raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from None
    fields = {name: _value(value, types[name]) for name, value in given.items() if value is not None}
    return parse(operation, json.dumps(fields))


def _value(text: str, kind: object) -> object:
    """Return an option as the JSON value that it is, or as text if it is none, or if text is wanted."""
    kinds = get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)
    if any(isinstance(each, type) and issubclass(each, str) for each in kinds):
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


@frozen
class _Asked:
    """One engine that is asked: its node, its name there, and what the node reports of it."""

    node: str
    engine: str
    offer: Offer

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return f"{self.node}/{self.engine}"


def _engines(statuses: Mapping[str, StatusOrError], operation: EngineOperation, model: str) -> dict[str, _Asked]:
    """Return the engines that an operation is for, by their names in the cluster."""
    asked = [
        _Asked(node, engine_and_rank(offer.name)[0], offer)
        for node, status in statuses.items()
        if isinstance(status, Status)
        for offer in status.state.offers
        if (operation.scope is OperationScope.ALL or offer.leg is not Leg.ENCODE)
        and (operation.scope is not OperationScope.MODEL or model in {"", offer.model})
    ]
    return {each.name: each for each in asked}


async def operate(client: ClusterClient, console: Console, engine: str, request: Message, to: Path = Path()) -> int:
    """Have the engine of a name, or every one, carry out an operation; print each outcome; return the exit code.

    A file that is fetched is saved at `to`.
    """
    operation, statuses = OPERATION_OF[type(request)], await client.poll()
    if engine == EVERY and operation.scope is OperationScope.ONE:
        print_sentence(console, f"{operation.name} is for one engine: name it.")
        return 1
    if operation.scope is OperationScope.MODEL and (why := _ambiguous(statuses, engine, request)) is not None:
        print_sentence(console, why)
        return 1
    engines = _engines(statuses, operation, getattr(request, "model", None) or "")
    unasked = _unasked(statuses, engine)
    chosen = [each for each in engines.values() if engine in {EVERY, each.name, each.engine}]
    codes = [int(engine == EVERY and bool(unasked))]
    if engine != EVERY and len(chosen) != 1:
        if chosen or engine.partition("/")[0] not in unasked:  # else its node may have it
            names = ", ".join(each.name for each in chosen or engines.values()) or "none"
            sentence = f"Several engines are named {engine}" if chosen else f"There is no engine {engine}; there is"
            print_sentence(console, f"{sentence}{':' * bool(chosen)} {names}.")
        chosen, codes = [], [1]
    if isinstance(request, SetRole) and chosen and not unasked:  # else not every engine is known
        same = [each for each in engines.values() if each.offer.model == chosen[0].offer.model and each.offer.up]
        legs = {each.name: each.offer.leg for each in same}
        if (why := left_unserved(legs, chosen[0].name, request.role)) is not None:
            print_sentence(console, f"{chosen[0].name} was not {operation.participle}: {why}")
            return 1
    limiters: defaultdict[object, trio.CapacityLimiter] = defaultdict(lambda: trio.CapacityLimiter(ASKED_MAX))

    async def ask(asked: _Asked) -> None:
        async with limiters[client.routes.get(asked.node)]:
            codes.append(await _ask(client, console, asked, request, to))

    async with trio.open_nursery() as nursery:
        for each in chosen:
            nursery.start_soon(ask, each)
    for node, why in unasked.items():
        print_sentence(console, f"{node} was not asked: {why}")
    return max(codes)


def _ambiguous(statuses: Mapping[str, StatusOrError], engine: str, request: Message) -> str | None:
    """Return why the engines of one model cannot be told, None if they can."""
    states = [status.state for status in statuses.values() if isinstance(status, Status)]
    models = sorted({offer.model for state in states for offer in state.offers})
    model = getattr(request, "model", None) or ""
    if engine == EVERY and not model and len(models) > 1:
        return f"Several models are served: {', '.join(models)}. Name one by --model."
    if model and model not in models:
        return f"There is no engine of a model {model!r}; there is {', '.join(models) or 'none'}."
    return None


def _unasked(statuses: Mapping[str, StatusOrError], engine: str) -> dict[str, str]:
    """Return the silent nodes that may have an engine of a name, with their reasons."""
    return {
        node: status
        for node, status in statuses.items()
        if isinstance(status, str) and ("/" not in engine or engine.startswith(f"{node}/"))
    }


async def _ask(client: ClusterClient, console: Console, asked: _Asked, request: Message, to: Path) -> int:
    """Have one engine carry out an operation, print its outcome, and return the exit code."""
    operation, info = OPERATION_OF[type(request)], asked.offer.engine
    why, result = "", None
    if info is None:
        why = "it is starting"
    elif operation.name not in info.operations:  # a node of an older version would end the link
        why = operation.unlisted.replace("this engine", "it")
    else:

        async def ask(request: Message) -> object:
            file = request.tensors[0] if operation.takes_file else None
            fields = outcome_json(request).decode() if file is None else "{}"
            answer = await client.ask(asked.node, Operate(asked.engine, operation.name, fields, asked.node, file))
            assert isinstance(answer, Operated)  # nothing else answers an Operate
            return json.loads(answer.fields)

        try:
            result = await saved_file(request, ask, to) if isinstance(request, ReadFile) else await ask(request)
        except EspalierError as error:
            why = str(error)
        except OSError as error:
            why = f"its file cannot be saved: {error.strerror or error}"
        except ValueError:
            why = "its node answered with something else"
    if why:
        print_sentence(console, f"{asked.name} was not {operation.participle}: {why}")
        return 1
    done = printable(f"{asked.name} was {operation.participle}")
    # A result is printed as a whole, however long it is.
    for line in _lines(done, result):
        console.print(line, markup=False, emoji=False, soft_wrap=True)
    return 0


def _lines(done: str, result: object) -> Iterator[str]:
    """Yield the lines of an outcome: its fields as JSON in ASCII, then each text of several lines, made printable."""
    fields = result if isinstance(result, dict) else {}
    pages = {name: value for name, value in fields.items() if isinstance(value, str) and "\n" in value}
    rest = {name: value for name, value in fields.items() if name not in pages}
    yield f"{done}: {json.dumps(rest)}" if rest else done
    for text in pages.values():
        yield from map(escaped, text.splitlines())
