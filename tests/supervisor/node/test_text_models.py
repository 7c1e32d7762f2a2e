"""What keeps a model's text side from being read is a mistake at its own key."""

from __future__ import annotations

import sys

import pytest

from actors.text.encoders import ByTokenizers
from supervisor.config.load import Misconfigured
from supervisor.engines.kinds import read_cluster
from supervisor.node.text_models import load_text_models
from tests.supervisor.config.test_load import GOOD, Written


def test_an_encoder_that_is_not_installed_is_a_mistake_at_its_key(
    monkeypatch: pytest.MonkeyPatch, written: Written
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    cluster = read_cluster(written(GOOD.replace("[engine", 'tokenizer = "fastokens"\n\n[engine', 1)))
    with pytest.raises(Misconfigured, match="needs the package fastokens: pip install") as raised:
        load_text_models(cluster, "main", str, "")
    assert raised.value.path == "model.tiny.tokenizer"


def test_the_encoder_is_tokenizers_by_default(written: Written) -> None:
    models = load_text_models(read_cluster(written(GOOD)), "main", str, "")
    assert isinstance(models["tiny"].encoder, ByTokenizers)
