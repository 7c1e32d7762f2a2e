"""Upper bounds of the cost of a request, known before it is admitted: pure functions of the request.

Everything that weighs requests weighs them by these: the gate and a key's concurrency (generations), the queues between
owners (the tokens of each generation), the memory of answers that are gathered in one piece (bytes). Each is an upper
bound that the request's own text gives, so it can be refused, by name, before anything has been spent on it.
"""

from __future__ import annotations

from attrs import frozen

from protocol.messages import Generate
from protocol.text_messages import Respond

TOKEN_BYTES = 8
"""What a token of a gathered answer takes in memory, as text."""

LOGPROB_BYTES = 80
"""What a log probability of a gathered answer takes, as the part of a JSON document that it becomes."""

ESCAPES = 2
"""How much longer a text can be as the inside of a JSON string, in UTF-8, than it is in memory; control characters are
longer still, and rare."""


@frozen
class Cost:
    """The most that one request can take before its answer is whole."""

    generations: int  # that an engine computes for it: prompts x best_of (or n)
    tokens: int  # of all of them together
    gathered_bytes: int  # that its answers take where they are kept, and the prompts that they repeat


def cost(request: Respond, *, gathered: bool) -> Cost:
    """Return what a request may cost, no generation of which has more than its `total_max` tokens.

    `gathered` says that its answer is kept until it is whole. That is so of every request of which more is computed
    than answered (which choices are the likeliest is known when all have ended), and of every stream that repeats its
    prompt: that comes at once, however long it is, and leaves as fast as the client reads.
    """
    generations = generations_of(request)
    most = request.total_max or 0
    each = most if request.tokens_max is None else min(request.tokens_max, most)
    tokens = generations * (1 if request.warm_up else each)
    ranked = generations > request.choices
    if not gathered and not ranked and not request.echo:
        return Cost(generations, tokens, 0)
    logprobs = int(ranked) if request.logprobs is None else 1 + request.logprobs
    kept_bytes = tokens * (TOKEN_BYTES + LOGPROB_BYTES * logprobs)
    return Cost(generations, tokens, kept_bytes + (_echoed_bytes(request) if request.echo else 0))


def _echoed_bytes(request: Respond) -> int:
    texts = sum(text.__sizeof__() for text in request.texts) * ESCAPES
    return request.n * (texts + sum(map(len, request.token_lists)) * TOKEN_BYTES)


def generations_of(request: Respond) -> int:
    """Return how many generations engines compute for a request."""
    return request.choices // request.n * max(request.n, request.best_of or 0)


def multiplying_field(request: Respond) -> str:
    """Return the client's own name of the field that makes one request many generations."""
    if request.best_of is not None and request.best_of > request.n:
        return "best_of"
    return "n" if request.n > 1 else request.params.get("turns", "prompt")


def generation_tokens(generate: Generate) -> int:
    """Return what one generation may take of an engine: the tokens of its prompt and of its answer."""
    return len(generate.tokens) + max(0, generate.sampling.tokens_max)
