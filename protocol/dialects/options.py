"""The fields of requests that several dialects share, with their limits: each range stands here and nowhere else."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from attrs import field, frozen

from protocol.dialects.formats import JsonObjectOrText, Pattern, ResponseFormat
from protocol.dialects.targets import TargetMs
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Respond, Turn
from protocol.strict.checks import Holds, Within
from protocol.strict.mistakes import Mistake, describe
from protocol.strict.objects import FieldCheck, Harmless

SESSION_LENGTH_MAX = 256  # of a name of a session; of a longer one, the beginning
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1024
STOP_TOKENS_MAX = 64
LOGIT_BIAS_MAX = 1024
TOP_LOGPROBS_MAX = 20
CHOICES_MAX = 128  # of one request, of all its prompts together


@frozen
class TopK:
    """The range of `top_k`: -1 for all tokens, or a count."""

    def mistake(self, value: object) -> str | None:
        """Return the range if a number is neither -1 nor a count."""
        assert isinstance(value, int)
        if value == -1 or 1 <= value <= INT32_MAX:
            return None
        return f"must be -1 (all tokens) or from 1 to {INT32_MAX}, got {describe(value)}"


@frozen
class SpellsTokenId:
    """A token id as a key of a JSON object (a string); each id has one spelling, so none occurs twice."""

    def mistake(self, value: object) -> str | None:
        """Return the range if a string is not a token id in plain decimal."""
        assert isinstance(value, str)
        if re.fullmatch("0|[1-9][0-9]{0,9}", value) and int(value) <= INT32_MAX:
            return None
        return f"must be a token id from 0 to {INT32_MAX}, got {describe(value)}"


Name = Annotated[str, Holds(1, 256)]
TokenCount = Annotated[int, Within(at_least=1, at_most=INT32_MAX)]
Penalty = Annotated[float, Within(at_least=-2, at_most=2)]
StopString = Annotated[str, Holds(1, STOP_CHARACTERS_MAX)]
StopStrings = Annotated[tuple[StopString, ...], Holds(0, STOPS_MAX)]
TokenId = Annotated[int, Within(at_least=0, at_most=INT32_MAX)]
Bias = Annotated[float, Within(at_least=-100, at_most=100)]
ChoiceCount = Annotated[int, Within(at_least=1, at_most=CHOICES_MAX)]
TopLogprobs = Annotated[int, Within(at_least=0, at_most=TOP_LOGPROBS_MAX)]


@frozen(kw_only=True)
class Options:
    """Sampling, stop conditions and grammars of a request; None leaves a field to the model's default."""

    temperature: Annotated[float, Within(at_least=0, at_most=2)] | None = None
    top_p: Annotated[float, Within(above=0, at_most=1)] | None = None
    top_k: Annotated[int, TopK()] | None = None
    min_p: Annotated[float, Within(at_least=0, at_most=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    # Far below the least, a likely token's score divided by it is infinite, and the engine draws from no numbers.
    repetition_penalty: Annotated[float, Within(at_least=0.001, at_most=2)] | None = None
    logit_bias: Annotated[dict[Annotated[str, SpellsTokenId()], Bias], Holds(0, LOGIT_BIAS_MAX)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Holds(0, STOP_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Within(at_least=0, at_most=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Within(at_least=-INT64_MAX - 1, at_most=INT64_MAX)] | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None
    structural_tag: JsonObjectOrText | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Within(at_least=-INT32_MAX - 1, at_most=INT32_MAX)] | None = None
    cache_salt: Name | None = field(default=None, repr=False)
    ttft_target_ms: TargetMs | None = None
    itl_target_ms: TargetMs | None = None
    # tokens of reasoning, behind which it is closed and the answer goes on, an extension of vLLM's server
    thinking_token_budget: Annotated[int, Within(at_least=0, at_most=INT32_MAX)] | None = None
    prompt_cache_key: str | None = None  # names a session, whose requests go to one worker rather than to others

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def format_grammar(self) -> tuple[str, Grammar] | None:
        """Return the name of the dialect's own field for formats and the grammar that it requires, None without one."""
        return None

    def grammars(self) -> list[tuple[str, Grammar]]:
        """Return every grammar that is required, each with the name of its field.

        Where only the valid fields of a request are checked, one that could not be read counts as not given.
        """
        from_format = self.format_grammar()
        tag: JsonObjectOrText | None = getattr(self, "structural_tag", None)
        extensions: tuple[tuple[str, GrammarKind, str | None], ...] = (
            ("regex", GrammarKind.REGEX, getattr(self, "regex", None)),
            ("ebnf", GrammarKind.EBNF, getattr(self, "ebnf", None)),
            ("structural_tag", GrammarKind.STRUCTURAL_TAG, None if tag is None else tag.text),
        )
        grammars = [(name, Grammar(kind, text)) for name, kind, text in extensions if text is not None]
        return grammars if from_format is None else [from_format, *grammars]

    @property
    @abstractmethod
    def tokens_max(self) -> int | None:
        """The most tokens to generate for each choice, None if the model's limits alone count."""

    @property
    @abstractmethod
    def tokens_max_field(self) -> str:
        """The name that the client gave to `tokens_max`."""

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (self._check_least_tokens, self._check_grammars, self._check_grammar_without_least_tokens)

    def _check_least_tokens(self) -> Iterator[Mistake]:
        most, least = self.tokens_max, self.min_tokens or 0
        if most is not None and least > most:
            yield Mistake("min_tokens", f"must be at most {self.tokens_max_field} ({most}), got {least}")

    def _check_grammars(self) -> Iterator[Mistake]:
        names = [name for name, _ in self.grammars()]
        for name in names[1:]:
            yield Mistake(name, f"cannot stand beside {names[0]}: an answer keeps to one grammar at most")

    def _check_grammar_without_least_tokens(self) -> Iterator[Mistake]:
        grammars = self.grammars()
        if grammars and self.min_tokens:
            yield Mistake("min_tokens", f"cannot stand beside {grammars[0][0]}: an answer ends where its grammar does")


@frozen
class StreamOptions:
    """Options of a stream: what it carries besides text."""

    harmless: ClassVar[Harmless] = {
        "include_obfuscation": (False,),
        "continuous_usage_stats": (bool,),  # guidellm always sets it, and reads the usage of the last chunk only
    }

    include_usage: bool | None = None


@frozen(kw_only=True)
class ChoiceOptions(Options):
    """The further fields that chat completions and completions share: choices, formats, and streams."""

    n: ChoiceCount | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        """The number of choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def format_grammar(self) -> tuple[str, Grammar] | None:
        """Return `response_format` and the grammar that it requires."""
        response_format: ResponseFormat | None = getattr(self, "response_format", None)
        grammar = None if response_format is None else response_format.grammar()
        return None if grammar is None else ("response_format", grammar)


def respond(
    options: Options,
    *,
    request_id: str,
    tokens_max: int | None,
    params: Mapping[str, str],
    turns: tuple[Turn, ...] = (),
    rendering: Rendering = DEFAULT_RENDERING,
    texts: tuple[str, ...] = (),
    token_lists: tuple[tuple[int, ...], ...] = (),
    n: int = 1,
    best_of: int | None = None,
    logprobs: int | None = None,
    echo: bool = False,
    truncate: bool = False,
    warm_up: bool = False,
    session: str = "",
) -> Respond:
    """Return the request for a processor; `params` has the client's names of fields that differ from `Respond`'s."""
    names = {"tokens_min": "min_tokens", **params}
    grammars = options.grammars()  # one at most
    names.update(("grammar", name) for name, _ in grammars)
    return Respond(
        id=request_id,
        turns=turns,
        rendering=rendering,
        texts=texts,
        token_lists=token_lists,
        n=n,
        best_of=best_of,
        tokens_max=tokens_max,
        tokens_min=options.min_tokens or 0,
        thinking_token_budget=options.thinking_token_budget,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=options.repetition_penalty,
        stop=options.stops,
        stop_included=options.include_stop_str_in_output or False,
        stop_token_ids=options.stop_token_ids or (),
        ignore_eos=options.ignore_eos or False,
        seed=options.seed,
        logit_bias={int(token): bias for token, bias in (options.logit_bias or {}).items()},
        grammar=next((grammar for _, grammar in grammars), None),
        logprobs=logprobs,
        token_ids=options.return_token_ids or False,
        echo=echo,
        truncate=truncate,
        warm_up=warm_up,
        priority=options.priority,
        cache_salt=options.cache_salt,
        ttft_target_ms=options.ttft_target_ms,
        itl_target_ms=options.itl_target_ms,
        session=(options.prompt_cache_key or session)[:SESSION_LENGTH_MAX],
        params=names,
    )
