"""The text side of models of vectors and scores."""

from __future__ import annotations

import pytest

from actors.text.embedding_model import load
from protocol.errors import BadRequest, StartFailed
from tests.rig.embedded_texts import bert_files, bert_model

CLS, SEP, THE, OAK = 2, 3, 4, 5


def test_texts_and_pairs_have_the_tokens_of_their_tokenizer() -> None:
    model = bert_model()
    assert model.encode_text("the oak").tolist() == [CLS, THE, OAK, SEP]
    assert model.encode_cut("the oak the", 4).tolist() == [CLS, THE, OAK, SEP]
    assert (model.tokens_around, model.tokens_around_pair) == (2, 3)
    first, second = model.encoding("the oak"), model.encoding("oak oak oak")
    pair = model.pair(first, second)
    assert (pair.tokens.tolist(), pair.second_at) == ([CLS, THE, OAK, SEP, OAK, OAK, OAK, SEP], 4)
    assert len(model.pair(first, model.encoding("oak oak oak"), tokens_max=7).tokens) == 7
    assert len(model.pair(first, model.encoding("oak oak oak"), second_max=1).tokens) == 6
    assert model.pair(first, model.encoding("")).second_at == 0


def test_a_prompt_is_the_models_own_or_empty_for_queries_and_documents() -> None:
    assert (bert_model().prompt(None, "p"), bert_model().prompt("query", "p")) == ("", "")
    model = bert_model(prompts={"corpus": "tree: ", "old": "old "}, default_prompt_name="old")
    assert [model.prompt(name, "p") for name in (None, "old", "query", "document")] == ["old ", "old ", "", "tree: "]
    with pytest.raises(BadRequest, match="it has corpus, document, old, query") as caught:
        model.prompt("song", "input_type")
    assert caught.value.param == "input_type"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"{}"}, "has no tokenizer.json"),
        (bert_files() | {"tokenizer.json": b"{"}, "tokenizer.json cannot be read"),
        (bert_files(prompts={"query": 5}), "config_sentence_transformers.json cannot be read"),
        (bert_files(prompts={}, default_prompt_name="query"), "the default prompt 'query'"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(StartFailed, match=words):
        load(files, encodes="tokenizers")


def test_files_of_other_tools_may_say_more() -> None:
    model = bert_model(prompts=None, default_prompt_name=None, similarity_fn_name="cosine", __version__={"a": "1"})
    assert model.prompt_names == ("document", "query")
    assert bert_model(prompts={"query": "query: "}).prompts == {"query": "query: "}
