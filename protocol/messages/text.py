"""Requests to a processor and its replies: prompts and answers as text, one frozen type each.

A request is answered by a stream of replies that ends in one result or in a `RequestError`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from attrs import Factory, field, frozen

from protocol.messages.adapters import Adapter
from protocol.messages.generation import FinishReason, Grammar, Usage
from protocol.messages.kind import Kind, Message
from protocol.messages.media import Media
from protocol.messages.tools import AUTO, Tool, ToolCall, ToolChoice
from protocol.token_ids import TokenIds
from protocol.trace import Trace
from protocol.weight_versions import WeightVersions


class Role(StrEnum):
    """The author of a turn of a conversation."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@frozen
class Turn:
    """One message of a conversation: a text, or texts with images and videos between them, in their order."""

    role: Role
    content: str | tuple[str | Media, ...]
    name: str = ""  # of the participant; empty: none is given
    param: str = field(default="", eq=False)  # the client's name of the message
    reasoning: str = ""  # of an earlier answer, for templates that read it
    calls: tuple[ToolCall, ...] = ()  # of an earlier answer
    call_id: str = ""  # of the call whose result a tool's message is

    @property
    def text(self) -> str:
        """The text of the message; its pieces are joined with nothing in between."""
        content = self.content
        return content if isinstance(content, str) else "".join([part for part in content if isinstance(part, str)])

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and videos of the message, in their order."""
        content = self.content
        return () if isinstance(content, str) else tuple(part for part in content if not isinstance(part, str))


@frozen
class Rendering:
    """The choices of a client about how a chat template renders a conversation.

    `continues` asks for the last turn, an assistant's, without its end, so that the answer goes on with it.
    """

    variables: dict[str, object] = Factory(dict)  # of the template
    effort: str | None = None  # of reasoning; None: the template's default
    effort_field: str = "reasoning_effort"  # the client's name of `effort`
    continues: bool = False
    begins_answer: bool = True  # the prompt ends with the beginning of the answer
    tools: tuple[Tool, ...] = ()  # that the answer may call


DEFAULT_RENDERING = Rendering()


@frozen
class Respond(Message):
    """Continue prompts in text; answered by `Accepted`, `Started`, pieces, `ChoiceEnded`, and `Answered`.

    A piece of a choice is `Text`, or `Reasoning` or `CallPart` where the format of the model has these.

    The prompt is a conversation (`turns`), or else each of `texts`, or each of `token_lists`, or without these the
    token that begins a text. Every prompt gets `n` choices, numbered from 0 through all prompts. `tokens_max` None asks
    for as many as the model's limits allow. `params` maps fields to their names in the client's dialect, for the
    `param` of errors.
    """

    id: str
    turns: tuple[Turn, ...] = ()
    rendering: Rendering = DEFAULT_RENDERING  # of the turns
    tool_choice: ToolChoice = AUTO
    parallel_calls: bool = True  # an answer may have several
    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    best_of: int | None = None  # the number of computed choices; the `n` likeliest are answered
    tokens_max: int | None = None
    tokens_min: int = 0
    thinking_token_budget: int | None = None  # tokens of reasoning, behind which it is closed
    temperature: float | None = None  # None: the model's own default
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_included: bool = False  # the text ends with the stop string that ended it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = Factory(dict)
    grammar: Grammar | None = None
    logprobs: int | None = None  # the number of likeliest tokens beside the chosen one; None: no log probabilities
    token_ids: bool = False  # whether `Text` has its token ids
    echo: bool = False  # each choice begins with its prompt, with `logprobs` also those of its tokens
    truncate: bool = False  # leave out the oldest turns of a conversation that is too long
    warm_up: bool = False  # compute the prompt, and end each choice before its first text
    priority: int | None = None  # highest first among waiting requests; None: the default of the client's key
    cache_salt: str | None = field(default=None, repr=False)  # with the tenant; it may be a secret of the client
    ttft_target_ms: float | None = None  # time to first token; None: the default of the client's key, or of the model
    itl_target_ms: float | None = None  # time from one token to the next
    session: str = ""  # requests of one session share a beginning; empty: no session
    params: dict[str, str] = Factory(dict)
    trace: Trace | None = None
    owner: str = ""  # the name of the client's key
    adapter: Adapter | None = None  # the LoRA adapter that its model was named with
    total_max: int | None = None  # tokens of prompt and answer at admission; 0: no engine was ready then

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return self.rendering.tools

    @property
    def scores_prompts(self) -> bool:
        """Whether the echoed prompts have log probabilities."""
        return self.echo and self.logprobs is not None

    @property
    def choices(self) -> int:
        """The number of choices of the answer."""
        return max(1, len(self.texts), len(self.token_lists)) * self.n

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and videos of all turns, in their order."""
        with_media = (turn for turn in self.turns if not isinstance(turn.content, str))
        return tuple(media for turn in with_media for media in turn.media)

    def param(self, name: str) -> str:
        """Return the client's name of a field."""
        return self.params.get(name, name)


