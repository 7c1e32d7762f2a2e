"""Source text in pieces of so many tokens: Python's standard library, in an order that a seed decides."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from random import Random

from attrs import define, field
from tokenizers import Tokenizer

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
FILE_BYTES_MAX = 200_000  # longer ones are tables rather than source text


@cache
def source_files() -> Sequence[Path]:
    """Return the standard library's source files, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return sorted(path for path in files if 0 < path.stat().st_size <= FILE_BYTES_MAX)


@define(eq=False)
class SourceText:
    """An endless text; with the same seed, tokenizer and version of Python it is the same."""

    tokenizer: Tokenizer
    seed: str
    _files: Iterator[Path] = field(init=False)
    _text: str = field(init=False, default="")
    _begins: list[int] = field(init=False, factory=list)  # the place in the text of each of its tokens

    def __attrs_post_init__(self) -> None:
        files = list(source_files())
        Random(self.seed).shuffle(files)  # seeded by text, since hashes differ between processes
        self._files = cycle(files)

    def take(self, tokens: int) -> str:
        """Return the next piece, of so many tokens: another one or two where it is cut within a word."""
        while len(self._begins) <= tokens:
            self._read(next(self._files))
        place = self._begins[tokens]
        piece, self._text = self._text[:place], self._text[place:]
        self._begins = [begin - place for begin in self._begins[tokens:]]
        return piece

    def _read(self, file: Path) -> None:
        text = f"# {file.name}\n{file.read_text(errors='replace')}"
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        self._begins += [len(self._text) + begin for begin, _ in encoded.offsets]
        self._text += text
