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
    "supervisor/doors/asking.py": (
        Bug(
            "what is promised for an answer is looked up anew",
            "(request.total_max or 0) * request.choices",
            "served.total_max() * request.choices",
        ),
    ),
    "actors/processor.py": (
        Bug(
            "a processor goes by what engines allow now, whatever was promised",
            "            known = known.within(request.total_max)\n",
            "",
        ),
    ),
    "protocol/grammars.py": (
        Bug(
            "a structural tag may hold every grammar",
            "                found[FORMATS[name]] = None\n",
            "                pass\n",
        ),
    ),
}
