"""Messages between nodes: announcements of their states, and the requests of operators.

A `NodeState` replaces the one before it; a `LoadUpdate` holds only changes, so that none may be left out. Every number
and name in an announcement was chosen by the sender, which may be faulty or hostile: a receiver calls `check_state` or
`check_loads` before it uses any of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import StrEnum

from attrs import evolve, field, frozen

from protocol.errors import PeerViolation
from protocol.messages.engine import Done, EngineInfo
from protocol.messages.kind import Kind, Message
from protocol.tensors import Tensor
from protocol.weights_record import FIRST_WEIGHTS, WeightsRecord

COUNT_MAX = 2**53
RANKS_MAX = 1024
RANK_MARK = "#"
"""The character between an engine's name and a rank's number, if the engine has several data-parallel ranks."""
OPERATOR_PREFIX = "operator-"
"""The beginning of operators' names in a greeting; no node may have such a name."""


class Leg(StrEnum):
    """The part of a request that an engine computes; `BOTH` are a prefill and a decode.

    Only `substitutes` and `serve_text` combine the legs of a model's workers.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"  # images and videos to embeddings, for prefills and whole engines
    EMBED = "embed"  # whole requests of another sort: texts to vectors, and pairs of texts to scores

    @property
    def substitutes(self) -> tuple[Leg, ...]:
        """The legs of workers that can do the work of this leg: itself, and `BOTH`."""
        return (self,) if self in {Leg.BOTH, Leg.ENCODE, Leg.EMBED} else (self, Leg.BOTH)

    @property
    def generates(self) -> bool:
        """Whether engines of this leg take part in computing answers: not encoders, and not embedders."""
        return self not in {Leg.ENCODE, Leg.EMBED}


def serve_text(legs: Collection[Leg]) -> bool:
    """Whether workers of these legs can answer a request of their model without images and videos."""
    return not {Leg.BOTH, Leg.EMBED}.isdisjoint(legs) or (Leg.PREFILL in legs and Leg.DECODE in legs)


def rank_name(engine: str, rank: int, ranks: int) -> str:
    """Return the name of one rank of an engine as a worker: the engine's own name if it has one rank."""
    return engine if ranks == 1 else f"{engine}{RANK_MARK}{rank}"


def engine_and_rank(worker: str) -> tuple[str, int]:
    """Return the name of a worker's engine, and the number of its rank there."""
    if RANK_MARK not in worker:
        return worker, 0
    engine, _, rank = worker.partition(RANK_MARK)
    return engine, int(rank)


@frozen
class Offer:
    """One worker of a node: an engine, or one rank of it if it has several, and its load.

    `engine` is None until the engine has been ready once; `up` is whether it accepts requests now, and `why` the reason
    if not, as the end of a sentence beginning with its name. `running` and `waiting` count requests, `tokens` their
    prompt and answer tokens at most, `kv_used` is from 0 to 1. The worker accepts prompts without a first token up to
    `pending_prefill_tokens_max` tokens together, or one longer prompt, and behind them as many again if it computes
    answers as well; 0: no limit. `weights` are those of the engine now.
    """

    name: str
    model: str
    leg: Leg
    slots: int
    up: bool
    engine: EngineInfo | None = None
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    kv_used: float = 0.0
    why: str = ""
    pending_prefill_tokens_max: int = 0
    weights: WeightsRecord = FIRST_WEIGHTS


@frozen
class Neighbour:
    """Another node in the sender's view: its name, its address if it listens, and whether it routes requests."""

    name: str
    address: str | None
    routes: bool = False


