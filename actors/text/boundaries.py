"""Boundaries: added tokens behind which a text may be cut, and its parts tokenised apart.

A boundary `t` splits the ids of each text around it, for all texts a and b:

    ids(a + t + b) = ids(a + t) + ids(t + b)[1:]

The proof follows the `tokenizers` library. First, added tokens that are not `normalized` are found in the whole text,
from the left, at each place the longest. Second, each piece between them is normalized by itself, and searched for
the other added tokens. Third, each remaining piece is pre-tokenized by itself, and each of its words is encoded by
itself. The types listed below work so by their source; with any other type there are no boundaries. A post-processor
changes nothing if special tokens are not asked for.

Let no other token of the same search contain `t`, and let none, nor `t` itself, have an end that begins `t`. A match
that covers a part of an occurrence of `t` begins behind its first character, unless it contains `t` or ends within it.
So the search, which prefers the left, selects every occurrence of `t`. It begins anew behind each match: in
`a + t + b` it finds the matches of `a + t`, and then the matches of `t + b` behind `t`.

Tokens have flags that look beside a match. A `single_word` token asks for the character before and behind it, so `t` is
none. A token in `b` sees `t` before it in either text: for this, `t` is encoded before `b`. An `lstrip` or `rstrip`
token takes the spaces beside it. `t` takes the spaces of `a` in `a + t` as well, and the spaces of `b` in `t + b`. No
space begins or ends `t`, so no other token takes a part of it. A Metaspace pre-tokenizer asks whether a piece begins
the text, and no piece behind `t` does.

A `normalized` token is searched for in normalized pieces, so only a tokenizer that normalizes nothing makes it a
boundary. No token of the first search may then overlap it, on either side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Self

from attrs import frozen

MODELS = {"BPE", "Unigram", "WordPiece", "WordLevel"}
NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "BertNormalizer", "Lowercase", "StripAccents"),
    *("Strip", "Prepend", "Replace", "ByteLevel", "Sequence"),
}
PRE_TOKENIZERS = {
    *("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"),
    *("BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts", "FixedLength", "Sequence"),
}
POST_PROCESSORS = {"ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing", "Sequence"}

Description = Mapping[str, object]


@frozen
class _Search:
    """The contents of the tokens that one search finds."""

    contents: frozenset[str]
    joined: str  # with a character between them that none has
    beginnings: frozenset[str]  # the proper beginnings of all, and the proper ends
    ends: frozenset[str]

    @classmethod
    def of(cls, contents: Collection[str]) -> Self:
        """Prepare the contents for many look-ups; they differ from each other."""
        used = set().union(*contents)
        separator = next(character for character in map(chr, count()) if character not in used)
        return cls(
            frozenset(contents),
            separator.join(contents),
            frozenset(part for content in contents for part in _beginnings(content)),
            frozenset(part for content in contents for part in _ends(content)),
        )

    def reaches_into(self, content: str) -> bool:
        """Whether a match that begins before a content, or is longer and begins with it, may cover a part of it."""
        return self.joined.count(content) > (content in self.contents) or not self.ends.isdisjoint(_beginnings(content))

    def begins_within(self, content: str) -> bool:
        """Whether a match may lie in a content, or begin in it and go on behind it."""
        return any(each in content for each in self.contents) or not self.beginnings.isdisjoint(_ends(content))


def boundaries(description: Description) -> dict[str, int]:
    """Return the contents and ids of the tokens behind which a text may be cut.

    `description` is the parsed JSON of `Tokenizer.to_str()`, which has each token once, with its real id.
    """
    added = {str(token.get("content")): token for token in _parts(description.get("added_tokens"))}
    if not _encodes_piecewise(description) or len(added) < len(_parts(description.get("added_tokens"))):
        return {}
    raw = _Search.of([content for content, token in added.items() if not token.get("normalized")])
    normalized = _Search.of(added.keys() - raw.contents)
    normalizes = any(kind != "Sequence" for kind, _ in _walk(description.get("normalizer"), "normalizers"))
    found = dict[str, int]()
    for content, token in added.items():
        number = token.get("id")
        if not isinstance(number, int) or token.get("single_word") or content != content.strip():
            continue
        if content in raw.contents:
            covered = raw.reaches_into(content)
        else:
            covered = normalizes or normalized.reaches_into(content)
            covered = covered or raw.reaches_into(content) or raw.begins_within(content)
        if content and not covered:
            found[content] = number
    return found


def choose(found: Mapping[str, int], rendered: Sequence[str]) -> str | None:
    """Return the boundary that rendered conversations have most often, None without any in them."""
    counts = {content: sum([text.count(content) for text in rendered]) for content in found}
    best = max(counts, key=lambda content: counts[content], default=None)
    return best if best is not None and counts[best] else None


def _beginnings(content: str) -> list[str]:
    return [content[:length] for length in range(1, len(content))]


def _ends(content: str) -> list[str]:
    return [content[start:] for start in range(1, len(content))]


def _encodes_piecewise(description: Description) -> bool:
    """Whether each piece of a text between added tokens is encoded by itself."""
    model = _dict(description.get("model"))
    if model.get("type") not in MODELS or model.get("dropout"):
        return False
    if description.get("truncation") is not None or description.get("padding") is not None:
        return False
    processors = list(_walk(description.get("post_processor"), "processors"))
    return (
        all(kind in NORMALIZERS for kind, _ in _walk(description.get("normalizer"), "normalizers"))
        and all(kind in PRE_TOKENIZERS for kind, _ in _walk(description.get("pre_tokenizer"), "pretokenizers"))
        and all(kind in POST_PROCESSORS for kind, _ in processors)
        and all(_has_the_text_once(part) for kind, part in processors if kind == "TemplateProcessing")
    )


def _has_the_text_once(template: Description) -> bool:
    """Whether a template leaves a single text what it is, once its special tokens are left out."""
    sequences = [_dict(piece["Sequence"]).get("id") for piece in _parts(template.get("single")) if "Sequence" in piece]
    return sequences == ["A"]


def _walk(part: object, inner: str) -> Iterator[tuple[str, Description]]:
    """Yield the type and the description of a part, and of all that its sequences contain."""
    if part is None:
        return
    description = _dict(part)
    kind = str(description.get("type"))
    yield kind, description
    if kind == "Sequence":
        entries = description.get(inner)
        for each in entries if isinstance(entries, list) else [{}]:
            yield from _walk(_dict(each), inner)


def _dict(value: object) -> Description:
    return value if isinstance(value, dict) else {}


def _parts(value: object) -> list[Description]:
    return [_dict(entry) for entry in value] if isinstance(value, list) else []
