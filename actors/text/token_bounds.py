"""A bound on the characters of one token, from the description of a tokenizer (`tokenizer.json`).

A text is too long, without being tokenised, if it has more characters than the bound times the tokens that fit. The
bound exists only for tokenizers that turn every character of a text into a part of some token. If any part of the
description may remove characters, or is of an unknown type, there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from actors.text.logprobs import byte_alphabet

# The most characters that normal form C composes into one: no canonical decomposition is longer (Unicode 15.0).
COMPOSED_CHARACTERS_MAX = 4

COMPOSING_NORMALIZERS = {"NFC": COMPOSED_CHARACTERS_MAX, "NFKC": COMPOSED_CHARACTERS_MAX}
NON_SHRINKING_NORMALIZERS = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
# These keep the separators, unless `behavior` is Removed.
SPLITTING_PRE_TOKENIZERS = {"Split", "Punctuation"}
BYTE_VALUES = 256

Description = Mapping[str, object]


def characters_per_token_max(description: Description) -> int | None:
    """Return the most characters of a text in one token, None if there is no bound."""
    factor = _shrink_factor(description.get("normalizer"))
    if factor is None or not _keeps_every_character(description.get("pre_tokenizer")):
        return None
    added = _list(description.get("added_tokens"))
    # A token that strips absorbs any number of spaces.
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    model = _dict(description.get("model"))
    vocabulary = list(_vocabulary(model))
    byte_level = "ByteLevel" in {*_types(description.get("normalizer")), *_types(description.get("pre_tokenizer"))}
    if not vocabulary or not _covers_every_character(model, set(vocabulary), byte_level=byte_level):
        return None
    longest = max(map(len, vocabulary))
    return max([ceil(longest * factor), *(len(str(token.get("content"))) * factor for token in added)])


def _shrink_factor(part: object) -> int | None:
    """Return the most characters that a normalizer makes into one, None if it may remove some."""
    if part is None:
        return 1
    description = _dict(part)
    kind = description.get("type")
    if kind == "Sequence":
        product = 1
        for inner in _list(description.get("normalizers")):
            if (factor := _shrink_factor(inner)) is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        old, new = _dict(description.get("pattern")).get("String"), description.get("content")
        return ceil(len(old) / len(new)) if isinstance(old, str) and isinstance(new, str) and new else None
    if kind in NON_SHRINKING_NORMALIZERS:
        return 1
    return COMPOSING_NORMALIZERS.get(str(kind))


def _keeps_every_character(part: object) -> bool:
    """Whether a pre-tokenizer keeps every character."""
    if part is None:
        return True
    description = _dict(part)
    kind = description.get("type")
    if kind == "Sequence":
        return all(_keeps_every_character(inner) for inner in _list(description.get("pretokenizers")))
    return kind in KEEPING_PRE_TOKENIZERS or (
        kind in SPLITTING_PRE_TOKENIZERS and description.get("behavior") != "Removed"
    )


def _covers_every_character(model: Description, vocabulary: set[str], *, byte_level: bool) -> bool:
    """Whether every character becomes a part of some token: byte by byte, or as an unknown token of its own."""
    if model.get("type") not in {"BPE", "Unigram"}:
        # WordPiece and WordLevel encode a whole word as one unknown token.
        return False
    if byte_level:
        return vocabulary.issuperset(byte_alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTE_VALUES))
    return model.get("type") == "BPE" and model.get("unk_token") in vocabulary and not model.get("fuse_unk")


def _vocabulary(model: Description) -> Iterator[str]:
    entries = model.get("vocab")
    if isinstance(entries, dict):
        yield from entries
    elif isinstance(entries, list):
        # Unigram has pairs of a piece and its score.
        yield from (str(piece[0]) for piece in entries)


def _types(part: object) -> Iterator[str]:
    description = _dict(part)
    yield str(description.get("type"))
    for name in ("normalizers", "pretokenizers"):
        for inner in _list(description.get(name)):
            yield from _types(inner)


def _dict(value: object) -> Description:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Description]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
