"""The cost of a request, known before it is admitted: pure functions of the request.

All limits and queues weigh requests by these: admission and a key's concurrency by generations; the memory of gathered
answers by bytes; the fair queues and the KV memory of engines by the tokens of each generation. Each follows from the
request's own fields, so a request is refused, with the name of the field, before anything has been spent on it. The
first two are upper bounds. The last is an estimate: most clients give no `max_tokens`, and the model's limit, their
bound then, predicts no real length.

Images and videos need no bounds of their own here. Their tokens are a part of the prompt, which `total_max` bounds with
the answer; their bytes are reserved as the body arrives; their decoded size is bounded by the decoder, in advance.
"""

from __future__ import annotations

from attrs import frozen

from protocol.errors import BadRequest
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

SCORES_MAX = 2**20
"""The most log probabilities of one prompt: those of its tokens, and those of the likeliest ones in their places.

An engine makes an object of each, and sends all in one step.
"""

TOKENS_AROUND_MAX = 16
"""The most tokens that a tokenizer puts around a text."""

BYTES_A_CHARACTER_MAX = 4
"""The most bytes of a character in UTF-8; no token has less than a byte."""

ESCAPES = 2
"""The factor by which a text may grow as the inside of a JSON string in UTF-8; only control characters, which are rare,
grow by more."""


VECTOR_BYTES = 64
"""Memory of one vector in an answer, beside its elements."""

FLOAT_BYTES = 4
"""Memory of one element of a vector as it comes from an engine."""

NUMBER_BYTES = 25
"""The most memory of one element as JSON, with a comma."""


@frozen
class Cost:
    """The most that one request can use until its answer is whole."""

    generations: int  # computed by engines: prompts x best_of (or n)
    tokens: int  # the sum over all generations
    gathered_bytes: int  # memory of answers until they are whole, with echoed prompts


def cost(request: Respond, *, gathered: bool) -> Cost:
    """Return the cost of a request, assuming at most `total_max` tokens a generation.

    A `gathered` answer is kept until it is whole. Two other requests count in the same way: one with more choices
    computed than answered, since the likeliest are found only when all have ended; and a stream with its prompt echoed,
    since the whole prompt is there at once and leaves as fast as the client reads.
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
    return Cost(generations, tokens, kept_bytes + (_echoed_bytes(request, total_max) if request.echo else 0))


def _echoed_bytes(request: Respond, total_max: int) -> int:
    """Return the memory of the echoed prompts, with the log probabilities of their tokens if these are wanted."""
    texts = sum(text.__sizeof__() for text in request.texts) * ESCAPES
    echoed = texts + sum(map(len, request.token_lists)) * TOKEN_BYTES
    if request.scores_prompts:
        tokens = sum(min(_tokens_max(text), total_max) for text in request.texts) + sum(map(len, request.token_lists))
        echoed += tokens * LOGPROB_BYTES * (1 + (request.logprobs or 0))
    return request.n * echoed


def _tokens_max(text: str) -> int:
    """Return the most tokens that a text can have, without reading it."""
    return len(text) * (1 if text.isascii() else BYTES_A_CHARACTER_MAX) + TOKENS_AROUND_MAX


def check_scores(tokens: int, likeliest: int, param: str) -> None:
    """Raise `BadRequest` for a prompt with more log probabilities than are computed, with `likeliest` in each place."""
    if (count := tokens * (1 + likeliest)) > SCORES_MAX:
        raise BadRequest(
            f"a prompt of {tokens} tokens, each with {likeliest} likeliest ones, has {count} log probabilities;"
            f" at most {SCORES_MAX} are computed",
            param=param,
        )


def generations_of(request: Respond) -> int:
    """Return the number of generations that engines compute for a request."""
    return request.choices // request.n * max(request.n, request.best_of or 0)


def multiplying_field(request: Respond) -> str:
    """Return the client's name of the field that makes many generations of one request."""
    if request.best_of is not None and request.best_of > request.n:
        return "best_of"
    return "n" if request.n > 1 else request.params.get("turns", "prompt")


def vectors_bytes(count: int, width: int, *, base64: bool) -> int:
    """Return the most memory that an answer with so many vectors takes, as base64 or as JSON."""
    elements = count * width
    written = 4 * count * ((FLOAT_BYTES * width + 2) // 3) if base64 else NUMBER_BYTES * elements
    return VECTOR_BYTES * count + FLOAT_BYTES * elements + written


def generation_tokens(generate: Generate) -> int:
    """Return the tokens that one generation may take in an engine, prompt and answer together."""
    return kv_tokens(generate, Leg.BOTH, 0)


def kv_tokens(generate: Generate, leg: Leg, cached: int) -> int:
    """Return the tokens of KV memory that a generation may come to need, with `cached` prompt tokens in the engine.

    They are the rest of the prompt and, but for a prefill, the answer.
    """
    prompt = len(generate.tokens)
    # Another node may have sent any `cached_tokens` and `tokens_max`, negative ones too.
    needed = prompt - min(max(0, cached), prompt)
    if leg is not Leg.PREFILL:
        needed += max(0, min(generate.sampling.tokens_max, ANSWER_TOKENS_MAX))
    return needed


def encoding_tokens(encode: Encode) -> int:
    """Return the tokens of an item to encode; 0 for a negative number, which another node may have sent."""
    return max(0, encode.item.tokens)
