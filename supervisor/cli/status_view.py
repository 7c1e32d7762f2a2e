"""The status of a cluster as tables for a terminal: every node's tree, then engines, pools and links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, field, frozen
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from protocol.messages.cluster import ChildState, Offer, Reloaded, Status
from supervisor.cluster.model_weights import NewestWeights
from supervisor.printable import printable
from supervisor.supervision.registration import OUT_OF_SERVICE
from supervisor.supervision.status import READY

StatusOrError: TypeAlias = Status | str
"""The status of a node, or the reason why it is unknown."""

GOOD, WARN, BAD, DIM = "green", "yellow", "red", "dim"
VERBS = {"starting": "is starting", "ended": "has ended", "stopping": "is stopping", "stopped": "has stopped"}
VERBS |= {"not started": "is not started"}  # other states are verbs already
UNITS = ("B", "kB", "MB", "GB", "TB")
ABOUT = "about"
GAP = 2  # spaces between two columns
WIDTH_MIN, ABOUT_WIDTH_MIN = 32, 16  # columns are folded to these before one is left out


def render_status(name: str, statuses: Mapping[str, StatusOrError]) -> RenderableType:
    """Return the status of the whole cluster: first its problems, then everything."""
    statuses = _without_behind(statuses)
    answered = [status for status in statuses.values() if isinstance(status, Status)]
    head = Text.assemble(
        ("cluster ", DIM), (printable(name), "bold"), f"  {len(answered)} of {len(statuses)} nodes answer"
    )
    if gates := [status.gate for status in answered if status.gate is not None]:
        running, running_max = sum(gate.running for gate in gates), sum(gate.running_max for gate in gates)
        waiting, waiting_max = sum(gate.waiting for gate in gates), sum(gate.waiting_max for gate in gates)
        head.append(f", {running} of {running_max} requests run, {waiting} of {waiting_max} wait")
        head.append(f" at {len(gates)} gateways" if len(gates) > 1 else "")
    problems = list(_problems(statuses))
    if answered and not problems:
        head.append(", all is up", GOOD)
    lines = [_HangingText("  ", "    ", Text(printable(sentence), style)) for sentence, style in problems]
    parts = _trees(statuses), _engines(answered), _pools(answered), _links(answered)
    tables = [table for table in parts if table.rows]
    return Group(head, *lines, *(part for table in tables for part in (Text(), table)))


def _problems(statuses: Mapping[str, StatusOrError]) -> Iterator[tuple[str, str]]:
    """Yield one sentence for each problem, and its style."""
    for name, status in statuses.items():
        if isinstance(status, str):
            yield f"node {name} does not answer: {status}", BAD
            continue
        if status.state.draining:
            yield f"node {name} drains, {_count(running_requests(status), 'request')} on it", WARN
        parents = {child.path.rpartition("/")[0] for child in status.tree}
        for child in status.tree:
            if child.state != READY and (child.why or child.path not in parents):  # else its children have the reason
                yield f"{child.path} {VERBS.get(child.state, child.state)}{': ' * bool(child.why)}{child.why}", WARN
        out = (offer for offer in status.state.offers if offer.why.startswith(OUT_OF_SERVICE))
        yield from ((f"engine {name}/{offer.name} {offer.why}", WARN) for offer in out)
        yield from ((f"node {name} does without an engine: {sentence}", BAD) for sentence in status.refused)
        for ejection in status.aside:
            probe = f"is probed in {ejection.for_s:.0f} s" if ejection.for_s else "is being probed"
            yield f"{ejection.worker} keeps failing ({ejection.why}), is ejected by node {name} and {probe}", WARN
        for link in status.links:
            if not link.up and not isinstance(statuses.get(link.node), str):  # else that node has a sentence of its own
                yield f"node {name} has no link to node {link.node}", BAD
    versions = {status.version for status in statuses.values() if isinstance(status, Status)}
    if len(versions) > 1:
        yield f"nodes run different versions: {', '.join(sorted(versions))}", WARN


def running_requests(status: Status) -> int:
    """Return the number of a node's requests: at its gateway, or else on its engines."""
    if status.gate is not None:
        return status.gate.running + status.gate.waiting
    return sum(offer.running + offer.waiting for offer in status.state.offers)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def render_reload(name: str, result: Reloaded) -> RenderableType:
    """Return the result of one node's reload, a sentence a line."""
    text = Text(f"{printable(name)}:")
    if not (result.changed or result.not_changed or result.refused):
        text.append(" nothing has changed")
    for sentences, style in ((result.changed, GOOD), (result.not_changed, WARN), (result.refused, BAD)):
        for sentence in sentences:
            for line in sentence.split("\n"):  # the mistakes in a file, a line each
                text.append(f"\n  {printable(line)}", style)
    return text


