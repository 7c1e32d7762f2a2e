"""Requests to an engine and its replies, one frozen type each; what a processor is asked is in `text_messages`.

A request is answered by a stream of replies that ends in one result or in a `RequestError`.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, frozen

from protocol.kind import Kind, Message
from protocol.model_folder import Digest
from protocol.tensors import Tensor
from protocol.trace import Trace

REQUEST_ID_LENGTH = 32
"""Every request id has this many hexadecimal digits: SGLang aborts by prefix, so no id may be another's prefix."""


class FinishReason(StrEnum):
    """How an answer that is whole ended; anything else ends in an error."""

    STOP = "stop"  # the model, a stop string or a stop token ended it
    LENGTH = "length"  # it reached the number of tokens asked for


@frozen
class Usage:
    """What a request cost, in tokens; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@frozen
class Grammar:
    """What an answer must look like; `text` is JSON for schemas and structural tags."""

    kind: GrammarKind
    text: str


@frozen
class Sampling:
    """How tokens are chosen and when the engine stops by itself; defaults leave the model's distribution alone."""

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
    logit_bias: dict[int, float] = Factory(dict)  # by token id, added before anything else
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether the tokens of an answer change how likely they are to be said again."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)


# Asked of an engine's worker ----------------------------------------------------------


@frozen
class Rendezvous:
    """Where a prefill hands its KV cache to a decode: both name the same room of the prefill's own server."""

    room: int  # from 0 to 2**63 - 1, of this request alone
    host: str
    port: int


@frozen
class Generate(Message):
    """Continue `tokens`; answered by one `Started`, then `Tokens`, and `Finished`.

    `logprobs` asks for each token's log probability and those of as many of the likeliest; None asks for none. Requests
    with different `cache_salt` share no prefix cache. Of those that wait for a slot, the higher `priority` goes first.
    With a `rendezvous` a prefill and a decode are asked for the same tokens, each its part of the work. Queues take
    turns between `owner`s, the names of clients' keys.
    """

    id: str
    tokens: list[int]
    sampling: Sampling
    logprobs: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    rendezvous: Rendezvous | None = None
    said: int = 0  # so many of the last tokens are the answer's own, from a worker that was lost
    trace: Trace | None = None
    owner: str = ""  # the name of the client's key


@frozen
class Started(Message):
    """The first token is there; `cached_tokens` of the prompt needed no computing."""

    cached_tokens: int = 0


@frozen
class Logprob:
    """The natural logarithm of a token's probability where it stands, and the likeliest ids there with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class Tokens(Message):
    """The next token ids of one answer, as many as one engine step gave it; one `Logprob` each if asked for."""

    ids: list[int]
    logprobs: tuple[Logprob, ...] = ()


@frozen
class Finished(Message):
    """The answer is whole; `matched` is the stop string or token id that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    matched: str | int | None = None


@frozen
class GetInfo(Message):
    """Ask an engine what it is; the result is `EngineInfo`."""


class HandOff(StrEnum):
    """How a prefill gives its work to a decode."""

    NONE = "none"
    RENDEZVOUS = "rendezvous"
    SEQUENTIAL = "sequential"


@frozen
class EngineInfo(Message):
    """What an engine is and what it can hold; lengths in tokens."""

    kind: str
    version: str
    vocabulary_size: int
    context_max: int  # prompt and answer together
    kv_tokens_max: int  # what all requests that run at once can hold together
    request_tokens_max: int  # what one request can hold, prompt and answer together
    running_max: int
    page_size: int
    honours_seed: bool
    grammars: tuple[GrammarKind, ...] = ()  # that it can keep answers to
    hand_off: HandOff = HandOff.NONE
    bootstrap: tuple[str, int] | None = None  # host and port where a prefill's rendezvous is
    ranks: int = 1
    digest: Digest = ()  # of its model's folder, as far as somebody has looked


@frozen
class Ping(Message):
    """Ask whether an engine lives; what computes in it answers `Done` by itself, or not at all."""


@frozen
class GetLoad(Message):
    """Ask an engine how busy it is by its own count; the result is `EngineLoad`."""


@frozen
class EngineLoad(Message):
    """An engine's own count of its requests and of the KV memory they hold, in tokens."""

    running: int
    waiting: int
    kv_tokens_used: int


@frozen
class FlushCache(Message):
    """Drop the prefix cache of an idle engine; the result is `Done`."""


@frozen
class Done(Message):
    """A control operation was carried out."""


@frozen
class CheckGrammar(Message):
    """Compile a grammar and walk it, at an engine's grammar checker; the result is `GrammarChecked`.

    Checks take turns between `owner`s, the names of clients' keys.
    """

    grammar: Grammar
    owner: str = ""


@frozen
class GrammarChecked(Message):
    """What a check found; times are of a processor."""

    refusal: str = ""  # a sentence for the client; empty: the grammar may be used
    compile_s: float = 0.0
    step_ms: float = 0.0  # the longest step of the walk
    size: int = 0  # of the compiled grammar, in bytes


@frozen
class RunRank(Message):
    """Run one rank of an engine that spans nodes, for as long as the asker stays; answered by one `RankStarted`.

    `agreed` is what all of its nodes must have in their files, as JSON by key: each runs what its own file says.
    """

    agreed: dict[str, str]
    bootstrap_port: int | None = None  # where this life of a prefill is met, one of those that the files give it


@frozen
class RankStarted(Message):
    """The rank is being started, and nothing is left here of an earlier one."""


@frozen
class Embedded(Message):
    """Tensors, such as the embeddings of an image; their bytes travel in pieces, beside everything else."""

    tensors: tuple[Tensor, ...]


KINDS = (
    Kind(1, Generate, replies=(Started, Tokens), result=Finished),
    Kind(2, Started),
    Kind(3, Tokens),
    Kind(4, Finished),
    Kind(5, GetInfo, result=EngineInfo),
    Kind(6, EngineInfo),
    Kind(7, GetLoad, result=EngineLoad),
    Kind(8, EngineLoad),
    Kind(9, FlushCache, result=Done),
    Kind(10, Done),
    Kind(20, Embedded),
    Kind(27, RunRank, replies=(RankStarted,), result=Done),
    Kind(28, RankStarted),
    Kind(29, Ping, result=Done),
    Kind(30, CheckGrammar, result=GrammarChecked),
    Kind(31, GrammarChecked),
)
