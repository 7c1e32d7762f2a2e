"""The command `engine`: an engine of the cluster, or every one, carries out an operation.

The words and their options are the rows of `protocol.messages.operations`. The node of each engine is asked, so an
operator needs no gateway, and each engine has an outcome of its own.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import attrs
import trio
from attrs import frozen
from rich.console import Console

from protocol.dialects.operations import of_file, outcome_json, parse
from protocol.errors import (
    BadRequest,
    EngineRefused,
    EspalierError,
    InternalError,
    NotReady,
    RequestError,
    Unsupported,
)
from protocol.messages.cluster import Offer, Operate, Operated, Status, engine_and_rank
from protocol.messages.engine_files import ReadFile
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_NAMED, OPERATION_OF, OPERATIONS, is_for
from protocol.messages.role import SetRole, left_unserved
from protocol.messages.weights import WeightsUpdated, numbered
from supervisor.cli.client import ClusterClient
from supervisor.cli.output import print_sentence
from supervisor.cli.saved_file import saved_file
from supervisor.cli.status_view import StatusOrError, newest_weights
from supervisor.cluster.model_weights import errors_of_others
from supervisor.cluster.rounds import RequestOfEach, in_rounds
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
        if is_for(operation, offer.leg) and (operation.scope is not OperationScope.MODEL or model in {"", offer.model})
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
    code = int(engine == EVERY and bool(unasked))
    if engine != EVERY and len(chosen) != 1:
        if chosen or engine.partition("/")[0] not in unasked:  # else its node may have it
            names = ", ".join(each.name for each in chosen or engines.values()) or "none"
            sentence = f"Several engines are named {engine}" if chosen else f"There is no engine {engine}; there is"
            print_sentence(console, f"{sentence}{':' * bool(chosen)} {names}.")
        chosen, code = [], 1
    if isinstance(request, SetRole) and chosen and not unasked:  # else not every engine is known
        newest = newest_weights(statuses)[chosen[0].offer.model]
        same = [each for each in engines.values() if each.offer.model == chosen[0].offer.model and each.offer.up]
        legs = {each.name: each.offer.leg for each in same if not newest.behind(each.offer.weights)}
        if (why := left_unserved(legs, chosen[0].name, request.role)) is not None:
            print_sentence(console, f"{chosen[0].name} was not {operation.participle}: {why}")
            return 1
    try:
        requests = _requests(request, chosen, list(engines.values()), statuses, alone=engine != EVERY)
    except BadRequest as error:
        print_sentence(console, str(error))
        return 1
    in_one_round = operation.rehearsal is None and operation.undo is None
    asking = _Asking(client, {each.name: each for each in chosen}, to, partial(_print, console, operation))
    outcomes = await in_rounds(operation, requests, partial(asking.ask_each, at_once=in_one_round))
    others = errors_of_others(requests, {each.name: each.offer.model for each in chosen}, _updated(outcomes))
    for name, outcome in sorted({**({} if in_one_round else outcomes), **others}.items()):
        _print(console, operation, name, outcome)
    for node, why in unasked.items():
        print_sentence(console, f"{node} was not asked: {why}")
    return max(code, int(bool(others)), *(int(isinstance(outcome, RequestError)) for outcome in outcomes.values()))


def _updated(outcomes: Mapping[str, object]) -> dict[str, WeightsUpdated]:
    """Return the results that tell of weights, from their fields."""
    wanted = {field.name for field in attrs.fields(WeightsUpdated)}
    return {
        name: WeightsUpdated(*(str(outcome[field]) for field in ("version", "checksum")))
        for name, outcome in outcomes.items()
        if isinstance(outcome, dict) and wanted <= outcome.keys()
    }


def _requests(
    request: Message, chosen: list[_Asked], engines: list[_Asked], statuses: Mapping[str, StatusOrError], *, alone: bool
) -> dict[str, Message]:
    """Return the request to each engine, behind the newest weights of its model that any node knows."""
    newest, number = newest_weights(statuses), Counter(each.offer.model for each in engines)
    return {
        each.name: numbered(request, newest[each.offer.model].record, alone=alone and number[each.offer.model] > 1)
        for each in chosen
    }


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


@frozen
class _Asking:
    """The engines that are asked, the way to each, and the function that takes the outcome of each."""

    client: ClusterClient
    asked: Mapping[str, _Asked]
    to: Path
    take: Callable[[str, object], None]
    limiters: defaultdict[object, trio.CapacityLimiter] = attrs.field(
        init=False, factory=lambda: defaultdict(lambda: trio.CapacityLimiter(ASKED_MAX))
    )

    async def ask_each(self, requests: RequestOfEach, *, at_once: bool) -> dict[str, object | RequestError]:
        """Ask engines concurrently, and return the fields of the result or the error of each."""
        outcomes = dict[str, object | RequestError]()

        async def ask(name: str, request: Message) -> None:
            async with self.limiters[self.client.routes.get(self.asked[name].node)]:
                outcomes[name] = await self._ask(self.asked[name], request)
            if at_once:
                self.take(name, outcomes[name])

        async with trio.open_nursery() as nursery:
            for name, request in requests.items():
                nursery.start_soon(ask, name, request)
        return outcomes

    async def _ask(self, asked: _Asked, request: Message) -> object | RequestError:
        """Ask one engine."""
        await trio.lowlevel.checkpoint()
        operation = OPERATION_OF[type(request)]
        if (refusal := _refusal(asked, operation)) is not None:
            return refusal

        async def ask(request: Message) -> object:
            file = request.tensors[0] if operation.takes_file else None
            fields = outcome_json(request).decode() if file is None else "{}"
            answer = await self.client.ask(asked.node, Operate(asked.engine, operation.name, fields, asked.node, file))
            assert isinstance(answer, Operated)  # nothing else answers an Operate
            return json.loads(answer.fields)

        try:
            return await saved_file(request, ask, self.to) if isinstance(request, ReadFile) else await ask(request)
        except RequestError as error:
            return error
        except EspalierError as error:
            return NotReady(str(error))
        except OSError as error:
            return EngineRefused(f"its file cannot be saved: {error.strerror or error}")
        except ValueError:
            return InternalError("its node answered with something else")


def _refusal(asked: _Asked, operation: EngineOperation) -> RequestError | None:
    """Return why an engine is not asked: a node of an older version would end the link."""
    if (info := asked.offer.engine) is None:
        return NotReady("it is starting")
    if operation.name not in info.operations:
        return Unsupported(operation.unlisted.replace("this engine", "it"))
    return None


def _print(console: Console, operation: EngineOperation, name: str, outcome: object) -> None:
    """Print the outcome of one engine."""
    if isinstance(outcome, RequestError):
        print_sentence(console, f"{name} was not {operation.participle}: {outcome}")
        return
    done = printable(f"{name} was {operation.participle}")
    # A result is printed as a whole, however long it is.
    for line in _lines(done, outcome):
        console.print(line, markup=False, emoji=False, soft_wrap=True)


def _lines(done: str, result: object) -> Iterator[str]:
    """Yield the lines of an outcome: its fields as JSON in ASCII, then each text of several lines, made printable."""
    fields = result if isinstance(result, dict) else {}
    pages = {name: value for name, value in fields.items() if isinstance(value, str) and "\n" in value}
    rest = {name: value for name, value in fields.items() if name not in pages}
    yield f"{done}: {json.dumps(rest)}" if rest else done
    for text in pages.values():
        yield from map(escaped, text.splitlines())
