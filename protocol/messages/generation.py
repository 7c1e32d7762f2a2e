"""The generation of tokens: its request to an engine and the replies; messages to a processor are in `text`.

A request is answered by a stream of replies that ends in one result or in a `RequestError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from attrs import Factory, evolve, field, frozen

from protocol.errors import PeerViolation
from protocol.messages.adapters import Adapter, adapter_salt
from protocol.messages.kind import Kind, Message
from protocol.messages.media import MediaItem, check_item, with_data
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds
from protocol.trace import Trace

REQUEST_ID_LENGTH = 32
"""The hexadecimal digits of every request id: SGLang aborts by prefix, so no id may be a prefix of another."""


class FinishReason(StrEnum):
    """The reason why a whole answer ended; any other answer ends in an error."""

    STOP = "stop"  # the model, a stop string or a stop token ended it
    LENGTH = "length"  # it reached the requested number of tokens


@frozen
class Usage:
    """The tokens of a request: `cached_tokens` of its prompt came from the prefix cache.

    `reasoning_tokens` of its answer are reasoning, which a processor alone knows.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@frozen
class Grammar:
    """A constraint on the text of an answer; `text` is JSON for schemas and structural tags."""

    kind: GrammarKind
    text: str


@frozen
class Sampling:
    """Sampling and stop conditions; the defaults do not change the model's distribution."""

    tokens_max: int
    tokens_min: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = Factory(dict)  # keys: token ids; added before anything else
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether sampled tokens become less or more likely in the rest of the answer."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def draws(self) -> str | None:
        """The name of a field that asks for another token than the likeliest, None without one.

        A diffusion model takes the likeliest tokens, and would ignore the field.
        """
        neutral = {
            "temperature": 0,
            "tokens_min": 0,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "repetition_penalty": 1,
            "logit_bias": {},
        }
        return next((name for name, value in neutral.items() if getattr(self, name) != value), None)


# Requests to an engine ----------------------------------------------------------------


HAND_OFF_BYTES_MAX = 2**18
"""The most bytes of a hand-off, and of the address of a prefill."""

SCORE_DTYPES = (Dtype.FLOAT32, Dtype.INT32, Dtype.FLOAT32)
"""The types of the tensors of `PromptScores`."""


@frozen
class PromptBlocks:
    """The hashes of a prompt's full blocks of `page_size` tokens, up to its first image or video.

    `digest` is the last block's, from which the answer's blocks continue; without a block it is the salt's.
    """

    page_size: int
    hashes: Sequence[int]
    digest: bytes = b""


@frozen
class RoutingHints:
    """Hints for the router of a request; no worker gets them.

    Requests of one `session` share a beginning, and preferably a worker. The targets are the client's, in milliseconds:
    to the first token, and from one token to the next.
    """

    session: str = ""
    blocks: tuple[PromptBlocks, ...] = ()
    ttft_target_ms: float | None = None
    itl_target_ms: float | None = None


