"""A model's folder without weights whose vocabulary is large enough for Dynamo's mocker.

The mocker draws its tokens from the ids 1000 to 1999. Ids beyond the vocabulary decode to nothing and are not streamed,
so with the tiny model's 512 ids a client would receive no token at all. Ours is served with the same folder.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

from bench.peers.peer import MODEL_FOLDER

VOCABULARY_SIZE = 2048
SPACE = "Ġ"  # a space, as a byte-level vocabulary writes it
SYLLABLES = tuple(map("".join, product("bdfgklmnprstvz", "aeiou")))
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")


def mock_model(folder: Path) -> Path:
    """Write the folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy(MODEL_FOLDER / name, folder / name)
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY_SIZE}))
    tokenizer = json.loads((MODEL_FOLDER / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = (f"{SPACE}{first}{second}" for first, second in product(SYLLABLES, SYLLABLES))
    fresh = (word for word in words if word not in vocabulary)
    size = 1 + max(*vocabulary.values(), *(each["id"] for each in tokenizer["added_tokens"]))
    vocabulary |= zip(fresh, range(size, VOCABULARY_SIZE), strict=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
