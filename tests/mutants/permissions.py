"""Bugs to plant where it is decided who may use what, and who may call itself what."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/gateway.py": (
        Bug(
            "a key's own grammars are ignored",
            "allowed = self.grammars if own is None else own",
            "allowed = self.grammars",
        ),
        Bug(
            "every key may use every grammar",
            "                await self._check_grammar(request, request.grammar, key)\n",
            "                await trio.lowlevel.checkpoint()\n",
        ),
        Bug("a structural tag is searched in one turn", "reading_work(grammar.text) if tag else 0", "0"),
    ),
    "protocol/greeting.py": (
        Bug(
            "a node needs no certificate of its name where it dials",
            'by_operator = self.role == "listens" and other.node.startswith(OPERATOR_PREFIX)',
            'by_operator = self.role == "listens"',
        ),
        Bug(
            "a node may listen as an operator",
            'by_operator = self.role == "listens" and other.node.startswith(OPERATOR_PREFIX)',
            "by_operator = other.node.startswith(OPERATOR_PREFIX)",
        ),
        Bug(
            "a name that only begins like a node's is enough",
            "in wanted for name in names)",
            'in wanted or f"DNS:{node}" in name for name in names)',
        ),
    ),
    "supervisor/cluster/mesh.py": (
        Bug(
            "nobody reads what a certificate names",
            "transport.certificate_names() if self.section.verifies_node_names else None",
            "None",
        ),
        Bug(
            "the oldest unauthenticated connection is closed, whatever its address",
            ".close_oldest_of_busiest_address())",
            ".close_oldest())",
        ),
    ),
    "supervisor/sockets/unauthenticated.py": (
        Bug(
            "the address with fewest connections makes room",
            "largest = max(map(len, self._by_address.values()), default=0)",
            "largest = min(map(len, self._by_address.values()), default=0)",
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug(
            "the limit of a request is read again after its admission",
            "(request.total_max or 0) * request.choices",
            "served.total_max() * request.choices",
        ),
    ),
    "actors/processor.py": (
        Bug(
            "a processor goes by what engines allow now, whatever was promised",
            "            current = current.within(request.total_max)\n",
            "",
        ),
    ),
    "protocol/grammars.py": (
        Bug(
            "a structural tag may hold every grammar",
            "dict.fromkeys(FORMATS[name] for name in named if",
            "dict.fromkeys(FORMATS[name] for name in named if False and",
        ),
    ),
}
