"""The ledger of a worker: what it counts at the node that asks is what the node of the engine counts."""

from __future__ import annotations

from protocol.messages.cluster import Leg, Offer
from supervisor.cluster.in_flight import InFlight

OFFER = Offer("e", "oak", Leg.BOTH, 4, up=True, pending_prefill_tokens_max=100)


def totals(ledger: InFlight) -> tuple[int, int, int]:
    return ledger.requests, ledger.tokens, ledger.queued


def test_both_ends_of_a_link_come_to_the_same_totals() -> None:
    here, there = InFlight(), InFlight()  # at the node that asks, and at the node of the engine
    for asker in ("here", "other", None):
        there.add(asker, "a", prompt_tokens=5, tokens=20)
    here.add(None, "a", prompt_tokens=5, tokens=20)
    here.replace_others(there.without("here", "e"))
    assert totals(here) == totals(there) == (3, 60, 15)
    assert there.computed("a") == "here"
    assert here.begun("a")
    assert not here.begun("a"), "once for a request"
    assert totals(here) == totals(there) == (3, 60, 10)


def test_a_ledger_is_empty_when_every_request_has_ended() -> None:
    ledger = InFlight()
    for number, asker in enumerate(("a", "b", "a", None)):
        ledger.add(asker, str(number), prompt_tokens=5, tokens=20)
    assert (ledger.own.requests, {name: share.requests for name, share in ledger.by_node.items()}) == (
        1,
        {"a": 2, "b": 1},
    )
    for number, asker in enumerate(("a", "b", "a", None)):
        ledger.remove(asker, str(number), tokens=20)
    assert totals(ledger) == (0, 0, 0)
    assert not ledger.by_node


def test_a_bound_of_prompts_is_each_routers_at_a_whole_engine_and_the_decodes_at_a_prefill() -> None:
    load = InFlight().load("there/e", OFFER, None, routers=(2, 1))
    assert (load.pending_max, load.shared_max, load.routers, load.place) == (100, 0, 2, 1)
    prefill = Offer("e", "oak", Leg.PREFILL, 4, up=True, pending_prefill_tokens_max=100)
    load = InFlight().load("there/e", prefill, None, routers=(1, 0))
    assert (load.pending_max, load.shared_max) == (0, 100)