@frozen
class NodeState(Message):
    """The state of a node; a node that drains accepts no new requests.

    A node that `routes` receives the offers of others, and their loads at most once every `announce_s`; other nodes
    receive none. The load in an offer leaves out the receiver's own requests: the receiver counts them itself.
    `elsewhere` names the receiver's workers that are down and have a stand-in. `takes_encoders`, `takes_embedders`,
    `watched` and `takes_ranks` protect nodes of older versions, which would end the link for an unknown leg, a
    `WatchBlocks` or a rank's name.
    """

    offers: tuple[Offer, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    draining: bool = False
    routes: bool = False
    announce_s: float = 0.0
    elsewhere: tuple[str, ...] = ()
    takes_encoders: bool = False
    watched: bool = False
    takes_ranks: bool = False
    takes_embedders: bool = False


@frozen
class InFlightCounts:
    """The load of one worker without the receiver's own: requests, and their tokens at most.

    `queued` is an estimate of the prompt tokens still to be computed.
    """

    name: str
    requests: int
    tokens: int
    queued: int = 0


@frozen
class LoadUpdate(Message):
    """The loads that have changed since the sender's last announcement."""

    loads: tuple[InFlightCounts, ...]


OFFERS_MAX = 1024
WHY_LENGTH_MAX = 600
NEIGHBOURS_MAX = 4096
ANNOUNCE_S_MAX = 3600.0
PORT = r"([0-9]{1,4}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
_WORKER_NAME = re.compile(_NAME.pattern + rf"({RANK_MARK}(0|[1-9][0-9]{{0,3}}))?")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]{2,45}\]|[A-Za-z0-9._-]{1,253}):" + PORT)


def check_state(state: NodeState) -> NodeState:
    """Return the announced state of a node; raises `PeerViolation` for an impossible one."""
    if max(len(state.offers), len(state.elsewhere)) > OFFERS_MAX or len(state.neighbours) > NEIGHBOURS_MAX:
        raise PeerViolation(f"{len(state.offers)} offers and {len(state.neighbours)} neighbours of one node")
    if not 0 <= state.announce_s <= ANNOUNCE_S_MAX:
        raise PeerViolation(f"announce_s is {state.announce_s}; it must be from 0 to {ANNOUNCE_S_MAX}")
    names = [offer.name for offer in state.offers]
    if len(set(names)) < len(names):
        raise PeerViolation("two offers of one name")
    for offer in state.offers:
        pending_max = offer.pending_prefill_tokens_max
        numbers = (offer.slots - 1, offer.running, offer.waiting, offer.tokens, pending_max)
        if not (_WORKER_NAME.fullmatch(offer.name) and _NAME.fullmatch(offer.model)):
            raise PeerViolation("the name or the model of an offer is invalid")
        if len(offer.why) > WHY_LENGTH_MAX:
            raise PeerViolation(f"the reason of offer {offer.name} has more than {WHY_LENGTH_MAX} characters")
        if min(numbers) < 0 or max(numbers) > COUNT_MAX or not 0 <= offer.kv_used <= 1:
            raise PeerViolation(f"offer {offer.name} has impossible numbers")
    if not all(map(_WORKER_NAME.fullmatch, state.elsewhere)):
        raise PeerViolation("the name of a worker that others can stand in for is invalid")
    _check_neighbours(state.neighbours)
    return state


def _check_neighbours(neighbours: tuple[Neighbour, ...]) -> None:
    for neighbour in neighbours:
        has_address = neighbour.address is None or _ADDRESS.fullmatch(neighbour.address)
        if not (_NAME.fullmatch(neighbour.name) and has_address):
            raise PeerViolation("the name or the address of a neighbour is invalid")
        if neighbour.name.startswith(OPERATOR_PREFIX):
            raise PeerViolation("a neighbour with the name of an operator")


def check_loads(loads: LoadUpdate) -> LoadUpdate:
    """Return announced loads; raises `PeerViolation` for impossible ones."""
    if len(loads.loads) > OFFERS_MAX:
        raise PeerViolation(f"{len(loads.loads)} loads of one node")
    for load in loads.loads:
        numbers = load.requests, load.tokens, load.queued
        if min(numbers) < 0 or max(numbers) > COUNT_MAX:
            raise PeerViolation("a load has impossible numbers")
    return loads