@frozen
class Accepted(Message):
    """The request is valid and on its way to an engine; `prompt_tokens` counts all prompts together.

    The ids of `reused_tokens` of them were kept from earlier prompts, so only the others were tokenised.
    """

    prompt_tokens: int
    reused_tokens: int = 0


@frozen
class TokenText:
    """One token as text; `data` are its bytes of the answer, perhaps a part of a character."""

    text: str
    data: bytes
    logprob: float | None  # None of the first token of a prompt, which nothing comes before
    top: tuple[tuple[str, bytes, float], ...] = ()  # the likeliest tokens in this place, the likeliest first


@frozen
class Text(Message):
    """The next piece of one choice, and the number of its tokens.

    `logprobs` has one entry for each token ending in this piece, and `ids` one for each token, if requested.
    """

    text: str
    tokens: int
    choice: int = 0
    logprobs: tuple[TokenText, ...] = ()
    ids: tuple[int, ...] = ()


@frozen
class Reasoning(Message):
    """The next piece of the reasoning of one choice; its fields are those of `Text`."""

    text: str
    tokens: int
    choice: int = 0
    logprobs: tuple[TokenText, ...] = ()
    ids: tuple[int, ...] = ()


@frozen
class CallPart(Message):
    """The next part of a call of a function in one choice, numbered from 0 by `index`.

    The first part of a call has its `name`. The `arguments` of all parts, joined, are the JSON text of an object.
    """

    index: int
    name: str
    arguments: str
    tokens: int
    choice: int = 0
    logprobs: tuple[TokenText, ...] = ()
    ids: tuple[int, ...] = ()


AnswerPiece: TypeAlias = Text | Reasoning | CallPart
"""The next piece of one choice, of any kind."""


@frozen
class ChoiceEnded(Message):
    """One choice is whole; `matched` is the stop string or token id that ended it, if one did.

    `weight_versions` are the versions of the weights that computed it, in order, each with its number of tokens.
    """

    reason: FinishReason
    choice: int = 0
    matched: str | int | None = None
    weight_versions: WeightVersions = ()


@frozen
class Answered(Message):
    """Every choice is whole; `usage` counts each prompt once, and all computed tokens."""

    usage: Usage


@frozen
class Tokenize(Message):
    """Ask for the token ids of a conversation or of a plain text; the result is `Tokenized`."""

    turns: tuple[Turn, ...] = ()
    rendering: Rendering = DEFAULT_RENDERING  # of the turns
    text: str = ""
    special: bool = True  # add the tokenizer's special tokens around the text
    owner: str = ""  # the name of the client's key


@frozen
class Tokenized(Message):
    """Token ids, and the most tokens that one request may have."""

    ids: TokenIds
    context_max: int


@frozen
class Detokenize(Message):
    """Ask for the text of token ids; the result is `Detokenized`."""

    ids: tuple[int, ...]
    owner: str = ""  # the name of the client's key


@frozen
class Detokenized(Message):
    """The text of token ids."""

    text: str


# Without results, so that no link carries requests: processors are asked only within their own node.
KINDS = (
    Kind(11, Respond),
    Kind(12, Text),
    Kind(13, Accepted),
    Kind(14, ChoiceEnded),
    Kind(15, Answered),
    Kind(16, Tokenize),
    Kind(17, Tokenized),
    Kind(18, Detokenize),
    Kind(19, Detokenized),
    Kind(47, Reasoning),
    Kind(48, CallPart),
)
