"""OpenAI completions: requests with prompts of text or token ids, and the chunks of one answer as server-sent events.

The chunks keep to the form that `chat` explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

import attrs
from attrs import define, field, frozen

from protocol.dialects.answer_builder import ChoiceParts, extend
from protocol.dialects.choices import ChoiceChunks, ChoicesBody, common_fields
from protocol.dialects.logprobs import Columns, Tabulator
from protocol.dialects.options import CHOICES_MAX, INT32_MAX, ChoiceCount, ChoiceOptions, Name, TopLogprobs, respond
from protocol.dialects.other_servers import GENERATION_KEYS
from protocol.dialects.prompt import Prompts
from protocol.dialects.request_body import decode, read
from protocol.messages.text import AnswerPiece, Respond, Text
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import FieldCheck, Harmless

KIND = "text_completion"  # of a chunk, too
TOKENS_MAX = 16  # the default of `max_tokens`, as with OpenAI


@frozen(kw_only=True)
class CompletionRequest(ChoiceOptions):
    """The body of `POST /v1/completions`."""

    harmless: ClassVar[Harmless] = {
        **GENERATION_KEYS,
        "user": (str,),
        "metadata": (dict,),
        "client_metadata": (dict,),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "add_special_tokens": (True,),
        "json_schema": (),
    }

    model: Name
    prompt: Prompts | None = None
    max_tokens: Annotated[int, Within(at_least=0, at_most=INT32_MAX)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: ChoiceCount | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> Prompts:
        """The prompts; without any, the one that begins a text."""
        return self.prompt or Prompts()

    @property
    def tokens_max(self) -> int:
        """The most tokens to generate for each choice."""
        return TOKENS_MAX if self.max_tokens is None else self.max_tokens

    @property
    def tokens_max_field(self) -> str:
        """The name that the client gave to `tokens_max`."""
        return "max_tokens"

    @property
    def choices_total(self) -> int:
        """The number of choices of the answer."""
        return self.prompts.count * self.choices

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (self._check_suffix, self._check_choices, *super().checks())

    def _check_suffix(self) -> Iterator[Mistake]:
        if self.suffix:
            message = "is not supported here, as no engine of this server fills in the middle; leave it out"
            yield Mistake("suffix", message, unsupported=True)

    def _check_choices(self) -> Iterator[Mistake]:
        computed, name = self.choices, "n"
        if self.best_of is not None:
            computed, name = self.best_of, "best_of"
            if self.best_of < self.choices:
                yield Mistake("best_of", f"must be at least n ({self.choices}), got {self.best_of}")
            elif self.best_of > self.choices and self.stream:
                yield Mistake("best_of", "cannot be streamed: which choices are the best is known when all have ended")
        count = self.prompts.count
        if count * computed > CHOICES_MAX:
            product = f"{count} prompts times {computed} make {count * computed} choices"
            path = name if computed > 1 else "prompt"
            yield Mistake(path, f"{product}; a request can have at most {CHOICES_MAX}")


def parse(body: bytes) -> CompletionRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), CompletionRequest)


def to_respond(request: CompletionRequest, *, request_id: str) -> Respond:
    """Return the request for a processor."""
    return respond(
        request,
        request_id=request_id,
        texts=request.prompts.texts,
        token_lists=request.prompts.token_lists,
        # Engines compute a token at least, with the prompt; none of it is answered.
        tokens_max=request.tokens_max or 1,
        warm_up=request.tokens_max == 0,
        n=request.choices,
        best_of=request.best_of,
        logprobs=request.logprobs,
        echo=request.echo or False,
        params={"turns": "prompt", "tokens_max": "max_tokens"},
    )


def completion_id(request_id: str) -> str:
    """Return the `id` of the answer to a request."""
    return f"cmpl-{request_id}"


class Chunks(ChoiceChunks):
    """The chunks of a completion."""

    def __init__(self, request: CompletionRequest, *, request_id: str, created: int) -> None:
        common = common_fields(KIND, completion_id(request_id), created=created, model=request.model)
        choices, logprobs = request.choices_total, request.logprobs is not None
        super().__init__(request, common, choices=choices, logprobs=logprobs, closing=b"")
        self._tabulators = [Tabulator() for _ in range(choices * logprobs)]

    def _begin(self, choice: int) -> bytes:
        head = self._heads[choice] = b'%b%d,"text":' % (self._start, choice)
        return head

    def _last_head(self, choice: int) -> bytes:
        return b'%b%d,"text":""' % (self._start, choice)

    def _logprobs_of(self, reply: Text) -> Columns:
        return self._tabulators[reply.choice].add(reply, Columns())


@define(eq=False)
class _Table:
    """The log probabilities of one choice: each column as the inside of a JSON list."""

    tabulator: Tabulator = field(factory=Tabulator)
    columns: dict[str, bytearray] = field(factory=lambda: {name: bytearray() for name in attrs.fields_dict(Columns)})

    def add(self, text: Text) -> None:
        columns = self.tabulator.add(text, Columns())
        for name, column in self.columns.items():
            extend(column, getattr(columns, name))

    def parts(self) -> Iterator[bytes | bytearray]:
        for index, (name, column) in enumerate(self.columns.items()):
            yield b'%b"%b":[' % (b"," if index else b"{", name.encode())
            yield column
            yield b"]"
        yield b"}"


class Completion(ChoicesBody):
    """The body that answers a request without a stream."""

    def __init__(self, request: CompletionRequest, *, request_id: str, created: int) -> None:
        common = common_fields(KIND, completion_id(request_id), created=created, model=request.model)
        choices, logprobs = request.choices_total, request.logprobs is not None
        super().__init__(request, common, choices=choices, logprobs=logprobs, around=(b'"text":"', b'"'))
        self._tables = [_Table() for _ in range(choices * logprobs)]

    def add_logprobs(self, _: ChoiceParts, text: AnswerPiece) -> None:
        """Add the log probabilities of the next piece of a choice, which is always text here."""
        assert isinstance(text, Text)
        self._tables[text.choice].add(text)

    def _logprobs_parts(self, index: int, _: ChoiceParts) -> Iterable[bytes | bytearray]:
        return self._tables[index].parts()
