"""Two folders of the same name are the same model only if the files that determine its tokens are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engines import model_files
from protocol.model_folder import ENTRIES_MAX, FILES, TEMPLATES, WEIGHTS, WORD_MAX, digest, is_well_formed, mismatch
from tests.supervisor.config.test_load import TINY

OWN = digest({"config.json": b"{}", "tokenizer.json": b"[]"})


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (OWN, None),
        ((), None),
        (digest({"config.json": b"{}", "tokenizer.json": b"[]", WEIGHTS: b"some"}), None),
        (
            digest({"config.json": b"{ }", "tokenizer.json": b"[]"}),
            "its model is another one: it differs in config.json",
        ),
        (digest({"config.json": b"{}"}), "its model is another one: it differs in tokenizer.json"),
        (
            digest({"config.json": b"", "tokenizer.json": b"[]", "generation_config.json": b"{}"}),
            "its model is another one: it differs in config.json, generation_config.json",
        ),
    ],
)
def test_the_files_in_which_two_folders_differ_are_named(
    other: tuple[tuple[str, str], ...], sentence: str | None
) -> None:
    assert mismatch(OWN, other) == sentence
    assert mismatch((), other) is None, "an unread folder differs from none"


def test_weights_are_compared_if_both_ends_have_some() -> None:
    first, second = ((*OWN, *digest({WEIGHTS: weights})) for weights in (b"one", b"two"))
    assert mismatch(first, second) == "its model is another one: it differs in weights"
    assert mismatch(OWN, second) is mismatch(second, OWN) is None


def test_the_digest_of_a_folder_covers_its_files_and_its_weights(tmp_path: Path) -> None:
    contents = {name: (TINY / name).read_bytes() for name in FILES if (TINY / name).is_file()}
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(contents.get(name, b"{}"))
    without = model_files.model_digest(tmp_path)
    weights = bytearray(range(256)) * 1024  # more than the three samples together
    (tmp_path / "model.safetensors").write_bytes(weights)
    own = model_files.model_digest(tmp_path)
    assert {name for name, _ in own} == {*FILES, WEIGHTS}
    assert mismatch(without, own) is mismatch(own, without) is None
    for name in FILES:
        (tmp_path / name).write_bytes(contents.get(name, b"{}") + b" ")
        assert mismatch(own, model_files.model_digest(tmp_path)) == f"its model is another one: it differs in {name}"
        (tmp_path / name).write_bytes(contents.get(name, b"{}"))
    for place in (0, len(weights) // 2, len(weights) - 1):
        weights[place] ^= 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        assert mismatch(own, model_files.model_digest(tmp_path)) == "its model is another one: it differs in weights"
        weights[place] ^= 1


def test_further_templates_are_compared_where_both_ends_have_some(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a")
    without, further = model_files.model_digest(tmp_path), tmp_path / TEMPLATES
    further.mkdir()
    for place in range(ENTRIES_MAX):
        (further / f"{place}{'x' * WORD_MAX}.jinja").write_text("b")
    own = model_files.model_digest(tmp_path)
    assert is_well_formed(own), "older nodes end a link for a longer digest"
    assert mismatch(without, own) is mismatch(own, without) is None
    (further / "tool_use.jinja").write_text("c")
    changed = model_files.model_digest(tmp_path)
    assert mismatch(own, changed) == "its model is another one: it differs in additional_chat_templates"


def test_a_malformed_digest_is_detected() -> None:
    assert is_well_formed(OWN)
    assert is_well_formed(())
    assert not is_well_formed(OWN * 9)
    assert not is_well_formed((("x" * 65, "0"),))
