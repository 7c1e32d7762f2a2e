"""The model of an answer, computed from the request and the tokenizer alone.

An answer is a function of what a model sees: the token ids of the prompt, and in place of each placeholder a row of the
embeddings of its image or video (`tests/system/simulator/pictures.py`). So an answer about another picture, about none,
or about two in the wrong order is a wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from attrs import evolve, frozen

from actors.engines.simulated.scores import PromptScorer
from tests.rig.fake_engine import logprob_at, token_at
from tests.rig.gateway import TINY
from tests.system.simulator.pictures import SIGHTED, Album, Content, Picture, pictures_of, seen, text_of, with_others
from tests.system.simulator.pools import target_of

VOCABULARY = 512
BROKEN = "\N{REPLACEMENT CHARACTER}"
TENANTS = (None, None, None, "one", "two")  # of salted requests
WORDS = ("oak", "wörld", "日本", "🙂", "fox", "a", "old", "b\n", "<|x|>", "é")


@frozen(kw_only=True)
class PlannedRequest:
    """One request of a client, in no dialect."""

    turns: tuple[tuple[str, Content], ...]  # of (role, message)
    plain: bool = False  # the prompt is the last text without the template
    echo: bool = False  # the answer begins with the prompt
    tokens_max: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int | None = None
    salt: str | None = None  # of its prefix cache
    ttft_ms: float | None = None  # the target of its first token
    logprobs: int | None = None  # the number of likeliest tokens, beside each token's own
    table: int | None = None  # the same for the prompt too, as completions have them
    stream: bool = True
    usage: bool = False
    refused: bool = False  # by the engine
    errors: frozenset[str] = frozenset()  # of its pictures: it must end in one of them, if there are any

    @property
    def must_fail(self) -> bool:
        """Whether it may not be answered."""
        return self.refused or bool(self.errors)

    @property
    def name(self) -> str:
        """The first word of its last message."""
        return self.text.split()[0]

    @property
    def text(self) -> str:
        """The text of its last message."""
        return text_of(self.turns[-1][1])

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The images and videos of all its messages."""
        return tuple(picture for _, content in self.turns for picture in pictures_of(content))

    @property
    def prompt(self) -> list[int]:
        """The token ids that an engine must get."""
        return prompt_of(self.turns, self.plain)

    @property
    def seen(self) -> list[int]:
        """What the model sees."""
        return seen_of(self.turns, self.plain)


@frozen
class Choice:
    """One complete choice."""

    text: str
    reason: str
    ids: tuple[int, ...]  # that were computed for it

    @property
    def scores(self) -> list[tuple[bytes, float]]:
        """Each token of the text, as bytes, with its log probability; ids that end answers have no text."""
        tokens = [(token, place) for place, token in enumerate(self.ids) if token not in TINY.eos_token_ids]
        return [(TINY.data(token), logprob_at(token, place, 0, VOCABULARY).logprob) for token, place in tokens]

    def tables(self, request: PlannedRequest) -> list[list[float | None]]:
        """The log probabilities of the prompt's tokens and its own, those that end answers too.

        They depend on the size of the engine's vocabulary, in which a model that sees has two tokens more.
        """
        own = [logprob_at(token, place, 0, VOCABULARY).logprob for place, token in enumerate(self.ids)]
        prompt = tuple(request.prompt)
        return [[None, *prompt_logprobs(prompt, size), *own] for size in (VOCABULARY, VOCABULARY + 2)]


@cache
def prompt_logprobs(prompt: tuple[int, ...], vocabulary_size: int) -> list[float]:
    scorer = PromptScorer(vocabulary_size, 0)
    scorer.add(prompt)
    return [*scorer.scores().logprobs.data.cast("B").cast("f")]


@frozen
class Whole:
    """A complete answer."""

    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)


@cache
def prompt_of(turns: tuple[tuple[str, Content], ...], plain: bool) -> list[int]:
    if plain:
        return TINY.tokenizer.encode(text_of(turns[-1][1])).ids
    text = "".join(f"<|im_start|>{role}\n{_with_places(content)}<|im_end|>\n" for role, content in turns)
    model = SIGHTED if any(pictures_of(content) for _, content in turns) else TINY
    return model.tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False).ids


