"""The text side of a model: its tokenizer, its chat template, its sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

from attrs import Factory, evolve, frozen
from tokenizers import Tokenizer

from actors.media.layout import VisionLayout
from actors.media.model_files import vision_layout
from actors.text.boundaries import boundaries, choose
from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.encoders import TOKENIZERS, TRIAL_TOKENS, TextEncoder, encoder
from actors.text.formats.detection import AUTO, chosen
from actors.text.formats.table import AnswerFormat, begins_thinking, is_thinking, markers, thought_marks
from actors.text.logprobs import TokenData, token_data
from actors.text.prompt_cache import Boundary, PromptCache
from actors.text.template_cost import fewest_turn_tokens
from actors.text.template_files import (
    DEFAULT,
    TOOL_USE,
    BadTemplate,
    Json,
    TemplateSource,
    other_names,
    own_templates,
    templates_of,
)
from actors.text.template_variables import Variables
from actors.text.token_bounds import characters_per_token_max
from actors.text.trials import cut_texts, hard_texts, trial_conversations
from actors.text.whole_tokens import WholeTokens, whole_tokens
from protocol.errors import BadRequest, StartFailed
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Respond, Turn
from protocol.model_folder import FILES, Digest, digest
from protocol.token_ids import TokenIds

TOKEN_IDS = 2**32  # a tokenizer takes no larger ones
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")  # that templates read
TRIAL_BYTES = 2**20  # of the cache in which trial texts are cut
PROMPT_TAIL_TOKENS = 16  # the last of a prompt, which show whether it ends within reasoning
NEEDED = ("tokenizer.json", "config.json")


@frozen
class Defaults:
    """The recommendations of a model's authors for sampling parameters that a request leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@frozen
class TextModel:
    """The text side of one model: it turns conversations into token ids, and token ids into text.

    A model may have a second template, for tools: `tool_use` is the same model with that, and the formats found in it.
    """

    tokenizer: Tokenizer
    encoder: TextEncoder
    template: ConversationTemplate
    eos_token_ids: frozenset[int]
    data: TokenData
    first_token: int | None = None  # begins a text, and is the prompt of a request without one
    defaults: Defaults = Defaults()
    characters_per_token_max: int | None = None  # the most characters of one token; None: no bound
    digest: Digest = ()  # the digest of the model's files
    whole_tokens: WholeTokens | None = None  # None: its decoder allows no such table
    turn_tokens_min: int = 0  # the fewest tokens that a further turn of a conversation has
    vision: VisionLayout | None = None  # None: it takes neither images nor videos
    answers: AnswerFormat = AnswerFormat()  # the formats of its answers
    markers: Mapping[int, str] = Factory(dict)  # the markers of these formats that are tokens
    boundary: Boundary | None = None  # behind which its prompts may be cut; None: they are encoded whole
    tool_use: TextModel | None = None  # None: its template is for all requests

    def serving(self, turns: Sequence[Turn], rendering: Rendering) -> TextModel:
        """Return the model with the template for this conversation.

        That is the one for tools if tools are offered, or if the other one has no place for the calls of the history.
        """
        if self.tool_use is None:
            return self
        called = not self.template.tools.shows_calls and any(turn.calls or turn.call_id for turn in turns)
        return self.tool_use if rendering.tools or called else self

    def prompt(self, turns: Sequence[Turn], rendering: Rendering = DEFAULT_RENDERING) -> str:
        """Return the conversation as its template renders it; raises `BadRequest` if the template fails."""
        return self.template.render(turns, rendering)

    def begins_thinking(self, rendering: Rendering) -> bool:
        """Return whether prompts that are rendered in this way end within reasoning, most probably.

        A word in a conversation may turn reasoning off, and an answer that goes on may stand within it: see `thinks`.
        """
        begins, _ = thought_marks(self.answers)
        return bool(begins) and begins_thinking(self.answers, self.template.tail(rendering))

    def thinks(self, request: Respond, prompt: Sequence[int]) -> bool:
        """Return whether the prompt of a request, with these tokens, ends within reasoning."""
        if not request.turns:
            return False
        if request.rendering.continues and is_thinking(self.answers, request.turns[-1].text):
            return True
        return begins_thinking(self.answers, self.decode(prompt[-PROMPT_TAIL_TOKENS:]))

    def encode(self, turns: Sequence[Turn], rendering: Rendering = DEFAULT_RENDERING) -> TokenIds:
        """Return the token ids of a conversation, up to the answer."""
        return self.encode_rendered(self.prompt(turns, rendering))

    def encode_text(self, text: str, *, special: bool = True) -> TokenIds:
        """Return the token ids of a text; `special` adds the tokenizer's own tokens around it."""
        return self.encoder.encode(text, special=special)

    def encode_rendered(self, text: str) -> TokenIds:
        """Return the token ids of a rendered conversation, or of a part of it."""
        return self.encode_text(text, special=False)

    def decode(self, ids: Sequence[int], param: str | None = None) -> str:
        """Return the text of token ids, with special tokens; raises `BadRequest`, about `param`, for unknown ids."""
        return decode(self.tokenizer, ids, param)


