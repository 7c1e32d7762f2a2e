"""More bugs to plant: in how a file is read, and in how an operator reaches a node."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/config/partial.py": (
        Bug(
            "what follows from a mistake is told as another",
            "or _is_named(path, mistake.message)",
            "and _is_named(path, mistake.message)",
        ),
        Bug("a mistake keeps the rest of its file from being judged", "ROUNDS_MAX = 4", "ROUNDS_MAX = 1"),
    ),
    "supervisor/engines/sglang/section.py": (
        Bug("a decode may have less memory than its reserve", 'if self.leg == "decode" else 0', "if False else 0"),
    ),
    "supervisor/files/permissions.py": (
        Bug(
            "a secret that others may write is taken",
            "if mode & stat.S_IWOTH:\n        return",
            "if False:\n        return",
        ),
    ),
    "supervisor/files/reading.py": (
        Bug("a pipe is waited for", "os.O_RDONLY | os.O_NONBLOCK", "os.O_RDONLY"),
        Bug("what is no file is read", "if not stat.S_ISREG(status.st_mode):", "if False:"),
    ),
    "supervisor/node/garbage.py": (
        Bug("every collection looks through what was imported", "    gc.freeze()", "    gc.isenabled()"),
    ),
    "supervisor/telemetry/registry.py": (
        Bug("a scrape is written in one turn", "SAMPLES_PER_PIECE = 100", "SAMPLES_PER_PIECE = 100_000"),
        Bug(
            "nobody runs between two pieces of a scrape",
            "texts.append(text)\n        await trio.lowlevel.checkpoint()",
            "texts.append(text)",
        ),
        Bug("each piece of a family begins it anew", "if family.name != previous else", "if family.name else"),
    ),
    "supervisor/cli/commands.py": (
        Bug(
            "a broken file keeps operators from the nodes of their host",
            "    if not folders:\n        raise wrong",
            "    if wrong:\n        raise wrong",
        ),
    ),
    "supervisor/config/toml_lines.py": (
        Bug(
            "keys after a long string are told at a wrong line",
            "return bisect_right(self._starts, start)",
            "return self.text.count('\\n', 0, min(start, 40)) + 1",
        ),
    ),
    "supervisor/gateway/gateway.py": (
        Bug(
            "a certificate is read in a turn of the event loop",
            "await read(self.certificate.context)",
            "self.certificate.context()",
        ),
    ),
    "supervisor/control/control.py": (
        Bug(
            "who passes a question on gives up with whoever asked",
            "trio.current_effective_deadline() - HOP_MARGIN_S",
            "trio.current_effective_deadline()",
        ),
    ),
    "supervisor/deadlines.py": (
        Bug(
            "a reload behind another is not waited for",
            "RELOAD_QUEUED_MAX_S = 2 * RELOAD_MAX_S",
            "RELOAD_QUEUED_MAX_S = RELOAD_MAX_S",
        ),
    ),
    "supervisor/node/reload.py": (
        Bug(
            "a policy that was replaced hears of blocks",
            "            context.index.on_stored = context.index.on_removed = None",
            "            pass",
        ),
        Bug(
            "a gateway that cannot share its port divides the rates of keys",
            "or (len(read.cluster.port_sharers(self.name)) > 1) != gateway.shares_port:",
            ":",
        ),
        Bug(
            "a reload takes the loop with it",
            "            except Exception:  # a node must",
            "            except OSError:  # a node must",
        ),
        Bug(
            "whoever comes while files are read hears of what was read before",
            "request, self._next = self._next, _NextReload()",
            "request = self._next",
        ),
        Bug(
            "nodes that were drained are said to start",
            "(self._new | self._placed - before)",
            "(self._new | self._placed)",
        ),
        Bug(
            "keys are not read anew where the file is wrong",
            "if (gateway := self.assembly.gateway or self.assembly.monitoring) is not None:\n            before",
            "if not outcome.refused and (gateway := self.assembly.gateway or self.assembly.monitoring) is not None:\n            before",
        ),
    ),
}
