"""The accounts of a server's processes before and after a load, and what each group spent between them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attrs import fields_dict, frozen

from bench.cost.groups import groups
from bench.rig.processes import PROC, Usage, family, memory_bytes, process_table, usage

COUNTERS = ("user_s", "system_s", "voluntary", "involuntary")


@frozen
class Account:
    """One process at one time."""

    group: str
    started: str
    usage: Usage
    memory_mb: float = 0.0  # its share of the resident memory that it has together with others


@frozen(kw_only=True)
class Spent:
    """The resources that a group of processes spent during a load, and its memory at the end of it."""

    processes: int
    user_s: float
    system_s: float
    voluntary: int
    involuntary: int
    memory_max_mb: float  # the sum of the peaks since their starts; what they share is in each
    memory_mb: float  # what they share is divided among them

    @property
    def cpu_s(self) -> float:
        """Its CPU time."""
        return self.user_s + self.system_s


Accounts = dict[int, Account]


def take(roots: Iterable[int], proc: Path = PROC, *, memory: bool = False) -> Accounts:
    """Return the accounts of the processes that these are or have started; one that ends meanwhile is left out.

    The memory that is shared is divided only where it is asked for: the kernel takes long over it, and holds up the
    process meanwhile.
    """
    entries = family(process_table(proc), roots)
    group_of = groups(entries)
    accounts = {}
    for entry in entries:
        try:
            memory_mb = memory_bytes(entry.pid, proc=proc) / 2**20 if memory else 0.0
            accounts[entry.pid] = Account(group_of[entry.pid], entry.started, usage(entry.pid, proc), memory_mb)
        except OSError:
            continue
    return accounts


def spent(before: Accounts, after: Accounts) -> dict[str, Spent]:
    """Return the spending of each group by its name; all usage of a new process counts.

    The spending of processes that have ended meanwhile is unknown: `ended` counts them.
    """
    shares: dict[str, list[Spent]] = {}
    for pid, account in after.items():
        former = before.get(pid)
        earlier = former.usage if former is not None and former.started == account.started else Usage(0, 0, 0, 0, 0)
        shares.setdefault(account.group, []).append(_share(account, earlier))
    return {group: total(shares[group]) for group in sorted(shares)}


def ended(before: Accounts, after: Accounts) -> int:
    """Return the number of processes that have ended between the two."""
    living = {(pid, account.started) for pid, account in after.items()}
    return sum((pid, account.started) not in living for pid, account in before.items())


def _share(account: Account, earlier: Usage) -> Spent:
    now = account.usage
    grown = {name: getattr(now, name) - getattr(earlier, name) for name in COUNTERS}
    return Spent(processes=1, memory_max_mb=now.memory_max_mb, memory_mb=account.memory_mb, **grown)


def total(parts: Iterable[Spent]) -> Spent:
    """Return the sum of several groups or processes."""
    several = list(parts)
    return Spent(**{name: sum(getattr(part, name) for part in several) for name in fields_dict(Spent)})
