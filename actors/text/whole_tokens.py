"""The text of tokens that are whole by themselves: decoded once for a model, not at each occurrence.

A byte-level decoder joins the bytes of all tokens and reads them as UTF-8. A token of valid UTF-8 therefore adds the
same text behind any other token: it can neither complete a character nor begin one. Nearly all tokens of an answer are
such. Other decoders have no such rule (SentencePiece's drops the first space of a text, WordPiece's joins words), so
for their models there is no table.

The table has None for tokens that may mean something else: parts of characters, U+FFFD (a possible part of one), added
tokens (some are special and have no text), and the end-of-sequence tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tokenizers import Tokenizer

from protocol.messages.text import Text

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# The most texts in one table: some 15 MB.
TOKENS_MAX = 65_536
# The most tables of one model. A table shares its texts with the table of the model.
TABLES_MAX = 16


class WholeTokens(dict[int, Text | None]):
    """The text of each token id that is whole by itself, as the next piece of the first choice; None for other ids."""

    def __init__(self, tokenizer: Tokenizer, excluded: Collection[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._excluded = frozenset(excluded)
        self._tables: dict[frozenset[str], _UnwatchedTokens] = {}

    def __missing__(self, token: int) -> Text | None:
        if len(self) >= TOKENS_MAX:
            self.clear()
        text: str = "" if token in self._excluded else self._tokenizer.decode([token], skip_special_tokens=True)
        whole = self[token] = Text(text, 1) if text and REPLACEMENT_CHARACTER not in text else None
        return whole

    def without(self, watched: frozenset[str]) -> Mapping[int, Text | None]:
        """Return a table with None also for texts that have one of these characters."""
        if not watched:
            return self
        if (table := self._tables.get(watched)) is None:
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            table = self._tables[watched] = _UnwatchedTokens(self, watched)
        return table


class _UnwatchedTokens(dict[int, Text | None]):
    """The part of a table whose texts have none of the watched characters."""

    def __init__(self, table: WholeTokens, watched: frozenset[str]) -> None:
        super().__init__()
        self._table, self._watched = table, watched

    def __missing__(self, token: int) -> Text | None:
        if len(self) >= TOKENS_MAX:
            self.clear()
        whole = self._table[token]
        whole = self[token] = None if whole is None or not self._watched.isdisjoint(whole.text) else whole
        return whole


def whole_tokens(
    tokenizer: Tokenizer, description: Mapping[str, object], eos_ids: Collection[int]
) -> WholeTokens | None:
    """Return the table of a tokenizer with this description (`tokenizer.json`); None if its decoder allows none."""
    decoder, added = description.get("decoder"), description.get("added_tokens")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel" or not isinstance(added, list):
        return None
    return WholeTokens(tokenizer, {*eos_ids, *(token["id"] for token in added)})
