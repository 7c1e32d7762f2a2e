"""Bugs to plant where it is decided who may use what, and who may call itself what."""

from __future__ import annotations

from tests.planted import Bug, Bugs

NAMES: Bugs = {
    "supervisor/doors/door.py": (
        Bug(
            "a key's own grammars are not looked at",
            "may = self.grammars if own is None else own",
            "may = self.grammars",
        ),
        Bug("every key may use every grammar", "            self._check_grammar(request, key)\n", ""),
    ),
    "protocol/grammars.py": (
        Bug(
            "a structural tag may hold every grammar",
            "                found[FORMATS[name]] = None\n",
            "                pass\n",
        ),
    ),
}
