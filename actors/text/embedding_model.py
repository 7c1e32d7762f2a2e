"""The text side of a model of vectors or scores: its tokenizer, and the prompts that its authors put before texts.

The prompts are those of `config_sentence_transformers.json`. A model without prompts for queries and documents has
empty ones, as in sentence-transformers, so a client need not know which model it asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
from attrs import frozen
from tokenizers import Encoding, Tokenizer

from actors.text.encoders import TextEncoder, encoder
from actors.text.model import NEEDED, decode, read_tokenizer
from actors.text.token_bounds import characters_per_token_max
from protocol.errors import BadRequest, StartFailed
from protocol.messages.embedding import TextItem
from protocol.model_folder import FILES, PROMPTS, Digest, digest
from protocol.token_ids import TokenIds

QUERY, DOCUMENT = "query", "document"
ROLES: Mapping[str, tuple[str, ...]] = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}
"""The names that prompts for queries and for documents have in models; the first one present counts."""


@frozen
class EmbeddingModel:
    """The text side of one model: it turns texts, and pairs of texts, into token ids."""

    tokenizer: Tokenizer
    encoder: TextEncoder
    prompts: Mapping[str, str]
    default_prompt: str | None = None  # the name of the prompt before texts without another
    characters_per_token_max: int | None = None  # the most characters of one token; None: no bound
    digest: Digest = ()  # the digest of the model's files

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """The names of all prompts that a request may ask for."""
        return tuple(sorted({*ROLES, *self.prompts}))

    def prompt(self, name: str | None, param: str) -> str:
        """Return the prompt of a name, None for the default one; raises `BadRequest`, about `param`, if it has none."""
        if name is None:
            return "" if self.default_prompt is None else self.prompts[self.default_prompt]
        if name in self.prompts:
            return self.prompts[name]
        if name in ROLES:
            return next((self.prompts[each] for each in ROLES[name] if each in self.prompts), "")
        raise BadRequest(f"this model has no prompt {name!r}; it has {', '.join(self.prompt_names)}", param=param)

    def encode_text(self, text: str, *, special: bool = True) -> TokenIds:
        """Return the token ids of a text; `special` adds the tokenizer's own tokens around it."""
        return self.encoder.encode(text, special=special)

    def encode_cut(self, text: str, tokens_max: int) -> TokenIds:
        """Return the token ids of the beginning of a text, and the tokenizer's own around it, at most `tokens_max`."""
        encoding = self.encoding(text)
        encoding.truncate(max(0, tokens_max - self.tokens_around))
        return TokenIds.of(self.tokenizer.post_process(encoding).ids)

    def encoding(self, text: str) -> Encoding:
        """Return the encoding of a text without the tokens around it."""
        # A batch of one releases the GIL, and skips the offsets.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding

    def pair(
        self, first: Encoding, second: Encoding, *, tokens_max: int | None = None, second_max: int | None = None
    ) -> TextItem:
        """Return a pair with the tokenizer's own tokens; no pair (`second_at` 0) if the second text has no tokens.

        The second text is cut to `second_max` tokens and, with `tokens_max`, until the pair fits.
        """
        if second_max is not None:
            second.truncate(second_max)
        if tokens_max is not None:
            second.truncate(max(1, tokens_max - self.tokens_around_pair - len(first.ids)))
        joined = self.tokenizer.post_process(first, second)
        second_at = joined.sequence_ids.index(1) if second.ids else 0
        return TextItem(TokenIds.of(joined.ids), second_at)

    @property
    def tokens_around(self) -> int:
        """The number of the tokenizer's own tokens around a text."""
        return int(self.tokenizer.num_special_tokens_to_add(is_pair=False))

    @property
    def tokens_around_pair(self) -> int:
        """The number of the tokenizer's own tokens around a pair."""
        return int(self.tokenizer.num_special_tokens_to_add(is_pair=True))

    def decode(self, ids: Sequence[int], param: str | None = None) -> str:
        """Return the text of token ids, with special tokens; raises `BadRequest`, about `param`, for unknown ids."""
        return decode(self.tokenizer, ids, param)


@frozen
class _Prompts:
    """The keys of `config_sentence_transformers.json` that are read."""

    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def load(files: Mapping[str, bytes], *, encodes: str) -> EmbeddingModel:
    """Build the text side of a model from the contents of its small files; `encodes` names its encoder.

    Raises `StartFailed` if a file is missing or cannot be read, and its kind `NoEncoder`.
    """
    if missing := [name for name in NEEDED if name not in files]:
        raise StartFailed(f"the model's folder has no {' and no '.join(missing)}")
    try:
        tokenizer = read_tokenizer(files["tokenizer.json"].decode())
    except Exception as error:  # tokenizers raises bare Exceptions
        raise StartFailed(f"tokenizer.json cannot be read: {error}") from error
    prompts, default = _prompts(files.get(PROMPTS, b"{}"))
    return EmbeddingModel(
        tokenizer=tokenizer,
        encoder=encoder(encodes, tokenizer, prompts.values()),
        prompts=prompts,
        default_prompt=default,
        characters_per_token_max=characters_per_token_max(json.loads(tokenizer.to_str())),
        digest=digest({name: files[name] for name in FILES if name in files}),
    )


def _prompts(text: bytes) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts of a model by their names, and the name of the default one, None if there is none."""
    try:
        read = msgspec.json.decode(text, type=_Prompts)
    except msgspec.DecodeError as error:
        raise StartFailed(f"{PROMPTS} cannot be read: {error}") from error
    prompts, default = read.prompts or {}, read.default_prompt_name
    if default is not None and default not in prompts:
        raise StartFailed(f"the default prompt {default!r} of {PROMPTS} is none of its prompts")
    return prompts, default
