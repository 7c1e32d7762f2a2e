"""A running cluster as a terminal shows it: every node's tree, then all engines, then all links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protocol.cluster import ChildState, Reloaded, Status
from supervisor.standing import UP

Seen: TypeAlias = Status | str
"""How a node is, or why that is not known."""

TEXT_LENGTH_MAX = 2000
GOOD, SO_SO, BAD, ASIDE = "green", "yellow", "red", "dim"
VERBS = {"starting": "is starting", "ended": "has ended", "stopping": "is stopping", "stopped": "has stopped"}
VERBS |= {"not started": "is not started"}  # the other states are verbs themselves
UNITS = ("B", "kB", "MB", "GB", "TB")


def board(name: str, seen: Mapping[str, Seen]) -> RenderableType:
    """Return the whole cluster to print: first what is not as it should be, then everything."""
    known = [each for each in seen.values() if isinstance(each, Status)]
    head = Text.assemble(("cluster ", ASIDE), (plain(name), "bold"), f"  {len(known)} of {len(seen)} nodes answer")
    for gate in (each.gate for each in known if each.gate is not None):
        head.append(f", {gate.running} of {gate.running_max} requests run, {gate.waiting} of {gate.waiting_max} wait")
    troubles = list(_troubles(seen))
    if known and not troubles:
        head.append(", all is up", GOOD)
    lines = [Text(f"  {plain(said)}", style) for said, style in troubles]
    tables = [table for table in (_trees(seen), _engines(known), _links(known)) if table.row_count]
    return Group(head, *lines, *(each for table in tables for each in (Text(), table)))


def _troubles(seen: Mapping[str, Seen]) -> Iterator[tuple[str, str]]:
    """Yield what is not as it should be, a sentence each, and how bad it is."""
    for name, each in seen.items():
        if isinstance(each, str):
            yield f"node {name} does not answer: {each}", BAD
            continue
        if each.state.draining:
            running = sum(offer.running + offer.waiting for offer in each.state.offers)
            yield f"node {name} drains, {_count(running, 'request')} on it", SO_SO
        parents = {child.path.rpartition("/")[0] for child in each.tree}
        for child in each.tree:
            if child.state != UP and (child.why or child.path not in parents):  # else what is inside it says more
                yield f"{child.path} {VERBS.get(child.state, child.state)}{': ' * bool(child.why)}{child.why}", SO_SO
        for link in each.links:
            if not link.up and isinstance(seen.get(link.node), Status):
                yield f"node {name} has no link to node {link.node}", BAD
    versions = {each.version for each in seen.values() if isinstance(each, Status)}
    if len(versions) > 1:
        yield f"nodes run different versions: {', '.join(sorted(versions))}", SO_SO


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def reloaded(name: str, what: Reloaded) -> RenderableType:
    """Return what a node has done with its file, a sentence a line."""
    text = Text(f"{plain(name)}:")
    if not (what.changed or what.not_changed):
        text.append(" nothing has changed")
    for sentences, style in ((what.changed, GOOD), (what.not_changed, SO_SO)):
        for sentence in sentences:
            for line in sentence.split("\n"):  # a file's mistakes are told a line each
                text.append(f"\n  {plain(line)}", style)
    return text


def plain(text: str) -> str:
    """Return what others say as a terminal may show it: without a say in where the cursor goes, and not for ever."""
    cut = text if len(text) <= TEXT_LENGTH_MAX else f"{text[:TEXT_LENGTH_MAX]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=ASIDE, title=None)
    for column in (title, *columns):
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _trees(seen: Mapping[str, Seen]) -> Table:
    table = _table("node", "state", "since", "restarts", "", right=("since", "restarts"))
    for name, each in seen.items():
        if isinstance(each, str):
            table.add_row(Text(plain(name), "bold"), Text("no answer", BAD), "", "", Text(plain(each), ASIDE))
            continue
        for lead, child in _drawn(each.tree):
            root = not lead
            title = Text.assemble((lead, ASIDE), (plain(child.path.rpartition("/")[2]), "bold" if root else ""))
            state = "draining" if root and each.state.draining else child.state
            restarts = Text(str(child.restarts), SO_SO) if child.restarts else Text("" if root else "0", ASIDE)
            table.add_row(title, _state(state), _time(child.since_s), restarts, _about(child))
    table.columns[-1].no_wrap = False  # where a terminal is narrow, this one alone is
    return table


def _about(child: ChildState) -> Text:
    """Return what went wrong last, if that tells anything of the child as it is, and else what it is."""
    if child.why and child.state != UP:
        return Text(plain(child.why), SO_SO)
    if child.why and child.restarts:
        return Text(f"was started again: {plain(child.why)}", ASIDE)
    return Text(plain(child.about), ASIDE, no_wrap=True, overflow="ellipsis")


def _drawn(tree: Sequence[ChildState]) -> Iterator[tuple[str, ChildState]]:
    """Yield each member with the lines that lead to it; each stands before its children."""
    parents, more = set[str](), list[bool]()  # whether another of the same parent follows
    for child in reversed(tree):
        parent = child.path.rpartition("/")[0]
        more.append(parent in parents)
        parents.add(parent)
    open_at: list[bool] = []  # for each depth above, whether more follows there
    for child, follows in zip(tree, reversed(more), strict=True):
        depth = child.path.count("/")
        open_at[depth:] = [follows]
        lead = "".join("│  " if each else "   " for each in open_at[1:depth])
        yield (f"{lead}{'├─ ' if follows else '└─ '}" if depth else ""), child


def _engines(known: Sequence[Status]) -> Table:
    numbers = ("running", "waiting", "slots", "tokens", "KV")
    table = _table("engine", "node", "model", "leg", "state", *numbers, right=numbers)
    for status in known:
        for offer in status.state.offers:
            state = "draining" if status.state.draining else UP if offer.up else "starting"
            table.add_row(
                *(Text(plain(each)) for each in (offer.name, status.node, offer.model, offer.leg)),
                _state(state),
                *map(str, (offer.running, offer.waiting, offer.slots)),
                f"{offer.tokens:,}",
                f"{offer.kv_used:.0%}",
            )
    return table


def _links(known: Sequence[Status]) -> Table:
    numbers = ("silent", "streams", "messages", "sent", "received")
    table = _table("link", "to", "state", *numbers, right=numbers)
    for status in known:
        for link in status.links:
            row = [f"{link.silent_s:.1f} s", str(link.streams), f"{link.messages_sent:,}"]
            row += [_size(link.bytes_sent), _size(link.bytes_received)]
            state = _state(UP) if link.up else Text("down", BAD)
            table.add_row(
                Text(plain(status.node)), Text(plain(link.node)), state, *(row if link.up else [""] * len(row))
            )
    return table


def _state(state: str) -> Text:
    if state in {"failed", "gave up", "does not stop"}:
        return Text(state, BAD)
    return Text(plain(state), GOOD if state == UP else SO_SO)


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
