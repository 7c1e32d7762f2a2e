"""The text of a session: source files, in pieces of so many tokens, the same with the same seed."""

from __future__ import annotations

from tokenizers import Tokenizer

from bench.turns.text import SourceText, source_files

SIZES = (1, 700, 3, 2000)


def pieces(tokenizer: Tokenizer, seed: str) -> list[str]:
    text = SourceText(tokenizer, seed)
    return [text.take(size) for size in SIZES]


def test_a_piece_has_as_many_tokens_as_are_asked_for(tokenizer: Tokenizer) -> None:
    for piece, size in zip(pieces(tokenizer, "1"), SIZES, strict=True):
        assert abs(len(tokenizer.encode(piece, add_special_tokens=False).ids) - size) <= 2


def test_a_seed_decides_the_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "1") == pieces(tokenizer, "1")
    assert "".join(pieces(tokenizer, "1"))[:100] != "".join(pieces(tokenizer, "2"))[:100]


def test_pieces_follow_one_another_in_the_text_of_a_file(tokenizer: Tokenizer) -> None:
    text = "".join(pieces(tokenizer, "1"))
    name = text.partition("\n")[0].removeprefix("# ")
    sources = [path.read_text(errors="replace") for path in source_files() if path.name == name]
    assert any(source.startswith(text.partition("\n")[2][:200]) for source in sources)


def test_tests_of_the_library_are_no_sources() -> None:
    files = source_files()
    assert len(files) > 300
    assert not any("test" in path.parts for path in files)
