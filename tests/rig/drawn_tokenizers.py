"""Small tokenizers of many kinds, with drawn added tokens, and texts that are hostile to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog; don't stop. the the then there 123 4567 x == y\n\n",
    "def f(x):\n    return x\n\n    if user.name == 'INST':\n        print(\"im_end\", [1, 2, 3])\n",
    "Île de la Cité, où le cœur s'élève; große Füße. 漢字かな交じり文。 한국어 문장 क़लम 👩‍👩‍👧 ﬁne\r\n",
    "<|im_start|>user\nhello<|im_end|>\n[INST] hi [/INST] </s> ▁▁ ▁the",
)
GPT_PATTERN = r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(added: Sequence[str] = (), normalizer: Any = None, pre: Any = None, **options: Any) -> Tokenizer:
    """Train a BPE; without an alphabet of bytes other characters are unknown, or bytes."""
    result = Tokenizer(models.BPE(**options))
    result.normalizer, result.pre_tokenizer = normalizer, pre
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=list(added), special_tokens=["<unk>", *BYTES], show_progress=False
    )
    result.train_from_iterator(CORPUS * 4, trainer)
    return bare(result)


def bare(tokenizer: Tokenizer) -> Tokenizer:
    """Take the special tokens of a training back: they are words of the model."""
    result = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(result, part, value)
    return result


def byte_level(*before: Any, normalizer: Any = None, space: bool = False) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not before)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return bpe(alphabet, normalizer, pre_tokenizers.Sequence([*before, level]) if before else level)


def byte_fallback(normalizer: Any = None, pre: Any = None) -> Tokenizer:
    return bpe((), normalizer, pre, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def unigram() -> Tokenizer:
    result = Tokenizer(models.Unigram())
    result.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    result.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=250, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    result.train_from_iterator(CORPUS * 4, trainer)
    return bare(result)


def word_piece() -> Tokenizer:
    result = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    result.normalizer = normalizers.BertNormalizer()
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    return bare(result)


def word_level() -> Tokenizer:
    result = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip(), normalizers.StripAccents()])
    result.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False))
    return bare(result)


def _split(pattern: str, behavior: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(_split(GPT_PATTERN, "isolated"), normalizer=normalizers.NFC()),
    "byte level, NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "byte level, digits, a space before": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), space=True),
    "byte level, nothing in a sequence": lambda: byte_level(normalizer=normalizers.Sequence([])),
    "legacy": lambda: byte_fallback(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "metaspace, first": lambda: byte_fallback(pre=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace, always": lambda: byte_fallback(pre=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, never": lambda: byte_fallback(pre=pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "split": lambda: byte_fallback(normalizers.Replace(" ", "▁"), _split("▁", "merged_with_previous")),
    "contiguous": lambda: byte_fallback(pre=_split(r"\s", "contiguous")),
    "unigram": unigram,
    "word pieces": word_piece,
    "words": word_level,
}
_built: dict[str, str] = {}


def built(kind: str, added: Sequence[AddedToken], *, template: bool = False) -> Tokenizer:
    """Return a tokenizer of a kind with these added tokens; `template` gives it a post-processor."""
    if kind not in _built:
        _built[kind] = KINDS[kind]().to_str()
    result = Tokenizer.from_str(_built[kind])
    for token in added:
        # The library would find a token without characters everywhere, for ever.
        if token.normalized and result.normalizer and not result.normalizer.normalize_str(token.content):
            continue
        (result.add_special_tokens if token.special else result.add_tokens)([token])
    if template:
        result.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return result


FRAGMENTS = [
    *("<|", "|>", "<", ">", "im", "_end", "|", "[", "INST", "]", "\uff5c", "é", "e\u0301", "\u0301", "a", "the"),
    *("▁", "\uff21", "1", " ", "  ", "\n", "<|im_end|>", "<|im_start|>"),
]
BITS = [
    *(" ", "  ", "\n", "\n\n", "\t", "\u00a0", "\r\n", " \u3000", "\ufeff", "\x00", "\u200d", "\u0301", "\u0338"),
    *("e", "é", "A", "ab", "The", " the", "123", "4567", "1", "ﬁ", "Å", "\u030a", "\u017f", "İ", "ß", "'s", '"'),
    *("<", "<|", "|>", "im_", "_end", "[", "/INST]", "</", "s>", "\uff5c", "▁", "▁▁", "\uff1c|im_end|\uff1e"),
    *("。", "漢字", "👩‍👩‍👧", "क्", "़", "가", "각", "def f(x):\n    return x"),
]


@st.composite
def tokens(draw: st.DrawFn) -> AddedToken:
    """Draw a token; each flag is seldom set, so that some are boundaries."""
    content = draw(
        st.one_of(st.just("<|im_end|>"), st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map("".join))
    )
    seldom = st.integers(0, 5).map(lambda number: number == 5)
    flags = {name: draw(seldom) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(content, normalized=draw(st.booleans()), special=draw(st.booleans()), **flags)


ADDED = st.lists(tokens(), min_size=2, max_size=8, unique_by=lambda token: token.content)


def texts(contents: Sequence[str], boundary: str) -> st.SearchStrategy[str]:
    """Texts of fragments, of added tokens, of their beginnings and ends, and often of the boundary."""
    ends = [part for content in contents for at in range(1, len(content)) for part in (content[:at], content[at:])]
    pieces = [st.sampled_from(BITS), st.just(boundary), st.sampled_from(contents)]
    if ends:
        pieces.append(st.sampled_from(ends))
    return st.lists(st.one_of(pieces), max_size=14).map("".join)