@frozen
class GetStatus(Message):
    """Ask for the supervision tree of a node and its view of the cluster; the result is `Status`.

    `node` names it; empty: the receiver. A request about another node is forwarded over its link.
    """

    node: str = ""


@frozen
class ChildState:
    """One child of a tree: its path, its state for `since_s` seconds, and the number of its restarts.

    `why` is its last failure, empty if there was none.
    """

    path: str
    state: str
    restarts: int
    since_s: float
    about: str = ""
    why: str = ""


@frozen
class LinkState:
    """One link of a node: the node at its other end, whether it is up, and its traffic."""

    node: str
    up: bool
    silent_s: float = 0.0
    streams: int = 0
    messages_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    stalled: bool = False  # the other node's process does not run


@frozen
class GateState:
    """The numbers of clients' requests in a gateway, running or waiting for admission, with their limits.

    `unready` is the reason why it has admitted no request since it started, empty if it admits.
    """

    running: int
    running_max: int
    waiting: int
    waiting_max: int
    unready: str = ""


@frozen
class EjectionState:
    """A worker, or a pair of workers, ejected by a router after repeated failures, for `for_s` more seconds."""

    model: str
    worker: str
    why: str
    for_s: float


@frozen
class PoolState:
    """A pool of engines in a gateway's view: the number that is `up`, with their requests and slots.

    Each data-parallel rank counts as an engine. `waiting` requests wait at this gateway for room in the pool.
    """

    name: str
    model: str
    leg: Leg
    priority: int
    engines: int
    up: int
    busy: int
    slots: int
    waiting: int


@frozen
class Status(Message):
    """A node's tree and its view of the cluster; `run` is unique to each run of the node.

    `gate` is None on a node without a gateway; `refused` has a sentence for each unused worker. `weights` has by model
    the newest record of any engine.
    """

    node: str
    run: str
    version: str
    up_s: float
    state: NodeState
    tree: tuple[ChildState, ...]
    links: tuple[LinkState, ...] = ()
    gate: GateState | None = None
    refused: tuple[str, ...] = ()
    aside: tuple[EjectionState, ...] = ()
    pools: tuple[PoolState, ...] = ()
    weights: dict[str, WeightsRecord] = field(factory=dict)


@frozen
class Drain(Message):
    """Drain a node: admit nothing new, finish running requests, exit; the result, `Done`, is sent at once.

    `node` names it as in `GetStatus`. If it `restarts`, its launcher starts it again.
    """

    node: str = ""
    restarts: bool = False


@frozen
class Reload(Message):
    """Make a node read its configuration again; the result is `Reloaded`. `node` names it as in `GetStatus`."""

    node: str = ""


@frozen
class Reloaded(Message):
    """The changes of a reload, one sentence each: made, in need of a restart (`not_changed`), or refused as wrong.

    `starts` names unreachable nodes of the same machine, which its launcher may be starting.
    """

    changed: tuple[str, ...] = ()
    not_changed: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@frozen
class Operate(Message):
    """Have an engine of a node carry out an operation, by its name; the result is `Operated`.

    `fields` are those of the operation's request, as a JSON object, unless it takes a `file`. `node` names the node as
    in `GetStatus`. A node of an older version ends the link, so operators ask only for engines that list the operation.
    """

    engine: str
    operation: str
    fields: str = "{}"
    node: str = ""
    file: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The file as its one attachment, if there is one."""
        return () if self.file is None else (self.file,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Operate:
        """Return the message with its file replaced."""
        (file,) = tensors
        return evolve(self, file=file)


@frozen
class Operated(Message):
    """The fields of an operation's result, as a JSON object."""

    fields: str = "{}"


KINDS = (
    Kind(21, NodeState),
    Kind(22, GetStatus, result=Status),
    Kind(23, Status),
    Kind(24, Drain, result=Done),
    Kind(25, Reload, result=Reloaded),
    Kind(26, Reloaded),
    Kind(40, LoadUpdate),
    Kind(45, Operate, result=Operated),
    Kind(46, Operated),
)
