"""How many characters one token can stand for at most, read from a tokenizer's own description.

A text with more characters than that times the tokens that fit is too long, and need not be tokenised to know it. The
bound holds only for tokenizers that turn every character of a text into a part of some token; for any part of a
description that may take characters away, or that is not known here, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from actors.text.logprobs import byte_alphabet

COMPOSED_CHARACTERS_MAX = 4
"""Normal form C makes at most so many characters one: no canonical decomposition is longer (Unicode, 15.0)."""

SHRINKING = {"NFC": COMPOSED_CHARACTERS_MAX, "NFKC": COMPOSED_CHARACTERS_MAX}
NOT_SHRINKING = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}  # pre-tokenizers
SPLITTING = {"Split", "Punctuation"}  # these keep what they split at, unless they are told to remove it
BYTES = 256

Described = Mapping[str, object]


def characters_a_token(described: Described) -> int | None:
    """Return how many characters of a text a token stands for at most, None if nothing is certain of it."""
    shrinking = _normalizer(described.get("normalizer"))
    if shrinking is None or not _keeps(described.get("pre_tokenizer")):
        return None
    added = _list(described.get("added_tokens"))
    if any(each.get("lstrip") or each.get("rstrip") for each in added):  # they take the spaces around them along
        return None
    model = _dict(described.get("model"))
    vocabulary = list(_vocabulary(model))
    byte_level = "ByteLevel" in {*_types(described.get("normalizer")), *_types(described.get("pre_tokenizer"))}
    if not vocabulary or not _knows_everything(model, set(vocabulary), byte_level=byte_level):
        return None
    longest = max(map(len, vocabulary))
    return max([ceil(longest * shrinking), *(len(str(each.get("content"))) * shrinking for each in added)])


def _normalizer(part: object) -> int | None:
    """Return how many characters a normalizer makes one at most, None if it may take some away."""
    if part is None:
        return 1
    described = _dict(part)
    kind = described.get("type")
    if kind == "Sequence":
        product = 1
        for each in _list(described.get("normalizers")):
            if (one := _normalizer(each)) is None:
                return None
            product *= one
        return product
    if kind == "Replace":
        old, new = _dict(described.get("pattern")).get("String"), described.get("content")
        return ceil(len(old) / len(new)) if isinstance(old, str) and isinstance(new, str) and new else None
    if kind in NOT_SHRINKING:
        return 1
    return SHRINKING.get(str(kind))


def _keeps(part: object) -> bool:
    """Whether a pre-tokenizer hands every character on."""
    if part is None:
        return True
    described = _dict(part)
    kind = described.get("type")
    if kind == "Sequence":
        return all(_keeps(each) for each in _list(described.get("pretokenizers")))
    return kind in KEEPING or (kind in SPLITTING and described.get("behavior") != "Removed")


def _knows_everything(model: Described, vocabulary: set[str], *, byte_level: bool) -> bool:
    """Whether every character becomes tokens: byte by byte, or one unknown token each."""
    if model.get("type") not in {"BPE", "Unigram"}:
        return False  # the others call a whole word unknown
    if byte_level:
        return vocabulary.issuperset(byte_alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTES))
    return model.get("type") == "BPE" and model.get("unk_token") in vocabulary and not model.get("fuse_unk")


def _vocabulary(model: Described) -> Iterator[str]:
    entries = model.get("vocab")
    if isinstance(entries, dict):
        yield from entries
    elif isinstance(entries, list):  # of Unigram: pairs of a piece and its score
        yield from (str(each[0]) for each in entries)


def _types(part: object) -> Iterator[str]:
    described = _dict(part)
    yield str(described.get("type"))
    for name in ("normalizers", "pretokenizers"):
        for each in _list(described.get(name)):
            yield from _types(each)


def _dict(value: object) -> Described:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Described]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
