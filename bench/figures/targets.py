"""The targets of what a token and a request cost, and where their figures are in the kept results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import field, frozen

from bench.cost.options import STEP_MS
from bench.cost.sample import Sample
from bench.cost.trends import memory_growths
from bench.figures.kept import OURS, Kept
from bench.versus.ratios import FIGURES, Figure, Pair

SLACK = 1.05  # by which a price may rise from one number of clients to the next and count as flat
CURVE = (1, 8, 64, 256, 1000)  # clients
GATEWAY_GROUP = "node front"  # with a number where it has several processes
WS, CHAT = "responses-ws", "chat"


@frozen
class Found:
    """The values of one target; the peer's and ours where it is a ratio of the two."""

    values: Sequence[float]
    theirs: Sequence[float] = ()
    ours: Sequence[float] = ()


@frozen(kw_only=True)
class Target:
    """One row: a figure that should be at most, or at least, a limit."""

    what: str
    result: str  # the name of the file that has it
    find: Callable[[Kept], Found]
    most: float | None = None
    least: float | None = None
    unit: str = ""
    worst: bool = False  # the worst of the values decides, where none may be beyond the limit; else their median

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"{'<=' if self.least is None else '>='} {self.least if self.most is None else self.most:g}{self.unit}"

    def decisive(self, values: Sequence[float]) -> float:
        """Return the value that is compared with the limit."""
        if self.worst:
            return max(values) if self.least is None else min(values)
        return statistics.median(values)

    def met(self, values: Sequence[float]) -> bool:
        """Whether the values keep the limit."""
        value = self.decisive(values)
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)


@frozen
class Ratio:
    """The ratios of ours to a peer's in one load of `versus`."""

    figure: Figure
    api: str = field(kw_only=True)
    clients: int = field(kw_only=True)
    tokens: int = field(default=128, kw_only=True)

    def __call__(self, kept: Kept) -> Found:
        """Return the ratio of each round."""
        pairs = [
            Pair(theirs, ours) for theirs, ours in zip(*kept.sides(self.api, self.clients, self.tokens), strict=True)
        ]
        ratios = [ratio for pair in pairs if (ratio := pair.ratio(self.figure)) is not None]
        ratios = ratios if len(ratios) == len(pairs) else []  # those of the other rounds would decide alone
        return Found(ratios, [self.figure(pair.theirs) for pair in pairs], [self.figure(pair.ours) for pair in pairs])


@frozen
class Gap:
    """The longest gap between the tokens of a stream beyond the engine's step, in milliseconds."""

    clients: int

    def __call__(self, kept: Kept) -> Found:
        """Return the gap of each start less the step as asked for: a median gap has the delays of the server in it."""
        samples = [each for each in kept.samples.get(OURS, []) if is_load(each, WS, self.clients)]
        return Found([each.gap_max_ms - _step_ms(kept) for each in samples])


def is_load(sample: Sample, api: str, clients: int) -> bool:
    """Whether a sample is of so many clients of this API."""
    return (sample.load.api, sample.load.clients) == (api, clients)


def _step_ms(kept: Kept) -> float:
    """Return the step of the simulated engine, by the command of a result."""
    words = list(kept.result.command)
    return float(words[words.index("--step-ms") + 1]) if "--step-ms" in words else STEP_MS


@frozen
class ClientMemory:
    """The memory of a client in the gateway's node, in kB."""

    clients: int

    def __call__(self, kept: Kept) -> Found:
        """Return the growth of the peak beyond that of the first load, over the clients that are more."""
        grown = memory_growths(kept.samples.get(OURS, []))
        return Found([kb["node front"] for sample, kb in grown if is_load(sample, WS, self.clients)])


def steepest(kept: Kept) -> Found:
    """Return, for each API, the greatest ratio of the price of a token to that at the next lower number of clients.

    Nothing if an API lacks one of the numbers, since the steep rise may be there.
    """
    prices: dict[str, dict[int, list[float]]] = {}
    for sample in kept.samples.get(OURS, []):
        of_clients = prices.setdefault(sample.load.api, {})
        of_clients.setdefault(sample.load.clients, []).append(1e6 * sample.outside.cpu_s / sample.tokens)
    if not all(of_clients.keys() >= set(CURVE) for of_clients in prices.values()):
        return Found(())
    values = []
    for of_clients in prices.values():
        medians = [statistics.median(of_clients[clients]) for clients in sorted(of_clients)]
        values.append(max(after / before for before, after in pairwise(medians)))
    return Found(values)


def gateway_us(sample: Sample) -> float:
    """Return the CPU time of a request in the gateway's nodes alone, in microseconds: the engines' would dilute it."""
    spent = (each.cpu_s for group, each in sample.groups.items() if group.startswith(GATEWAY_GROUP))
    return 1e6 * sum(spent) / sample.requests


