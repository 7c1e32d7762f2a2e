"""`cluster.toml` and the file of keys are read alike, and refused in the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.config import toml_file
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.keys.key_sources import KeySources
from supervisor.gateway.keys.keys import Keys
from tests.supervisor.config.test_load import GOOD, Written

READERS: list[Callable[[Path], object]] = [read_cluster, lambda path: Keys(KeySources(path)).load()]


@pytest.mark.parametrize("read", READERS, ids=["cluster.toml", "keys"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[model", "is not TOML: Expected ']' at the end of a table declaration (at end of document)"),
        (b"a = " + b"9" * 5_000, "is not TOML: Exceeds the limit"),
        (b"x = " + b"[" * 5_000, "is not TOML: it nests too deeply"),
        (b"a = 1\n\xff", "is not UTF-8: invalid start byte at byte 6"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_every_file_is_refused_in_the_same_words(
    read: Callable[[Path], object], text: bytes | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(StartFailed) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} {sentence}")


def test_a_file_may_begin_with_a_byte_order_mark(written: Written, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"\ufeff[key.alice]\nsha256 = '{'a' * 64}'\n")
    keys = Keys(KeySources(path))
    keys.load()
    assert keys.names(admin=False) == ["alice"]
    assert list(read_cluster(written(f"\ufeff{GOOD}")).engine) == ["tiny-0"]


def test_a_path_that_the_system_cannot_take_is_refused_in_a_sentence() -> None:
    with pytest.raises(StartFailed, match=r"cannot be read: .*embedded null"):
        toml_file.read_text(Path("a\0b"), 10)
