"""Vectors, rankings and scores over HTTP."""

from __future__ import annotations

import logging
import struct
from base64 import b64decode
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.embedder import vector
from protocol.messages.embedding import TextItem
from protocol.token_ids import TokenIds
from tests.rig.embedded_texts import Computing, bert_model, embedding_rig
from tests.rig.embedders import SCORES, VECTORS
from tests.rig.gateway import Reply, chat, create, head, leave_all, post, response, text

CLS, SEP, THE, OAK, ELM = 2, 3, 4, 5, 6


def embed(texts: object, **fields: Any) -> bytes:
    return post({"model": "vectors", "input": texts, **fields}, "/v1/embeddings")


def rerank(model: str, *documents: object, path: str = "/v1/rerank", **fields: Any) -> bytes:
    return post({"model": model, "query": "which tree", "documents": documents, **fields}, path)


def score(model: str, first: object, second: object, **fields: Any) -> bytes:
    return post({"model": model, "text_1": first, "text_2": second, **fields}, "/v1/score")


def expected(*ids: int, dimensions: int | None = None) -> list[float]:
    return vector(TextItem(TokenIds.of(ids)), VECTORS, dimensions).tolist()


def vectors(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    assert [each["index"] for each in reply.json["data"]] == [*range(len(reply.json["data"]))]
    return [each["embedding"] for each in reply.json["data"]]


async def test_texts_and_token_ids_have_their_vectors_in_order(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        reply = await client.ask(embed(["the oak", "elm"]))
        assert vectors(reply) == [expected(CLS, THE, OAK, SEP), expected(CLS, ELM, SEP)]
        assert reply.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        assert (reply.json["object"], reply.json["model"]) == ("list", "vectors")
        assert vectors(await client.ask(embed("elm"))) == [expected(CLS, ELM, SEP)]
        assert vectors(await client.ask(embed([4, 5]))) == [expected(THE, OAK)]
        assert vectors(await client.ask(embed([[4, 5], [6]]))) == [expected(THE, OAK), expected(ELM)]
        assert vectors(await client.ask(embed("elm", dimensions=3))) == [expected(CLS, ELM, SEP, dimensions=3)]


async def test_base64_is_little_endian_float32(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        [text] = vectors(await client.ask(embed("elm", encoding_format="base64")))
        assert isinstance(text, str)
        assert [*struct.unpack("<8f", b64decode(text))] == expected(CLS, ELM, SEP)


async def test_a_long_list_is_computed_in_parts_and_answered_in_order(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        texts = ["the " * (1 + number % 13) for number in range(2048)]
        found = vectors(await client.ask(embed(texts)))
        assert found == [expected(CLS, *[THE] * (1 + number % 13), SEP) for number in range(2048)]
        [work] = each.vectors.works
        assert {len(part) for part in work.parts} == {64}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ["oak", "elm", "oak", ""]}, "input[3]", "must not be empty"),
        ({"input": [[4], []]}, "input[1]", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["oak", 5]}, "input[1]", "expected a string"),
        ({"input": ["oak"] * 2049}, "input", "at most 2048"),
        (
            {"input": ["oak", "oak " * 15]},
            "input[1]",
            "input[1] is 17 tokens long, and a text of this model can have 16",
        ),
        ({"input": "oak " * 100_000}, "input", "more than 16 tokens long"),
        ({"input": [4] * 17}, "input", "17 tokens long"),
        ({"input": [4, 14]}, "input", "outside 0 to 13"),
        ({"input": "oak", "dimensions": 9}, "dimensions", "1 to 8 dimensions, not of 9"),
        ({"input": "oak", "input_type": "song"}, "input_type", "no prompt 'song'; it has document, query"),
        ({"input": "oak", "prompt_name": "song"}, "prompt_name", "no prompt 'song'"),
        ({"input": "oak", "prompt_name": "query", "input_type": "query"}, "prompt_name", "cannot stand beside"),
        ({"input": [4], "input_type": "query"}, "input_type", "cannot stand beside token ids"),
        ({"input": "oak", "cache_salt": "x"}, "cache_salt", "not supported"),
        ({"input": "oak", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1"),
        ({"input": "oak", "model": "tiny"}, "model", "ask POST /v1/chat/completions"),
        ({"input": "oak", "model": "scores"}, "model", "computes scores of pairs of texts, and no vectors: ask POST"),
    ],
)
async def test_what_cannot_be_computed_is_refused_by_name(
    body: dict[str, Any], param: str, words: str, rather_slow: MockClock
) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        reply = await client.ask(post({"model": "vectors"} | body, "/v1/embeddings"))
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert words in reply.error["message"]
        assert each.vectors.works == []
        assert vectors(await client.ask(embed("elm"))) == [expected(CLS, ELM, SEP)]


async def test_a_request_of_the_wrong_kind_reaches_no_engine(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        for asked in (post(chat(model="vectors")), text(model="vectors"), response(model="vectors")):
            reply = await client.ask(asked)
            assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter"), reply.body
            assert reply.error["message"] == "model vectors computes no answers: ask POST /v1/embeddings"
        for asked in (rerank("tiny", "oak"), score("tiny", "oak", "elm")):
            reply = await client.ask(asked)
            assert (reply.status, reply.error["param"]) == (400, "model")
        messages = await client.ask(post({"model": "vectors", "messages": chat()["messages"]}, "/tokenize"))
        assert (messages.status, messages.error["param"]) == (400, "messages")
        assert (each.rig.worker.asked, each.vectors.works, each.scores.works) == ([], [], [])


async def test_texts_are_tokenised_and_ids_are_read_for_such_a_model(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        reply = await client.ask(post({"model": "vectors", "prompt": "the oak"}, "/tokenize"))
        assert reply.json == {"tokens": [CLS, THE, OAK, SEP], "count": 4, "max_model_len": 16}
        reply = await client.ask(post({"model": "vectors", "tokens": [THE, OAK]}, "/detokenize"))
        assert reply.json["text"] == "the oak"
        long = await client.ask(post({"model": "vectors", "prompt": "oak " * 99}, "/tokenize"))
        assert long.error["code"] == "context_length_exceeded"


async def test_a_text_stands_behind_the_prompt_that_is_asked_for(rather_slow: MockClock) -> None:
    model = bert_model(prompts={"query": "query: ", "passage": "tree: ", "old": "old "}, default_prompt_name="old")
    async with embedding_rig(model=model) as each:
        client = await each.rig.client()
        cases: list[tuple[dict[str, Any], list[int]]] = [
            ({}, [8, OAK]),
            ({"input_type": "query"}, [11, 12, OAK]),
            ({"input_type": "search_document"}, [10, 12, OAK]),
            ({"prompt_name": "passage"}, [10, 12, OAK]),
        ]
        for fields, ids in cases:
            assert vectors(await client.ask(embed("oak", **fields))) == [expected(CLS, *ids, SEP)]


async def test_a_long_text_is_cut_if_its_client_asks_for_that(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        cases: list[tuple[dict[str, Any], int]] = [
            ({"truncate_prompt_tokens": -1}, 14),
            ({"truncate": True}, 14),
            ({"truncate_prompt_tokens": 5}, 3),
            ({"truncate_prompt_tokens": 99}, 14),
        ]
        for fields, kept in cases:
            for text in ("the " * 100, "the " * 30_000):
                assert vectors(await client.ask(embed(text, **fields))) == [expected(CLS, *[THE] * kept, SEP)]


async def test_documents_come_in_the_order_of_their_scores(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        documents: list[Any] = ["the oak", {"text": "elm"}, "old"]
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            reply = await client.ask(rerank("scores", *documents, path=path))
            results = reply.json["results"]
            assert sorted(each["index"] for each in results) == [0, 1, 2]
            found = [each["relevance_score"] for each in results]
            assert found == sorted(found, reverse=True)
            assert "document" not in results[0]
        pair = TextItem(TokenIds.of([CLS, 9, 10, SEP, THE, OAK, SEP]), 4)
        assert {each["index"]: each["relevance_score"] for each in results}[0] == vector(pair, SCORES)[0]
        assert reply.json["usage"] == {"prompt_tokens": 19, "total_tokens": 19}
        best = await client.ask(rerank("scores", *documents, top_n=1, return_documents=True))
        [only] = best.json["results"]
        assert only["document"] == {"text": ["the oak", "elm", "old"][only["index"]]}


async def test_a_model_of_vectors_ranks_by_similarity(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        reply = await client.ask(rerank("vectors", "the oak", "which tree", "elm"))
        first = reply.json["results"][0]
        assert (first["index"], first["relevance_score"]) == (1, pytest.approx(1.0))
        scores = (await client.ask(score("vectors", ["oak", "elm"], ["oak", "oak"]))).json["data"]
        wanted = sum(a * b for a, b in zip(expected(CLS, ELM, SEP), expected(CLS, OAK, SEP), strict=True))
        assert [each["score"] for each in scores] == [pytest.approx(1.0), pytest.approx(wanted)]


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (rerank("scores", "oak", "the " * 14), "documents[1]", "19 tokens long"),
        (rerank("scores", "oak", ""), "documents[1]", "must not be empty"),
        (rerank("scores"), "documents", "must not be empty"),
        (rerank("scores", "oak", query="the " * 13), "query", "13 tokens long, and a query here can have 12"),
        (rerank("scores", "oak", "\n"), "documents[1]", "has no tokens"),
        (score("scores", ["oak", "elm"], ["oak", "elm", "oak"]), "text_1", "must hold one text, or 3"),
        (score("scores", "oak", ["elm", "the " * 14]), "text_2[1]", "tokens long"),
    ],
)
async def test_pairs_that_cannot_be_scored_are_refused_by_name(
    asked: bytes, param: str, words: str, rather_slow: MockClock
) -> None:
    async with embedding_rig() as each:
        reply = await (await each.rig.client()).ask(asked)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert words in reply.error["message"]
        assert each.scores.works == []


async def test_a_long_document_is_cut_if_its_client_asks_for_that(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        cases: list[tuple[dict[str, Any], int]] = [({"truncate": True}, 16), ({"max_tokens_per_doc": 3}, 8)]
        for fields, tokens in cases:
            reply = await client.ask(rerank("scores", "the " * 99, **fields))
            assert reply.json["usage"]["prompt_tokens"] == tokens


async def test_a_client_that_leaves_ends_all_parts(rather_slow: MockClock) -> None:
    async with embedding_rig(Computing(seconds=100)) as each:
        client = await each.rig.client()
        await client.send(embed(["the oak"] * 2048))
        await each.vectors.began.wait()
        assert each.vectors.running == 32
        await leave_all(each.rig)
        gateway = each.rig.gateway
        assert (each.vectors.running, each.vectors.left, gateway.runner.running, gateway.gate.inside) == (0, 1, 0, 0)
        assert gateway.memory.answers.reserved_bytes == gateway.memory.bodies.reserved_bytes == 0


async def test_an_answer_that_takes_too_much_memory_is_refused_before_it_is_computed(rather_slow: MockClock) -> None:
    wide = Computing(evolve(VECTORS, width=4096))
    async with embedding_rig(wide, answers_bytes_max=64 * 2**20) as each:
        client = await each.rig.client()
        reply = await client.ask(embed(["oak"] * 2048))
        assert (reply.status, reply.error["param"], wide.works) == (400, "input", [])
        assert reply.error["message"] == (
            "2048 vectors of 4096 elements as lists of numbers may take 243400704 bytes of memory, and one request can"
            " have 67174400 of the 67108864 for all (answers_bytes_max): ask for base64 (encoding_format), or send"
            " fewer texts at a time"
        )
        assert len(vectors(await client.ask(embed(["oak"] * 20)))) == 20


async def test_a_request_is_logged_with_its_texts_and_tokens(
    caplog: pytest.LogCaptureFixture, rather_slow: MockClock
) -> None:
    caplog.set_level(logging.INFO)
    async with embedding_rig() as each:
        client = await each.rig.client()
        await client.ask(embed(["the oak", "elm"]))
        each.vectors.fails = True
        lost = await client.ask(embed("elm"))
        assert (lost.status, lost.error["code"]) == (503, "engine_lost")
        await leave_all(each.rig)
    lines = [record.__dict__ for record in caplog.records if record.name == "espalier.requests"]
    whole, failed = (line for line in lines if line.get("api") == "embeddings")
    assert (whole["outcome"], whole["items"], whole["prompt_tokens"], whole["status"]) == ("stop", 2, 7, 200)
    assert (failed["outcome"], failed["items"]) == ("engine_lost", 1)


async def test_a_request_ends_at_its_deadline_and_at_a_drain(rather_slow: MockClock) -> None:
    async with embedding_rig(Computing(seconds=1000), first_token_s=3.0, total_s=10.0) as each:
        client = await each.rig.client()
        late = await client.ask(embed("elm"))
        assert (late.status, late.error["message"]) == (503, "the answer took longer than 10.0 s")
        await client.send(embed("elm"))
        await trio.sleep(1)
        assert each.rig.gateway.abort() == 1
        assert (await client.reply()).error["code"] == "draining"


async def test_a_slow_reader_gets_the_whole_answer(rather_slow: MockClock) -> None:
    wide = Computing(evolve(VECTORS, width=1024))
    async with embedding_rig(wide) as each:
        client = await each.rig.client(receive_buffer=4096)
        await client.send(embed(["oak"] * 200))
        await trio.sleep(5)
        found = vectors(await client.reply())
        assert (len(found), len(found[0])) == (200, 1024)


async def test_models_are_listed_with_what_they_compute(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        listed = (await (await each.rig.client()).ask(head("GET", "/v1/models"))).json["data"]
        assert {one["id"]: one["task"] for one in listed} == {"tiny": "generate", "vectors": "embed", "scores": "embed"}


async def test_a_socket_refuses_an_answer_by_such_a_model(rather_slow: MockClock) -> None:
    async with embedding_rig() as each:
        client = await each.rig.client()
        await client.upgrade()
        await client.say(create(model="vectors"))
        failed = (await client.events("response.failed", "error"))[-1]
        error = failed.get("error") or failed["response"]["error"]
        assert error["message"] == "model vectors computes no answers: ask POST /v1/embeddings"
        await client.say(create())
        assert (await client.events("response.completed"))[-1]["type"] == "response.completed"
