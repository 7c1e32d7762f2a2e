"""Vectors of texts, and scores of documents, by models that compute these.

An answer is as large as its client makes it, so its memory is reserved before the request is admitted, and its body is
built in pieces of work, each of a few vectors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

from actors.text.similarity import FLOATS_A_CHARACTER
from protocol.cost import ESCAPES, VECTOR_BYTES, vectors_bytes
from protocol.dialects import embeddings as dialect
from protocol.dialects import reranking
from protocol.dialects.answer_builder import AnswerBody
from protocol.messages.embedding import EmbeddingInfo, ScoreTexts, TextScores, TextVectors
from supervisor.gateway.gateway import VectorsSize
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON

FLOATS_A_PIECE = 2**15  # written in one piece of work, about 3 ms
SCORE_BYTES = 2 * VECTOR_BYTES  # of the object with a score


async def embed(exchange: Exchange, body: Body) -> None:
    """Answer with a vector of each text; raises the `RequestError` by which the request failed."""
    request = await exchange.read(dialect.parse, body)
    count = request.input.count

    def size(info: EmbeddingInfo) -> VectorsSize:
        width = min(request.dimensions or info.width, info.width)
        fewer = "send fewer texts at a time"
        return VectorsSize(
            vectors_bytes(count, width, base64=request.base64),
            f"{count} vectors of {width} elements as {'base64' if request.base64 else 'lists of numbers'}",
            fewer if request.base64 else f"ask for base64 (encoding_format), or {fewer}",
            "input",
        )

    record = exchange.start_record(request.model, "embeddings")
    record.memory = exchange.response.memory
    asked = dialect.to_embed(request, request_id=exchange.gateway.runtime.new_id())

    async def finish(computed: TextVectors | TextScores) -> AnswerBody:
        assert isinstance(computed, TextVectors)  # nothing else answers such a request
        return await _vectors_body(exchange, request, computed)

    answer = await exchange.gateway.compute(asked, record, size, finish)
    await exchange.response.reply_in_pieces(200, [JSON], answer.size, answer.pieces())


async def rerank(exchange: Exchange, body: Body) -> None:
    """Answer with the documents in the order of their scores; raises the `RequestError` by which it failed."""
    request = await exchange.read(reranking.parse_rerank, body)
    request_id = exchange.gateway.runtime.new_id()
    asked = reranking.rerank_texts(request, request_id=request_id)
    returned = sum(text.__sizeof__() for text in asked.documents) * ESCAPES if request.return_documents else 0
    build = partial(reranking.reranked, request, request_id=request_id)
    await _score(exchange, request.model, "rerank", asked, returned, build)


async def score(exchange: Exchange, body: Body) -> None:
    """Answer with the score of each pair; raises the `RequestError` by which the request failed."""
    request = await exchange.read(reranking.parse_score, body)
    request_id, created = exchange.gateway.runtime.new_id(), int(exchange.gateway.runtime.now())
    asked = reranking.score_texts(request, request_id=request_id)
    build = partial(reranking.scored, request, request_id=request_id, created=created)
    await _score(exchange, request.model, "score", asked, 0, build)


async def _score(
    exchange: Exchange,
    model: str,
    api: str,
    asked: ScoreTexts,
    returned_bytes: int,
    build: Callable[[TextScores], AnswerBody],
) -> None:
    """Answer with the body that `build` makes of scores; `returned_bytes` of it are texts of the request."""
    record = exchange.start_record(model, api)
    record.memory = exchange.response.memory

    def size(info: EmbeddingInfo) -> VectorsSize:
        # A model of vectors compares them here.
        compared = vectors_bytes(asked.count + len(asked.queries), info.width, base64=True)
        return VectorsSize(
            returned_bytes + compared + SCORE_BYTES * asked.count,
            f"{asked.count} documents",
            "send fewer documents at a time",
            asked.params["documents"],
        )

    def finish(computed: TextVectors | TextScores) -> Awaitable[AnswerBody]:
        assert isinstance(computed, TextScores)  # nothing else answers such a request
        work = SCORE_BYTES * asked.count + returned_bytes
        return exchange.offload(work // FLOATS_A_CHARACTER, partial(build, computed))

    answer = await exchange.gateway.compute(asked, record, size, finish)
    await exchange.response.reply_in_pieces(200, [JSON], answer.size, answer.pieces())


async def _vectors_body(exchange: Exchange, request: dialect.EmbeddingsRequest, computed: TextVectors) -> AnswerBody:
    """Return the body with all vectors, built a few of them at a time."""
    begin, end = dialect.around_vectors(request.model, computed.tokens)
    vectors, parts = iter(computed.rows), list[bytes | bytearray]([begin])
    width = computed.parts[0].data.shape[1]
    first, step = 0, max(1, FLOATS_A_PIECE // width)
    while some := [*islice(vectors, step)]:
        write = partial(dialect.vector_objects, first, some, base64=request.base64)
        parts.append(await exchange.offload(len(some) * width // FLOATS_A_CHARACTER, write))
        first += len(some)
    return AnswerBody.from_parts([*parts, end])
