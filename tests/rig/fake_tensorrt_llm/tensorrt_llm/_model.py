"""The model of the fake: a few likely tokens in each place, which follow from all tokens before it."""

import struct
from collections import Counter
from collections.abc import Sequence
from math import exp, inf, log
from random import Random
from zlib import crc32

from ._types import Logprob, SamplingParams

LIKELY = 8  # tokens of a place
BEST, STEP, REST = 6.0, 0.75, -9.0  # the likeliest one's logit, the distance to the next, and that of all others


def digest(tokens: Sequence[int], before: int = 0) -> int:
    """Return what the model knows of tokens behind others."""
    return crc32(struct.pack(f"<{len(tokens)}I", *tokens), before)


class Place:
    """The logits of the tokens that may come next."""

    def __init__(self, known: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.likely: dict[int, float] = {}
        for place in range(LIKELY):
            token = crc32(struct.pack("<II", known, place)) % vocabulary
            self.likely.setdefault(token, BEST - STEP * place)

    def logit(self, token: int) -> float:
        return self.likely.get(token, REST)

    def change(self, token: int, logit: float) -> None:
        self.likely[token] = logit

    def logprobs(self) -> dict[int, float]:
        """Return the log probabilities of the likely tokens, the likeliest first."""
        order = sorted(self.likely.items(), key=lambda each: (-each[1], each[0]))
        return {token: logit - self._total for token, logit in order if logit > -inf}

    @property
    def _total(self) -> float:
        return log(sum(map(exp, self.likely.values())) + (self.vocabulary - len(self.likely)) * exp(REST))

    def top(self, count: int, own: int | None = None) -> dict[int, Logprob]:
        """Return so many likely tokens, and one's own behind them if it is none of them."""
        found, rest = self.logprobs(), REST - self._total
        others = (token for token in range(self.vocabulary) if token not in self.likely)
        while len(found) < min(count, self.vocabulary):
            found[next(others)] = rest
        ranked = {token: Logprob(value, rank) for rank, (token, value) in enumerate(found.items(), start=1)}
        taken = dict(list(ranked.items())[:count])
        if own is not None and own not in taken:
            taken[own] = ranked.get(own, Logprob(rest, len(found) + 1))
        return taken


def place_of(
    known: int, vocabulary: int, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> Place:
    """Return the logits of the next token, as the parameters change them."""
    place = Place(known, vocabulary)
    biases = params.embedding_bias  # a tensor, or a list
    for token, bias in enumerate(()) if biases is None else enumerate(map(float, biases)):
        if bias:
            place.change(token, place.logit(token) + bias)
    if params.presence_penalty or params.frequency_penalty:
        counted = Counter([*prompt[params.prompt_ignore_length or 0 :], *answer])
        for token, count in counted.items():
            penalty = (params.presence_penalty or 0) + count * (params.frequency_penalty or 0)
            place.change(token, place.logit(token) - penalty)
    if params.repetition_penalty:
        for token in {*prompt, *answer}:
            logit, penalty = place.logit(token), params.repetition_penalty
            place.change(token, logit / penalty if logit > 0 else logit * penalty)
    if len(answer) < (params.min_tokens or 0) and params.end is not None:
        place.change(params.end % vocabulary, -inf)  # an end of -1 is the last token of the vocabulary
    return place


def draw(place: Place, params: SamplingParams, number: int) -> int:
    """Return the next token of an answer, its `number`-th."""
    likely = [token for token, logprob in place.logprobs().items() if logprob > -inf]
    if params.greedy:
        return likely[0]
    likely = likely[: params.top_k or None]
    temperature = 1.0 if params.temperature is None else params.temperature
    best = place.likely[likely[0]]
    weights = [exp((place.likely[token] - best) / temperature) for token in likely]
    kept, share = 1, weights[0]
    while kept < len(weights) and share < (params.top_p or 1.0) * sum(weights):
        share += weights[kept]
        kept += 1
    chance = Random(f"{params.seed or 0}/{number}")
    return chance.choices(likely[:kept], weights[:kept])[0]
