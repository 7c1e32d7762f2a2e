"""The cost of a request, known before it is admitted: pure functions of the request.

All limits and queues weigh requests by these: admission and a key's concurrency (generations), the memory of answers
that are kept until they are whole (bytes), the queues that are fair between owners and the KV memory of engines (the
tokens of each generation). Each follows from the request's own fields, so that a request is refused, with the name of
the field, before anything has been spent on it. The first two are upper bounds. The last is an estimate: most clients
give no `max_tokens`, and what they may have then, all that the model can hold, says nothing of what they will have.

Images and videos need no bounds of their own here. Their tokens are a part of the prompt, which `total_max` bounds with
the answer; the bytes by which a client sends them are reserved with its body as they come; what they become when they
are decoded is bounded by whoever decodes them, before it does.
"""

from __future__ import annotations

from attrs import frozen

from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from protocol.messages.media import Encode
from protocol.messages.text import Respond

TOKEN_BYTES = 8
"""Memory of one token of a gathered answer, as text."""

LOGPROB_BYTES = 80
"""Memory of one log probability of a gathered answer, as a part of its JSON document."""

ANSWER_TOKENS_MAX = 4096
"""The most tokens of an answer that count, as in SGLang's own estimate: longer answers mostly end long before."""

ESCAPES = 2
"""The factor by which a text may grow as the inside of a JSON string in UTF-8; only control characters, which are rare,
grow by more."""


@frozen
class Cost:
    """The most that one request can use until its answer is whole."""

    generations: int  # that engines compute for it: prompts x best_of (or n)
    tokens: int  # of all generations together
    gathered_bytes: int  # of its answers while they are kept, with the prompts that they repeat


def cost(request: Respond, *, gathered: bool) -> Cost:
    """Return the cost of a request, none of whose generations has more than its `total_max` tokens.

    `gathered` tells that its answer is kept until it is whole. Two other requests are counted in the same way: one for
    which more choices are computed than answered, since the likeliest are known only when all have ended, and a stream
    that repeats its prompt, which is there at once, however long, and leaves as fast as the client reads.
    """
    generations = generations_of(request)
    total_max = request.total_max or 0
    tokens_max = total_max if request.tokens_max is None else min(request.tokens_max, total_max)
    tokens = generations * (1 if request.warm_up else tokens_max)
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
    """Return the number of generations that engines compute for a request."""
    return request.choices // request.n * max(request.n, request.best_of or 0)


def multiplying_field(request: Respond) -> str:
    """Return the name, as the client spells it, of the field that makes many generations of one request."""
    if request.best_of is not None and request.best_of > request.n:
        return "best_of"
    return "n" if request.n > 1 else request.params.get("turns", "prompt")


def generation_tokens(generate: Generate) -> int:
    """Return the tokens that one generation may take in an engine: those of its prompt and of its answer."""
    return kv_tokens(generate, Leg.BOTH, 0)


def kv_tokens(generate: Generate, leg: Leg, cached: int) -> int:
    """Return the tokens of KV memory that a generation may come to need, where `cached` of its prompt are there.

    They are the others of its prompt and, but for a prefill, those of its answer.
    """
    prompt = len(generate.tokens)
    needed = prompt - min(max(0, cached), prompt)  # which another node may have made anything
    if leg is not Leg.PREFILL:
        needed += max(0, min(generate.sampling.tokens_max, ANSWER_TOKENS_MAX))  # so may this
    return needed


def encoding_tokens(encode: Encode) -> int:
    """Return the tokens of an item that is to be encoded."""
    return max(0, encode.item.tokens)  # which another node may have made negative