def _with_places(content: Content) -> str:
    parts = (content,) if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else f"<|{part.modality}_pad|>" * part.item.tokens for part in parts)


@cache
def seen_of(turns: tuple[tuple[str, Content], ...], plain: bool) -> list[int]:
    items = [picture.item for _, content in turns for picture in pictures_of(content)]
    return seen(prompt_of(turns, plain), items)


@cache
def whole(request: PlannedRequest) -> Whole:
    """Return the complete answer to a request."""
    return Whole(len(request.prompt), tuple(_choice(request, number) for number in range(request.n)))


def _choice(request: PlannedRequest, number: int) -> Choice:
    seeded = [] if request.seed is None else [request.seed ^ number]
    ids = [token_at([*request.seen, *seeded], place, VOCABULARY) for place in range(request.tokens_max)]
    text, reason, tokens = _cut(request, ids)
    return Choice(request.text + text if request.echo else text, reason, tuple(ids[:tokens]))


def _cut(request: PlannedRequest, ids: list[int]) -> tuple[str, str, int]:
    """Return the text up to its first stop, its finish reason and its number of ids."""
    for tokens in range(1, len(ids) + 1):
        if ids[tokens - 1] in request.stop_token_ids:
            return decoded(ids[: tokens - 1]), "stop", tokens
        text = decoded(ids[:tokens]) if request.stop else ""
        stops = [(start + len(stop), start) for stop in request.stop if (start := text.find(stop)) >= 0]
        if stops:
            return text[: min(stops)[1]], "stop", tokens
    return decoded(ids), "length", len(ids)


def decoded(ids: list[int]) -> str:
    """Return the text of ids, without an incremental decoder."""
    return TINY.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


# Drawing ---------------------------------------------------------------------------------


def draw(
    rng: random.Random,
    name: str,
    history: tuple[tuple[str, Content], ...] = (),
    choices_max: int = 1,
    album: Album | None = None,
    guides: Sequence[str] = (),
    words_max: int = 12,
) -> PlannedRequest:
    """Draw a request that no other client sends; many end at a stop string or stop token of their own answer.

    Some have pictures from an `album`. With `guides` most begin with one of those, and some are salted.
    """
    text = " ".join([name, *rng.choices(WORDS, k=rng.randint(0, words_max))])
    tokens_max = rng.choice((rng.randint(1, 8), rng.randint(1, 24), 40))
    first = (("system", "Be brief."),) if rng.random() < 0.2 and not history else ()
    salt = None
    if guides:
        first = (("system", rng.choice(guides)),) if rng.random() < 0.7 and not history else first
        salt = rng.choice(TENANTS)
    content: Content = text
    errors: frozenset[str] = frozenset()
    if album is not None:
        content, errors = album.content(name, text, sum(len(pictures_of(each)) for _, each in history))
    turns = (*first, *history, ("user", content))
    request = PlannedRequest(
        turns=turns,
        tokens_max=tokens_max,
        n=rng.choice((1, 1, 1, rng.randint(1, choices_max))),
        seed=rng.choice((None, rng.randrange(1000))),
        salt=salt,
        ttft_ms=target_of(name),
        logprobs=rng.choice((None, None, None, 0, 2)),
        stream=rng.random() < 0.7,
        usage=rng.random() < 0.5,
        refused=rng.random() < 0.05,
        errors=errors,
    )
    match rng.choice(("", "", "stop", "stop", "token")):
        case "stop":
            return evolve(request, stop=_stops(rng, whole(request).choices[0].text))
        case "token":
            return evolve(request, stop_token_ids=(rng.choice(whole(request).choices[0].ids),))
        case _:
            return request


def with_other_pictures(request: PlannedRequest) -> PlannedRequest:
    """Return a request with the same texts, and other pictures of the same sizes."""
    return evolve(request, turns=tuple((role, with_others(content)) for role, content in request.turns))


def _stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Draw stop strings: pieces of the answer, pieces that continue differently, and one that never comes."""
    stops = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text)) if text else 0
        piece = text[at : at + rng.randint(1, 6)]
        stops.append(piece + rng.choice(("", "", "", "!never")))
    # Where an unfinished character may be cut is not specified.
    return tuple(stop for stop in stops if stop and BROKEN not in stop) or ("nonsense",)
