"""The pairs among prefills and decodes: only legs that agree on every term that both report."""

from __future__ import annotations

from attrs import evolve

from actors.engines.simulated.spec import SimulatedSpec
from protocol.messages.cluster import Leg
from protocol.pairing import Pairing, Terms, difference

SMALL: Terms = (("kind", "x"), ("page_size", "16"))
LARGE: Terms = (("kind", "x"), ("page_size", "32"))
OTHER_KIND: Terms = (("kind", "y"), ("page_size", "16"))


def pairing(**legs: Terms) -> Pairing:
    """Return the pairs of prefills `p...` and decodes `d...`."""
    return Pairing.of((name, Leg.PREFILL if name[0] == "p" else Leg.DECODE, terms) for name, terms in legs.items())


def test_legs_that_agree_can_all_meet() -> None:
    pairs = pairing(p=SMALL, p2=SMALL, d=SMALL)
    assert pairs.is_uniform
    assert not pairs.unpaired
    assert pairs.agree("p2", "d")


def test_a_leg_that_agrees_with_no_other_is_unpaired_and_says_why() -> None:
    pairs = pairing(p=SMALL, p32=LARGE, d=SMALL, dy=OTHER_KIND)
    assert pairs.unpaired == {
        "p32": "can meet no decode: its page_size is 32, and that of d is 16",
        "dy": "can meet no prefill: its kind is y, and that of p is x",
    }
    assert pairs.agree("p", "d")
    assert not pairs.agree("p32", "d")


def test_two_groups_that_differ_are_paired_each_within_itself() -> None:
    pairs = pairing(p=SMALL, p32=LARGE, d=SMALL, d32=LARGE)
    assert not pairs.unpaired
    assert not pairs.is_uniform
    met = {(prefill, decode) for prefill in ("p", "p32") for decode in ("d", "d32") if pairs.agree(prefill, decode)}
    assert met == {("p", "d"), ("p32", "d32")}


def test_a_term_that_one_leg_does_not_report_is_not_compared() -> None:
    assert difference((*SMALL, ("kv_cache_dtype", "fp8_e5m2")), SMALL) is None
    assert difference(SMALL, (("new", "1"), *SMALL)) is None
    assert pairing(p=LARGE).unpaired == pairing(d=SMALL).unpaired == {}


def test_engines_report_their_kind_their_hand_off_and_their_pages_beside_terms_of_their_own() -> None:
    prefill, decode = (SimulatedSpec(leg=leg).info for leg in (Leg.PREFILL, Leg.DECODE))
    assert difference(prefill.terms, decode.terms) is None
    for other, term in ((evolve(decode, kind="y"), "kind"), (evolve(decode, page_size=8), "page_size")):
        assert difference(prefill.terms, other.terms) == (term, *(dict(it.terms)[term] for it in (prefill, other)))
    own = [evolve(info, hand_off_terms=(("transfer", way),)) for info, way in ((prefill, "nixl"), (decode, "mooncake"))]
    assert difference(own[0].terms, own[1].terms) == ("transfer", "nixl", "mooncake")
