"""The part of each process in a server, from its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.rig.processes import ProcessEntry

APART = "scheduler"
"""The group that computes tokens: it is the same in every server that has the same engine, and is counted apart."""

RULES = tuple(
    (re.compile(pattern), group)
    for pattern, group in (
        (r"^sglang::scheduler", APART),
        (r"^sglang::detokenizer", "detokenizer"),
        (r"-c from multiprocessing\.", "helpers"),  # before all that a folder's name could match
        (r"^smg::router|-m smg\b", "gateway"),
        (r"-m dynamo\.frontend\b", "frontend"),
        (r"-m dynamo\.mocker\b", "mocker"),
        (r"-m dynamo\.|bench/turns/smg_worker\.py", "worker"),
        (r"-m sglang\.launch_server\b", "server"),
        (r"^espalier::grammars", "grammars"),
        (r"-m actors\.engines\.sglang\.host\.zygote\b", "zygote"),
        (r"-m actors\.engines\.sglang\.host\b", "engine host"),
        (r"(?:-m supervisor|espalier)\b.* --node (\S+)", r"node \1"),
        (r"-m supervisor\b|/espalier\b", "node"),
    )
)
MODULE = re.compile(r" -m (\S+)")


def groups(entries: Sequence[ProcessEntry]) -> dict[int, str]:
    """Return the group of each process, by its pid.

    A process that was forked and not renamed has its parent's command line: below a zygote it is an engine host. A
    command that starts nodes is a launcher.
    """
    named = {entry.pid: _group(entry.command) for entry in entries}
    launchers = {entry.parent for entry in entries if named[entry.pid].startswith("node ")}
    result = {}
    for entry in entries:
        group = named[entry.pid]
        if group == "zygote" and named.get(entry.parent) == "zygote":
            group = "engine host"
        if group == "node" and entry.pid in launchers:
            group = "launcher"
        result[entry.pid] = group
    return result


def _group(command: str) -> str:
    for pattern, group in RULES:
        if found := pattern.search(command):
            return found.expand(group)
    if module := MODULE.search(command):
        return module[1]
    return command.partition(" ")[0].rpartition("/")[2] or "unknown"