@frozen
class Generate(Message):
    """Continue `tokens`; answered by one `Started`, then `Tokens`, and `Finished`.

    `logprobs` requests the log probability of each token and of so many of the likeliest ones; None requests none.
    With `prompt_logprobs` as many are requested of the prompt, without its `resumed_tokens`; only an answer with
    `logprobs` has them. Requests with different `cache_salt` share no prefix cache. The waiting request of the highest
    `priority` gets the next slot. Queues are fair between `owner`s, the names of clients' keys. Each of the `media` has
    one placeholder among the `tokens` for each of its tokens. In an engine with several ranks the one of number `rank`,
    chosen by the router, computes the request.

    A prefill and a decode get the same tokens, and each does its part of the work. The bytes of `hand_off` bring the KV
    cache from one to the other, and only their kind reads them; an engine that computes both gets none.
    """

    id: str
    tokens: TokenIds
    sampling: Sampling
    logprobs: int | None = None
    cache_salt: str | None = field(default=None, repr=False)  # with the tenant; it may be a secret of the client
    priority: int = 0
    hand_off: bytes = b""
    resumed_tokens: int = 0  # the number of last `tokens` that are a lost worker's part of the answer
    trace: Trace | None = None
    owner: str = ""  # the name of the client's key
    media: tuple[MediaItem, ...] = ()
    cached_tokens: int = 0  # tokens in the worker's prefix cache, by its router's estimate
    hints: RoutingHints | None = None
    rank: int = 0
    prompt_logprobs: bool = False
    adapter: Adapter | None = None  # the LoRA adapter to compute with; None: the model alone

    @property
    def cache_namespace(self) -> str | None:
        """The salt of its prefix cache: requests with different adapters or salts share none."""
        return adapter_salt(self.adapter, self.cache_salt)

    @property
    def scored_tokens(self) -> int:
        """The number of prompt tokens whose log probabilities are requested: all behind the first."""
        return len(self.tokens) - self.resumed_tokens - 1 if self.prompt_logprobs else 0

    @property
    def uncached_tokens(self) -> int:
        """The number of prompt tokens to compute, an estimate; the last one always is computed."""
        return max(1, len(self.tokens) - max(0, self.cached_tokens))  # another node may send a negative number

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the media."""
        return tuple(item.data for item in self.media)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Generate:
        """Return the request with its media's tensors replaced."""
        return evolve(self, media=with_data(self.media, tensors))

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for a contradictory item of the media."""
        for item in self.media:
            check_item(item)


@frozen
class RouteTaken:
    """The route of a request, for explanations of a choice; never sent to another node.

    At the choice, `overlap` tokens of the prompt were expected in the worker's prefix cache. `score` is the number
    compared by the routing policy, None if it compared none.
    """

    workers: str
    overlap: int
    score: float | None = None


@frozen
class PromptScores:
    """The natural logarithms of the probabilities of a prompt's tokens, each given those before it.

    Each tensor has a row for each token behind the first, which has none: `logprobs` one float32; `top_ids` (int32) and
    `top_logprobs` (float32) the likeliest tokens in the place, the likeliest first.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@frozen
class Started(Message):
    """The first token has been computed; `cached_tokens` of the prompt came from the prefix cache.

    `scores` are those of the prompt, if they were requested. From a sequential prefill no token follows: `hand_off` is
    the state with which its decode is to be asked, and the engine holds it until this request is left. `version` is
    that of the weights that compute the answer.
    """

    cached_tokens: int = 0
    route: RouteTaken | None = field(default=None, eq=False)  # not a part of the answer
    hand_off: bytes = b""
    scores: PromptScores | None = None
    version: str = ""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the scores."""
        scores = self.scores
        return () if scores is None else (scores.logprobs, scores.top_ids, scores.top_logprobs)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Started:
        """Return the message with its scores' tensors replaced."""
        return evolve(self, scores=PromptScores(*tensors))

    def check_tensors(self) -> None:
        """Raise `PeerViolation` unless the scores are rows of numbers, as many of each kind."""
        if (scores := self.scores) is None:
            return
        rows, likeliest = scores.logprobs.shape, scores.top_ids.shape
        dtypes = tuple(tensor.dtype for tensor in self.tensors)
        if dtypes != SCORE_DTYPES or len(rows) != 1 or likeliest[:-1] != rows or likeliest != scores.top_logprobs.shape:
            raise PeerViolation("the scores of a prompt whose tensors do not fit each other")


@frozen
class Logprob:
    """The natural logarithm of a token's probability in its place, and the likeliest token ids there with their own."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class Tokens(Message):
    """The next token ids of one answer, from one engine step; with one `Logprob` each if requested.

    Where the weights have been replaced, a reply without ids has the `version` of the tokens behind it. Only such a
    reply has one, so that no token is looked at for it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    version: str = ""


@lru_cache(maxsize=16_384)
def one_token(token: int) -> Tokens:
    """Return the reply with one token id and no log probability; the same object for the same id."""
    return Tokens((token,))


@frozen
class Finished(Message):
    """The answer is whole; `matched` is the stop string or token id that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    matched: str | int | None = None


@frozen
class Embedded(Message):
    """Tensors, such as the embeddings of an image; their bytes are an attachment, sent in pieces."""

    tensors: tuple[Tensor, ...]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Embedded:
        """Return the message with other tensors."""
        return Embedded(tuple(tensors))


KINDS = (
    Kind(1, Generate, replies=(Started, Tokens), result=Finished, first=Started),
    Kind(2, Started),
    Kind(3, Tokens),
    Kind(4, Finished),
    Kind(20, Embedded),
)
