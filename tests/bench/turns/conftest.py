"""The tokenizer of the tests: the tiny model's, which is in the repository."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from bench.peers.peer import MODEL_FOLDER


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
