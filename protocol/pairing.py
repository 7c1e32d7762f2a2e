"""Pairing: which prefills and decodes agree on what both need for a hand-off.

Two engines that differ in it find out at their first meeting, and one of them may end then, with every request on it.
So each leg reports its terms before, and only legs that agree are paired. A term that one leg does not report, such as
an engine of an older version, is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import TypeAlias

from attrs import frozen

from protocol.messages.cluster import Leg

Terms: TypeAlias = tuple[tuple[str, str], ...]
"""The names and values of what a leg of a pair needs the other leg to agree on."""


def difference(prefill: Terms, decode: Terms) -> tuple[str, str, str] | None:
    """Return the first term in which two legs differ, and its value of each; None if they can meet."""
    if prefill == decode:
        return None
    other = dict(decode)
    differing = ((name, value, other[name]) for name, value in prefill if other.get(name, value) != value)
    return next(differing, None)


@frozen
class Pairing:
    """The pairs among some prefills and decodes; `unpaired` has why, for each leg that can meet no other."""

    unpaired: Mapping[str, str]  # by name, the end of a sentence that begins with the name
    _terms: Mapping[str, Terms]  # by name
    _differing: Collection[tuple[Terms, Terms]]  # of a prefill and a decode that cannot meet

    @classmethod
    def of(cls, legs: Iterable[tuple[str, Leg, Terms]]) -> Pairing:
        """Return the pairs among some legs, each with its name and its terms; other workers are ignored."""
        named: dict[Leg, dict[str, Terms]] = {Leg.PREFILL: {}, Leg.DECODE: {}}
        for name, leg, terms in legs:
            if leg in named:
                named[leg][name] = terms
        prefills, decodes = named[Leg.PREFILL], named[Leg.DECODE]
        both = product(dict.fromkeys(prefills.values()), dict.fromkeys(decodes.values()))
        differing = {pair: found for pair in both if (found := difference(*pair)) is not None}
        if not differing:
            return cls({}, {}, ())
        unpaired = _unpaired(prefills, Leg.DECODE, decodes, differing)
        flipped = {(own, others): (term, its, of_other) for (others, own), (term, of_other, its) in differing.items()}
        unpaired |= _unpaired(decodes, Leg.PREFILL, prefills, flipped)
        return cls(unpaired, {**prefills, **decodes}, differing.keys())

    @property
    def is_uniform(self) -> bool:
        """Whether every prefill agrees with every decode."""
        return not self._differing

    def agree(self, prefill: str, decode: str) -> bool:
        """Whether a prefill and a decode agree, by their names."""
        return not self._differing or (self._terms.get(prefill), self._terms.get(decode)) not in self._differing


Differing: TypeAlias = Mapping[tuple[Terms, Terms], tuple[str, str, str]]
"""The first different term and its values, by the terms of two legs that cannot meet."""


def _unpaired(
    legs: Mapping[str, Terms], other_leg: Leg, others: Mapping[str, Terms], differing: Differing
) -> dict[str, str]:
    """Return why some legs can meet none of the others, by their names."""
    examples = dict[Terms, str]()  # a name for each
    for name, terms in others.items():
        examples.setdefault(terms, name)
    reasons = dict[Terms, str]()
    for terms in dict.fromkeys(legs.values()):
        found = [(other, differing[terms, other]) for other in examples if (terms, other) in differing]
        if found and len(found) == len(examples):
            other, (term, own, its) = found[0]
            reasons[terms] = f"can meet no {other_leg}: its {term} is {own}, and that of {examples[other]} is {its}"
    return {name: reasons[terms] for name, terms in legs.items() if terms in reasons}
