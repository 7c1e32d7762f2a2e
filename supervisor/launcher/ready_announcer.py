"""The launcher's announcements to the operator: the address of each gateway, or the readiness of all nodes.

They are held until every node of the start has been up. An address shared by several gateways is announced once, and
again after all of them were down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from supervisor.launcher.kept_node import KeptNode
from supervisor.telemetry.logs import Terminal


@define(eq=False)
class ReadyAnnouncer:
    """The held announcements of one launcher; `nodes` and `gateways` are the launcher's own."""

    names: Sequence[str]  # the nodes of the start
    nodes: Mapping[str, KeptNode]
    gateways: set[str]  # the nodes that have, or had, a gateway
    terminal: Terminal
    closed: bool = False  # a stopping launcher announces nothing
    _were_up: set[str] = field(factory=set)  # the nodes that have been up at least once
    _held: list[str] = field(factory=list)
    _last: dict[str, str] = field(factory=dict)  # the last announcement of each gateway's node

    def announce(self, name: str, text: str) -> None:
        """Announce a gateway's address, unless another gateway serves there already.

        The announcement of a node without a gateway is in its log.
        """
        if name in self.gateways:
            serving = {other for other, node in self.nodes.items() if node.serving} - {name}
            self._last[name] = text
            if all(self._last.get(other) != text for other in serving):
                self._held.append(text)
                self._release()

    def on_up(self, name: str) -> None:
        """Record that a node is up, and make the announcements held for it."""
        self._were_up.add(name)
        if self.gateways.isdisjoint(self.names) and self._all_were_up:
            ready = (key for key, node in self.nodes.items() if key in self._were_up and node.running)
            self._held.append(f"Ready: nodes {', '.join(ready)}  (Ctrl-C drains and stops)")
        self._release()

    @property
    def _all_were_up(self) -> bool:
        """Whether each node of the start has been up, or is removed from the file."""
        return all(name in self._were_up or (name in self.nodes and self.nodes[name].removed) for name in self.names)

    def _release(self) -> None:
        """Print the held announcements, once all nodes have been up."""
        if self._all_were_up and not self.closed:
            for text in self._held:
                self.terminal.announce(text)
            self._held.clear()