@frozen
class _HangingText:
    """A text with one prefix before its first line, and another before each folded line."""

    first: str
    others: str
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, options.max_width - len(self.others))
        for number, line in enumerate(self.text.wrap(console, room, overflow="fold")):
            lead = self.others if number else self.first
            yield Text.assemble((lead[: options.max_width - room], DIM), line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self.cell_len)

    @property
    def cell_len(self) -> int:
        return len(self.others) + self.text.cell_len


Cell: TypeAlias = str | Text | _HangingText


@frozen
class _Columns:
    """A table for narrow terminals: `optional` columns without room are left out, and named below the table.

    Wider cells are folded; only the column `ABOUT` is cut.
    """

    heads: Sequence[str]
    optional: Sequence[str]  # the last is left out first
    right: Sequence[str]  # aligned at the right
    rows: list[Sequence[Cell]] = field(factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(self.heads, zip(*self.rows, strict=True), strict=True)
        widths = {head: max(_width(cell) for cell in (head, *cells)) for head, cells in columns}
        least = {head: min(width, ABOUT_WIDTH_MIN if head == ABOUT else WIDTH_MIN) for head, width in widths.items()}
        shown = [head for head in self.heads if head not in self.optional]
        for head in self.optional:
            if sum(least[column] + GAP for column in (*shown, head)) - GAP <= options.max_width:
                shown.append(head)
        rest = options.max_width - sum(widths[head] + GAP for head in shown if head != ABOUT)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style=DIM)
        for head in (column for column in self.heads if column in shown):
            most = max(ABOUT_WIDTH_MIN, rest) if head == ABOUT else None
            table.add_column(head, justify="right" if head in self.right else "left", max_width=most, overflow="fold")
        for row in self.rows:
            table.add_row(*(cell for head, cell in zip(self.heads, row, strict=True) if head in shown))
        yield table
        if left_out := [head for head in self.heads if head not in shown]:
            yield Text(f"no room for: {', '.join(left_out)}", DIM)


def _width(cell: Cell) -> int:
    return len(cell) if isinstance(cell, str) else cell.cell_len


def _trees(statuses: Mapping[str, StatusOrError]) -> _Columns:
    table = _Columns(("node", "state", "since", "restarts", ABOUT), (ABOUT,), ("since", "restarts"))
    for name, status in statuses.items():
        if isinstance(status, str):
            table.rows.append(
                (Text(printable(name), "bold"), Text("no answer", BAD), "", "", Text(printable(status), DIM))
            )
            continue
        for first, others, child in _with_branches(status.tree):
            root = not first
            title = _HangingText(first, others, Text(printable(child.path.rpartition("/")[2]), "bold" if root else ""))
            state = "draining" if root and status.state.draining else child.state
            restarts = Text(str(child.restarts), WARN) if child.restarts else Text("" if root else "0", DIM)
            table.rows.append((title, _state(state), _time(child.since_s), restarts, _about(child)))
    return table


def _about(child: ChildState) -> Text:
    """Return a child's last error if it is down or was restarted, else its description."""
    if child.why and child.state != READY:
        return Text(printable(child.why), WARN)
    if child.why and child.restarts:
        return Text(f"was started again: {printable(child.why)}", DIM)
    return Text(printable(child.about), DIM, no_wrap=True, overflow="ellipsis")


def _with_branches(tree: Sequence[ChildState]) -> Iterator[tuple[str, str, ChildState]]:
    """Yield each child with the branches before its first and its further lines; parents come first."""
    parents, more = set[str](), list[bool]()  # whether another of the same parent follows
    for child in reversed(tree):
        parent = child.path.rpartition("/")[0]
        more.append(parent in parents)
        parents.add(parent)
    open_at: list[bool] = []  # whether more follows at each depth above
    for child, follows in zip(tree, reversed(more), strict=True):
        depth = child.path.count("/")
        open_at[depth:] = [follows]
        lead = "".join("│  " if each else "   " for each in open_at[1:depth])
        first, others = ("├─ ", "│  ") if follows else ("└─ ", "   ")
        yield (f"{lead}{first}", f"{lead}{others}", child) if depth else ("", "", child)


