"""Requests in flight: the ledger of one worker, from the turn in which a request is asked until it has ended.

Both ends of a link keep one, because a router that asks twice in one turn must see its own first request:

- The node that asks keeps `own`, its requests there. Other nodes' requests there are `others`, as the worker's node
announced them last, without this node's own. - The node of the engine keeps its own requests in `own`, too, and those
of each other node in `by_node`. To a node it announces the totals without the share of that node (`without`).

So the totals (`requests`, `tokens`, `queued`) mean the same at both ends, and the load of a worker follows from them in
one way (`load`).
"""

from __future__ import annotations

from attrs import define, field

from actors.kit.pending_prefill import PendingPrefill
from actors.routing.load import Load
from protocol.messages.cluster import COUNT_MAX, InFlightCounts, Leg, Offer
from protocol.messages.engine import EngineInfo

NO_OTHERS = InFlightCounts(name="", requests=0, tokens=0)


@define(eq=False)
class Share:
    """The requests of one node that are in flight at a worker."""

    requests: int = 0
    tokens: int = 0  # that they may come to hold
    pending: PendingPrefill = field(factory=PendingPrefill)  # their prompts that have no first token yet


@define(eq=False)
class InFlight:
    """The requests in flight at one worker: of this node, of each other node that asks here, or of all others."""

    requests: int = 0  # of all nodes
    tokens: int = 0  # of all nodes, that they may come to hold
    own: Share = field(factory=Share)
    by_node: dict[str, Share] = field(factory=dict)  # of other nodes, as they ask here
    others: InFlightCounts = InFlightCounts(name="", requests=0, tokens=0)  # of other nodes, as announced

    @property
    def queued(self) -> int:
        """The uncached tokens of all nodes' pending prompts."""
        own = self.own.pending.tokens + self.others.queued
        if not self.by_node:
            return own
        return own + sum(share.pending.tokens for share in self.by_node.values())

    def add(self, asker: str | None, request_id: str, prompt_tokens: int, tokens: int) -> None:
        """Add a request of a node, None for this one, that may come to hold `tokens` tokens.

        `prompt_tokens` of its prompt are to be computed before its first reply.
        """
        share = self.own if asker is None else self.by_node.setdefault(asker, Share())
        share.pending.add(request_id, prompt_tokens)
        self._count(share, 1, tokens)

    def remove(self, asker: str | None, request_id: str, tokens: int) -> None:
        """Remove a request that has ended."""
        share = self.own if asker is None else self.by_node[asker]
        share.pending.discard(request_id)
        self._count(share, -1, -tokens)
        if asker is not None and not share.requests:
            del self.by_node[asker]

    def _count(self, share: Share, requests: int, tokens: int) -> None:
        share.requests += requests
        share.tokens += tokens
        self.requests += requests
        self.tokens += tokens

    def begun(self, request_id: str) -> bool:
        """Count the prompt of a request of this node as computed; return whether it was still pending."""
        return self.own.pending.discard(request_id)

    def computed(self, request_id: str) -> str | None:
        """Count the prompt of another node's request as computed; return that node, None if no node has such a one."""
        return next((node for node, share in self.by_node.items() if share.pending.discard(request_id)), None)

    def replace_others(self, load: InFlightCounts) -> None:
        """Replace the requests of other nodes, as the worker's node announces them."""
        self.requests += load.requests - self.others.requests
        self.tokens += load.tokens - self.others.tokens
        self.others = load

    def without(self, node: str, name: str) -> InFlightCounts:
        """Return the totals of the worker `name` without the share of one other node, which counts its own."""
        requests, tokens, queued = self.requests, self.tokens, self.queued
        if (share := self.by_node.get(node)) is not None:
            requests, tokens = requests - share.requests, tokens - share.tokens
            queued -= share.pending.tokens
        return InFlightCounts(
            name=name,
            requests=requests,
            tokens=min(tokens, COUNT_MAX),
            queued=min(queued, COUNT_MAX),
        )

    def load(self, full_name: str, offer: Offer, info: EngineInfo | None, routers: tuple[int, int]) -> Load:
        """Return the load of the worker with this offer; `info` is that of its engine, None while it is not known.

        `routers` are the number of nodes that route, and the place of this node among them.
        """
        is_prefill, pending_max = offer.leg is Leg.PREFILL, offer.pending_prefill_tokens_max
        return Load(
            name=full_name,
            busy=self.requests,
            slots=offer.slots,
            tokens=self.tokens,
            # KV memory counts as taken for what the requests may come to hold.
            kv_tokens=self.tokens,
            kv_tokens_max=0 if info is None else info.kv_tokens_max,
            pending=self.own.pending.tokens,
            pending_max=0 if is_prefill else pending_max,
            shared_max=pending_max if is_prefill else 0,
            leg=offer.leg,
            own=self.own.requests,
            unstarted=self.own.pending.prompts,
            routers=routers[0],
            place=routers[1],
            queued=self.queued,
            page_size=0 if info is None else info.page_size,
        )