def busiest_share(kept: Kept) -> Found:
    """Return the share of the busier of two gateway processes in what both spent, over an equal share."""
    values = []
    for sample in kept.samples.get(OURS, []):
        spent = [each.cpu_s for group, each in sample.groups.items() if group.startswith(f"{GATEWAY_GROUP}-")]
        if len(spent) > 1:
            values.append(max(spent) * len(spent) / sum(spent))
    return Found(values)


def of_table(title: str, row: str) -> Callable[[Kept], Found]:
    """Return a function that takes the values of one row of a document's own table."""

    def find(kept: Kept) -> Found:
        rows = {str(cells[0]): cells for cells in kept.rows(title)}
        theirs, ours, values = (cell if isinstance(cell, list) else [] for cell in rows[row][1:4])
        return Found(values, theirs, ours)

    return find


TOKEN, REQUEST, SPEED = "CPU us a token", "CPU us a request", "tokens/s"
SGLANG, DYNAMO, MOCKER = " x SGLang's server", " x Dynamo", " x Dynamo and its mocker"
ADDED = "Through a node, and the bare engine"


def _pair(what: str, result: str, ratio: Ratio, most: float, unit: str) -> Target:
    return Target(what=what, result=result, find=ratio, most=most, unit=unit)


def _mocked(tokens: int, clients: int) -> Target:
    figure, most = (TOKEN, 0.8) if tokens > 16 else (REQUEST, 0.7)
    what = f"{figure}, simulated engine, all processes, chat, {clients} clients, {tokens} tokens"
    return _pair(
        what, "versus-dynamo-mocker", Ratio(FIGURES[figure], api=CHAT, clients=clients, tokens=tokens), most, MOCKER
    )


def _real(api: str, clients: int, result: str, most: float, unit: str, where: str = "") -> Target:
    what = f"{TOKEN} outside the scheduler, {clients} clients, {api}{where}"
    return _pair(what, result, Ratio(FIGURES[TOKEN], api=api, clients=clients), most, unit)


TARGETS = (
    _real(WS, 64, "versus-sglang", 0.2, SGLANG),
    _real(WS, 64, "versus-dynamo", 0.15, DYNAMO),
    _real(CHAT, 64, "versus-sglang", 0.22, SGLANG),
    _real(WS, 16, "versus-sglang-16", 0.35, SGLANG),
    _real(CHAT, 16, "versus-sglang-16", 0.35, SGLANG),
    _real(WS, 64, "versus-sglang-nodes", 0.3, SGLANG, ", two nodes"),
    _real(CHAT, 64, "versus-sglang-nodes", 0.3, SGLANG, ", two nodes"),
    *(
        Target(
            what=f"{SPEED}, real engine, 64 clients, {api}",
            result=result,
            find=Ratio(FIGURES[SPEED], api=api, clients=64),
            least=least,
            unit=unit,
        )
        for result, least, unit in (("versus-sglang", 1.15, SGLANG), ("versus-dynamo", 1.25, DYNAMO))
        for api in (WS, CHAT)
    ),
    *(_mocked(tokens, clients) for tokens in (128, 16) for clients in (32, 256)),
    *(
        _pair(
            f"{figure}, 128 clients ask at once, chat",
            "versus-dynamo-mocker-burst",
            Ratio(FIGURES[figure], api=CHAT, clients=128, tokens=16),
            1.0,
            MOCKER,
        )
        for figure in ("first token p50 ms", "first token p99 ms")
    ),
    *(
        Target(what=what, result="added-latency", find=of_table(ADDED, row), most=most, unit=unit)
        for what, row, most, unit in (
            ("added to the first token, one client, over the bare engine", "first token p50 ms, 1 client", 2.0, " ms"),
            ("gap p99, 64 clients, over the bare engine's", "gap p99 ms, 64 clients", 1.2, " x"),
        )
    ),
    Target(
        what="longest gap beyond the engine's step, 1,000 WebSocket clients, 20 tokens/s each",
        result="streams",
        find=Gap(1000),
        most=250.0,
        unit=" ms",
        worst=True,
    ),
    *(
        Target(
            what=f"memory of a WebSocket with a request in the gateway's node, {clients:,} clients",
            result="streams",
            find=ClientMemory(clients),
            most=60.0,
            unit=" kB",
        )
        for clients in (1000, 4096)
    ),
    Target(
        what="steepest rise of the CPU time a token from 1 to 8, 64, 256, 1,000 clients",
        result="clients",
        find=steepest,
        most=SLACK,
        unit=" x",
        worst=True,
    ),
    Target(
        what="two gateway processes on a port: CPU of the busier over an equal share",
        result="gateways",
        find=busiest_share,
        most=1.1,
        unit=" x",
    ),
    Target(
        what="two gateway processes on a port: CPU us a request, of the gateway's nodes",
        result="gateways",
        find=Ratio(gateway_us, api=CHAT, clients=256, tokens=16),
        most=1.05,
        unit=" x one process",
    ),
)
