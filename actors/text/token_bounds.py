"""A bound on the characters that one token stands for, from the description of a tokenizer (`tokenizer.json`).

A text with more characters than the bound times the tokens that fit is too long, which is known without tokenising it.
The bound exists only for tokenizers that turn every character of a text into a part of some token. If any part of the
description may remove characters, or is not known here, there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from actors.text.logprobs import byte_alphabet

COMPOSED_CHARACTERS_MAX = 4
"""The most characters that normal form C composes into one: no canonical decomposition is longer (Unicode 15.0)."""

COMPOSING_NORMALIZERS = {"NFC": COMPOSED_CHARACTERS_MAX, "NFKC": COMPOSED_CHARACTERS_MAX}
NON_SHRINKING_NORMALIZERS = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
SPLITTING_PRE_TOKENIZERS = {"Split", "Punctuation"}  # keep what they split at, unless `behavior` is Removed
BYTE_VALUES = 256

Description = Mapping[str, object]


def characters_per_token_max(description: Description) -> int | None:
    """Return the most characters of a text that one token stands for, None if there is no bound."""
    factor = _shrink_factor(description.get("normalizer"))
    if factor is None or not _keeps_every_character(description.get("pre_tokenizer")):
        return None
    added = _list(description.get("added_tokens"))
    if any(each.get("lstrip") or each.get("rstrip") for each in added):  # such a token absorbs any number of spaces
        return None
    model = _dict(description.get("model"))
    vocabulary = list(_vocabulary(model))
    byte_level = "ByteLevel" in {*_types(description.get("normalizer")), *_types(description.get("pre_tokenizer"))}
    if not vocabulary or not _covers_every_character(model, set(vocabulary), byte_level=byte_level):
        return None
    longest = max(map(len, vocabulary))
    return max([ceil(longest * factor), *(len(str(each.get("content"))) * factor for each in added)])


def _shrink_factor(part: object) -> int | None:
    """Return the most characters that a normalizer makes into one, None if it may remove some."""
    if part is None:
        return 1
    description = _dict(part)
    kind = description.get("type")
    if kind == "Sequence":
        product = 1
        for each in _list(description.get("normalizers")):
            if (factor := _shrink_factor(each)) is None:
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
        return all(_keeps_every_character(each) for each in _list(description.get("pretokenizers")))
    return kind in KEEPING_PRE_TOKENIZERS or (
        kind in SPLITTING_PRE_TOKENIZERS and description.get("behavior") != "Removed"
    )


def _covers_every_character(model: Description, vocabulary: set[str], *, byte_level: bool) -> bool:
    """Whether every character becomes a part of some token: byte by byte, or as an unknown token of its own."""
    if model.get("type") not in {"BPE", "Unigram"}:
        return False  # WordPiece and WordLevel encode a whole word as one unknown token
    if byte_level:
        return vocabulary.issuperset(byte_alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTE_VALUES))
    return model.get("type") == "BPE" and model.get("unk_token") in vocabulary and not model.get("fuse_unk")


def _vocabulary(model: Description) -> Iterator[str]:
    entries = model.get("vocab")
    if isinstance(entries, dict):
        yield from entries
    elif isinstance(entries, list):  # Unigram: pairs of a piece and its score
        yield from (str(each[0]) for each in entries)


def _types(part: object) -> Iterator[str]:
    description = _dict(part)
    yield str(description.get("type"))
    for name in ("normalizers", "pretokenizers"):
        for each in _list(description.get(name)):
            yield from _types(each)


def _dict(value: object) -> Description:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Description]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