def newest_weights(statuses: Mapping[str, StatusOrError]) -> defaultdict[str, NewestWeights]:
    """Return the newest weights of each model that any node knows."""
    newest: defaultdict[str, NewestWeights] = defaultdict(NewestWeights)
    for status in statuses.values():
        for model, record in status.weights.items() if isinstance(status, Status) else ():
            newest[model].note(record)
    return newest


def _without_behind(statuses: Mapping[str, StatusOrError]) -> dict[str, StatusOrError]:
    """Return statuses in which each engine behind the weights of its model is out of service, as for every router."""
    newest = newest_weights(statuses)

    def shown(offer: Offer) -> Offer:
        why = "" if not (offer.leg.generates and offer.up) else newest[offer.model].behind(offer.weights)
        return evolve(offer, up=False, why=f"{OUT_OF_SERVICE}: {why}") if why else offer

    return {
        name: evolve(status, state=evolve(status.state, offers=tuple(map(shown, status.state.offers))))
        if isinstance(status, Status)
        else status
        for name, status in statuses.items()
    }


def _engines(answered: Sequence[Status]) -> _Columns:
    numbers = ("run", "wait", "slots", "tokens", "KV")
    # Versions of weights are shown once some engine has other weights than it started with.
    versions = ("weights",) * any(offer.weights.version for status in answered for offer in status.state.offers)
    heads = ("engine", "node", "model", "leg", *versions, "state", *numbers)
    table = _Columns(heads, ("slots", "leg", "model", "tokens"), numbers)
    for status in answered:
        for offer in status.state.offers:
            down = "out of service" if offer.why.startswith(OUT_OF_SERVICE) else "starting"
            state = "draining" if status.state.draining else READY if offer.up else down
            words = (offer.name, status.node, offer.model, offer.leg, *(offer.weights.version for _ in versions))
            names = (Text(printable(word)) for word in words)
            counts = map(str, (offer.running, offer.waiting, offer.slots))
            kv_used = f"{offer.kv_used:.0%}" if offer.leg.generates else ""  # others keep no KV memory
            table.rows.append((*names, _state(state), *counts, f"{offer.tokens:,}", kv_used))
    return table


def _pools(answered: Sequence[Status]) -> _Columns:
    """Return a row for each pool, with the waiting requests of all gateways; they agree about the rest."""
    numbers = ("priority", "up", "busy", "slots", "wait")
    table = _Columns(("pool", "model", "leg", *numbers), ("busy", "up", "leg", "slots", "model", "priority"), numbers)
    pools = [pool for status in answered for pool in status.pools]
    for name, pool in {pool.name: pool for pool in reversed(pools)}.items():
        waiting = sum(each.waiting for each in pools if each.name == name)
        names = (Text(printable(word)) for word in (name, pool.model, pool.leg))
        up = Text(f"{pool.up} of {pool.engines}", "" if pool.up == pool.engines else WARN if pool.up else BAD)
        table.rows.append((*names, str(pool.priority), up, str(pool.busy), str(pool.slots), str(waiting)))
    table.rows.reverse()
    return table


def _links(answered: Sequence[Status]) -> _Columns:
    numbers = ("silent", "streams", "messages", "sent", "received")
    table = _Columns(("link", "to", "state", *numbers), ("silent", "sent", "received", "messages"), numbers)
    for status in answered:
        for link in status.links:
            row = [f"{link.silent_s:.1f} s", str(link.streams), f"{link.messages_sent:,}"]
            row += [_size(link.bytes_sent), _size(link.bytes_received)]
            state = _state("stands still" if link.stalled else READY) if link.up else Text("down", BAD)
            names = (Text(printable(status.node)), Text(printable(link.node)))
            table.rows.append((*names, state, *(row if link.up else [""] * len(row))))
    return table


def _state(state: str) -> Text:
    if state in {"failed", "gave up", "does not stop"}:
        return Text(state, BAD)
    return Text(printable(state), GOOD if state == READY else WARN)


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.1f} {UNITS[unit]}"
