"""`bench.pictures`, each part once and short: text streams and pictures beside each other, memory, the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.pictures import caching, memory, streams
from bench.pictures.__main__ import PARTS

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]

SHORT = 20


def test_text_streams_and_pictures_are_answered_beside_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TOKENS", SHORT)
    monkeypatch.setattr(streams, "STREAMS", 8)
    monkeypatch.setattr(streams, "SENDERS", 4)
    assert [sentence for sentence in streams.measure(folder, 1) if "gap" not in sentence] == []


def test_pictures_leave_no_descriptors_no_files_and_no_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "EVERY", SHORT)
    wrong = memory.measure(folder, 4 * SHORT)
    assert [sentence for sentence in wrong if not sentence.startswith("MB of")] == []  # too few to tell


def test_pictures_that_were_sent_before_are_not_encoded_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PICTURES", 5)
    monkeypatch.setattr(caching, "TIMES", 4)
    assert caching.measure(folder) == []


def test_all_parts_have_a_command() -> None:
    assert PARTS == ("streams", "memory", "cache")