def decode(tokenizer: Tokenizer, ids: Sequence[int], param: str | None = None) -> str:
    """Return the text of token ids, with special tokens; raises `BadRequest`, about `param`, for unknown ids."""
    if any(tokenizer.id_to_token(token) is None for token in set(ids)):
        raise BadRequest("these are not all token ids of this model", param=param)
    # A batch of one releases the GIL.
    [text] = tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
    return text


def load(
    files: Mapping[str, bytes],
    template: str | None = None,
    template_name: str | None = None,
    variables: Variables | None = None,
    *,
    strftime: Callable[[str], str],
    salt: str,
    tools: str = AUTO,
    reasoning: str = AUTO,
    encodes: str = TOKENIZERS,
) -> TextModel:
    """Build the text side of a model from the contents of its small files.

    `template` is the text of a file that overrides the model's own template; of several, `template_name` chooses one
    for all requests, and `variables` are the operator's values of its variables. `strftime` formats the current time,
    for templates that name today's date, and `salt` has digits that no client knows. `tools` and `reasoning` name the
    formats of its answers, and `encodes` its encoder. Raises `StartFailed` if a file is missing or cannot be read, and
    its kinds `BadTemplate` if there is no chat template or one cannot render a conversation, and `NoEncoder`.
    """
    if missing := [name for name in NEEDED if name not in files]:
        raise StartFailed(f"the model's folder has no {' and no '.join(missing)}")
    read = _read_each(files)
    config, generation, tokenizing = (
        cast("dict[str, Json]", read.get(name, {}))
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    tokenizer = cast("Tokenizer", read["tokenizer.json"])
    sources = own_templates(files, template_name) if template is None else templates_of(template, template_name)
    description = json.loads(tokenizer.to_str())
    eos_ids = _eos(tokenizer, config, generation, tokenizing)
    specials = _specials(tokenizing)
    learned: list[ConversationTemplate] = []
    for source in sources:
        try:
            learned.append(_learned(source, strftime, specials, variables, salt))
        except StartFailed as error:
            names = other_names(files, template, TOOL_USE if source.for_tools else template_name)
            instead = f": name another one by `template_name` ({', '.join(map(repr, names))})" if names else ""
            instead += ", or none" if template_name is not None and DEFAULT in names else ""
            raise BadTemplate(f"{error}{instead}", "folder" if template is None else "file") from error
    model = TextModel(
        tokenizer=tokenizer,
        encoder=encoder(encodes, tokenizer, (text for each in learned for text in trial_conversations(each))),
        template=learned[0],
        eos_token_ids=eos_ids,
        first_token=_first_token(tokenizer, config, tokenizing, eos_ids),
        data=token_data(tokenizer, description),  # it reads the whole vocabulary, so not during a request
        characters_per_token_max=characters_per_token_max(description),
        defaults=_defaults(generation),
        digest=digest({name: files[name] for name in FILES if name in files}),
        whole_tokens=whole_tokens(tokenizer, description, eos_ids),
        vision=vision_layout(files),
    )
    formats = [chosen(source.text, tools, reasoning) for source in sources]
    found = boundaries(description)
    served, *others = map(partial(_with_template, model, found), learned, formats)
    return evolve(served, tool_use=next(iter(others), None))


def _specials(tokenizing: Mapping[str, Json]) -> dict[str, str]:
    """Return the special tokens that templates read, by name."""
    texts = {name: _as_text(tokenizing.get(name)) for name in SPECIALS}
    return {name: text for name, text in texts.items() if text is not None}


def _learned(
    source: TemplateSource,
    strftime: Callable[[str], str],
    specials: Mapping[str, str],
    variables: Variables | None,
    salt: str,
) -> ConversationTemplate:
    template, title = compile_template(source.text, strftime, source.title), source.title
    return ConversationTemplate.learned(
        template, source.text, specials, variables, salt, title=title, for_tools=source.for_tools
    )


def _with_template(
    model: TextModel, found: Mapping[str, int], template: ConversationTemplate, answers: AnswerFormat
) -> TextModel:
    """Return the model with another template, and with the formats of its answers."""

    def tokens_of(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    return evolve(
        model,
        template=template,
        turn_tokens_min=fewest_turn_tokens(partial(template.rendered, rendering=template.usual), tokens_of),
        answers=answers,
        boundary=_boundary(model, found, template),
        markers=_marker_tokens(model.tokenizer, markers(answers)),
    )


def _boundary(model: TextModel, found: Mapping[str, int], template: ConversationTemplate) -> Boundary | None:
    """Return the boundary of a template's prompts; None if it has none, or if texts that are cut have other ids."""
    rendered = trial_conversations(template)
    if (content := choose(found, rendered)) is None:
        return None
    boundary, encode = Boundary(content, found[content]), model.encode_rendered
    cache, tokens_max = PromptCache(TRIAL_BYTES, nullcontext()), 2**20
    hard = [*cut_texts(content), *hard_texts([content, *sorted(found)[:TRIAL_TOKENS]])]
    for text in [*rendered, *hard, *rendered]:
        encoded = cache.complete(cache.find(text, boundary, "", None, ()), encode, tokens_max)
        cache.verify(text, boundary, encoded.tokens, encode)
        if cache.statistics().mismatches:
            return None
    return boundary


def _marker_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """Return the markers that are tokens by themselves, by their ids."""
    ids = ((tokenizer.token_to_id(text), text) for text in texts)
    return {token: text for token, text in ids if token is not None}


def _read_each(files: Mapping[str, bytes]) -> dict[str, object]:
    """Return the contents of the files, by name; raises `StartFailed` with the names of all that cannot be read."""
    parsers: dict[str, Callable[[str], object]] = {
        "tokenizer.json": read_tokenizer,
        "config.json": _object,
        "generation_config.json": _object,
        "tokenizer_config.json": _object,
        "chat_template.jinja": str,
        "chat_template.json": _object,
        "processor_config.json": _object,
    }
    read, wrong = dict[str, object](), list[str]()
    for name in parsers.keys() & files.keys():
        try:
            read[name] = parsers[name](files[name].decode())
        except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exceptions
            wrong.append(f"{name} cannot be read: {error}")
    if wrong:
        raise StartFailed("; ".join(sorted(wrong)))
    return read


def read_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()  # settings for training batches must not shorten prompts silently
    tokenizer.no_padding()
    return tokenizer


def _object(text: str) -> dict[str, Json]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError("it is no JSON object")
    return cast("dict[str, Json]", value)


def _eos(
    tokenizer: Tokenizer, config: Mapping[str, Json], generation: Mapping[str, Json], tokenizing: Mapping[str, Json]
) -> frozenset[int]:
    ids: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    if (text := _as_text(tokenizing.get("eos_token"))) is not None:
        ids |= {token for token in [tokenizer.token_to_id(text)] if token is not None}
    return frozenset(ids)


def _first_token(
    tokenizer: Tokenizer, config: Mapping[str, Json], tokenizing: Mapping[str, Json], eos_ids: frozenset[int]
) -> int | None:
    """Return the token that begins a text, or else one that ends it; None without either."""
    if (text := _as_text(tokenizing.get("bos_token"))) is not None:
        token: int | None = tokenizer.token_to_id(text)
        if token is not None:
            return token
    # A configuration may name a token that its tokenizer has not; no engine would compute it.
    own = [config.get("bos_token_id"), *sorted(eos_ids)]
    return next((each for each in own if type(each) is int and _is_token(tokenizer, each)), None)


def _is_token(tokenizer: Tokenizer, number: int) -> bool:
    return 0 <= number < TOKEN_IDS and tokenizer.id_to_token(number) is not None


def _defaults(generation: Mapping[str, Json]) -> Defaults:
    if generation.get("do_sample") is False:
        return Defaults()
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if isinstance(value := generation.get(name), int | float) and not isinstance(value, bool)
    }
    top_k = int(given.get("top_k", -1)) or -1  # transformers writes 0 for all tokens
    return Defaults(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=top_k,
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
    )


def _as_text(value: Json) -> str | None:
    """Return a token that is given as text or, in older files, as an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
