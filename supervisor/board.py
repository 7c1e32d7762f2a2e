"""A running cluster as a terminal shows it: every node's tree, then all engines, then all links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protocol.cluster import Limb, Reloaded, Status
from supervisor.standing import UP

Seen: TypeAlias = Status | str
"""How a node is, or why that is not known."""

GOOD, SO_SO, BAD, ASIDE = "green", "yellow", "red", "dim"
UNITS = ("B", "kB", "MB", "GB", "TB")


def board(name: str, seen: Mapping[str, Seen]) -> RenderableType:
    """Return the whole cluster to print."""
    known = [each for each in seen.values() if isinstance(each, Status)]
    head = Text.assemble(("cluster ", ASIDE), (name, "bold"), (f"  {len(known)} of {len(seen)} nodes answer", ASIDE))
    tables = [table for table in (_trees(seen), _engines(known), _links(known)) if table.row_count]
    return Group(head, *(each for table in tables for each in (Text(), table)))


def reloaded(name: str, what: Reloaded) -> RenderableType:
    """Return what a node has done with its file, a sentence a line."""
    text = Text(f"{name}:")
    if not (what.changed or what.not_changed):
        text.append(" nothing has changed")
    for sentence in what.changed:
        text.append(f"\n  {sentence}", GOOD)
    for sentence in what.not_changed:
        text.append(f"\n  {sentence}", SO_SO)
    return text


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=ASIDE, title=None)
    for column in (title, *columns):
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _trees(seen: Mapping[str, Seen]) -> Table:
    table = _table("node", "state", "since", "restarts", "", right=("since", "restarts"))
    rows: list[tuple[Text, ...]] = []
    for name, each in seen.items():
        if isinstance(each, str):
            rows.append((Text(name, "bold"), Text("no answer", BAD), Text(), Text(), Text(each, ASIDE)))
            continue
        for lead, limb in _drawn(each.tree):
            root = not lead
            title = Text.assemble((lead, ASIDE), (limb.path.rpartition("/")[2], "bold" if root else ""))
            state = "draining" if root and each.state.draining else limb.state
            about = Text(limb.about, ASIDE, no_wrap=True, overflow="ellipsis")
            if limb.why and limb.state != UP:
                about = Text(limb.why, SO_SO)
            restarts = Text(str(limb.restarts), SO_SO) if limb.restarts else Text("" if root else "0", ASIDE)
            rows.append((title, _state(state), Text(_time(limb.since_s)), restarts, about))
    for row in rows:
        table.add_row(*row)
    table.columns[-1].no_wrap = False  # where a terminal is narrow, this one alone is
    return table


def _drawn(tree: Sequence[Limb]) -> Iterator[tuple[str, Limb]]:
    """Yield each member with the lines that lead to it; each stands before its children."""
    open_at: list[bool] = []  # for each depth above, whether more follows there
    for index, limb in enumerate(tree):
        depth = limb.path.count("/")
        parent = limb.path.rpartition("/")[0]
        more = any(other.path.rpartition("/")[0] == parent for other in tree[index + 1 :])
        open_at[depth:] = [more]
        lead = "".join("│  " if follows else "   " for follows in open_at[1:depth])
        yield (f"{lead}{'├─ ' if more else '└─ '}" if depth else ""), limb


def _engines(known: Sequence[Status]) -> Table:
    numbers = ("running", "waiting", "slots", "tokens", "KV")
    table = _table("engine", "node", "model", "leg", "state", *numbers, right=numbers)
    for status in known:
        for offer in status.state.offers:
            state = "draining" if status.state.draining else UP if offer.up else "starting"
            table.add_row(
                Text(offer.name),
                Text(status.node),
                Text(offer.model),
                Text(offer.leg),
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
            table.add_row(Text(status.node), Text(link.node), state, *(row if link.up else [""] * len(row)))
    return table


def _state(state: str) -> Text:
    if state in {"failed", "gave up", "does not stop"}:
        return Text(state, BAD)
    return Text(state, GOOD if state == UP else SO_SO)


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
