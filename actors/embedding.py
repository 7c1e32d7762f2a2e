"""Embeddings: texts to vectors, and pairs of texts to scores, for the clients of one model.

It stands between the gateway, which serves clients, and the embedders of a model, which compute token ids alone. A
client's request is tokenised, checked as a whole, and cut into parts, which are asked for together: all of them are
computed or none, and leaving ends them all. Their vectors are the answer, in the order of the texts.

Work of a client's choice goes through `Offload` into threads, as in the processor. The actor has no engine, and keeps
nothing of a request after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import TypeAlias

import trio
from attrs import frozen

from actors.engines.embedding.embed_check import ITEMS_MAX, dimensions_mistake
from actors.kit.calls import BugCounter, Call, Inbox
from actors.kit.direct import Answerer, DirectCalls
from actors.kit.offload import Offload, RunInThread, RunWork
from actors.routing.embedding import EmbedParts, EmbedWork
from actors.text.embedding_items import ItemLimits, id_items, pair_items, parts_of, text_items
from actors.text.embedding_model import DOCUMENT, QUERY, EmbeddingModel
from actors.text.limits import PromptLimits
from actors.text.similarity import FLOATS_A_CHARACTER, cosines
from actors.text.tokenizing import TOKENIZE_TOKENS_MAX, detokenize, tokenize_only
from protocol.errors import InternalError, NotReady, Unsupported
from protocol.messages.embedding import (
    EmbeddingInfo,
    EmbeddingOutput,
    EmbedTexts,
    ScoreTexts,
    TextItem,
    TextScores,
    TextVectors,
)
from protocol.messages.text import Detokenize, Detokenized, Respond, Tokenize, Tokenized

EmbeddingRequest: TypeAlias = EmbedTexts | ScoreTexts | Respond | Tokenize | Detokenize
"""What clients of any model may ask; a `Respond` is refused."""

EmbeddingResult: TypeAlias = TextVectors | TextScores | Tokenized | Detokenized
EmbeddingCall: TypeAlias = Call[EmbeddingRequest, EmbeddingResult, EmbeddingResult]


async def embedding(
    inbox: Inbox[EmbeddingCall],
    model: EmbeddingModel,
    compute: EmbedParts,
    limits: Callable[[], PromptLimits | None],
    run_in_thread: RunInThread,
    requests_max: int,
    direct: DirectCalls[EmbeddingRequest, EmbeddingResult, EmbeddingResult] | None = None,
    tokenize_tokens_max: int = TOKENIZE_TOKENS_MAX,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests about texts, at most `requests_max` at a time; `compute` has embedders compute their parts.

    `limits` returns the present limits of a text, None until the first engine is ready. `tokenize_tokens_max` bounds
    `Tokenize` and `Detokenize`.
    """
    free, bugs = trio.Semaphore(requests_max), BugCounter()
    direct = direct or DirectCalls()

    async def result_of(request: EmbeddingRequest) -> EmbeddingResult:
        run = Offload(run_in_thread, request.owner).run
        current = limits()
        if current is None:
            raise NotReady("no engine has been ready for this model yet")
        if isinstance(request, Detokenize):
            return await detokenize(request, model, tokenize_tokens_max, run)
        if isinstance(request, Tokenize):
            return await _tokenize(request, model, current, tokenize_tokens_max, run)
        if isinstance(request, Respond) or current.info.embedding is None:
            raise Unsupported("this model computes no answers", param="model")
        texts = _Texts(model, compute, current, current.info.embedding, run)
        return await (texts.vectors(request) if isinstance(request, EmbedTexts) else texts.scores(request))

    async def answer_one(call: EmbeddingCall) -> None:
        try:
            with call.answering(bugs) as answer:
                answer.end(await result_of(call.request))
        finally:
            free.release()

    def begin(_: EmbeddingRequest) -> Answerer[EmbeddingRequest, EmbeddingResult, EmbeddingResult] | None:
        try:
            free.acquire_nowait()
        except trio.WouldBlock:
            return None
        return answer_one

    async with trio.open_nursery() as requests, direct.answered(begin, requests):
        task_status.started()
        while True:
            await free.acquire()
            requests.start_soon(answer_one, await inbox.receive())


@frozen
class _Texts:
    """The texts of one request, on their way to embedders and back."""

    model: EmbeddingModel
    compute: EmbedParts
    limits: PromptLimits
    info: EmbeddingInfo
    run: RunWork

    async def vectors(self, request: EmbedTexts) -> TextVectors:
        """Return the vector of each text."""
        if self.info.output is not EmbeddingOutput.VECTORS:
            raise Unsupported("this model computes scores of pairs of texts, and no vectors", param="model")
        if request.dimensions is not None and (why := dimensions_mistake(request.dimensions, self.info)) is not None:
            raise Unsupported(why, param="dimensions")
        name = request.params.get("texts", "texts")
        limits = self._limits(request)
        if request.token_lists:
            items = await id_items(request.token_lists, limits, self.run, name)
        else:
            prompt = self.model.prompt(request.prompt, request.params.get("prompt", "prompt"))
            items = await text_items(request.texts, prompt, self.model, limits, self.run, name)
        return await self._computed(request, items, request.dimensions)

    async def scores(self, request: ScoreTexts) -> TextScores:
        """Return the score of each document: of a pair by a model of scores, else the similarity of two vectors."""
        limits = self._limits(request)
        if self.info.output is EmbeddingOutput.SCORES:
            items = await pair_items(request, self.model, limits, self.run)
            computed = await self._computed(request, items)
            return _scores([score for row in computed.rows for score in row], computed.tokens)
        items = list[TextItem]()
        texts = (("queries", request.queries, QUERY), ("documents", request.documents, DOCUMENT))
        for field, each, role in texts:
            name = request.params.get(field, field)
            prompt = self.model.prompt(role if request.as_search else None, name)
            items += await text_items(each, prompt, self.model, limits, self.run, name)
        computed = await self._computed(request, items)
        vectors, count = computed.rows, len(request.queries)
        work = 2 * len(vectors) * self.info.width // FLOATS_A_CHARACTER
        scores = await self.run(work, partial(cosines, vectors[:count], vectors[count:]))
        return _scores(scores, computed.tokens)

    def _limits(self, request: EmbedTexts | ScoreTexts) -> ItemLimits:
        return ItemLimits(self.limits.prompt_max, self.limits.info.vocabulary_size, request.cut)

    async def _computed(
        self, request: EmbedTexts | ScoreTexts, items: Sequence[TextItem], dimensions: int | None = None
    ) -> TextVectors:
        parts, priority = parts_of(items, ITEMS_MAX), request.priority or 0
        work = EmbedWork(request.id, parts, dimensions, priority, request.owner, request.trace)
        return TextVectors(await self.compute(work), sum(len(item.tokens) for item in items))


def _scores(scores: Sequence[float], tokens: int) -> TextScores:
    """Return scores as a result; raises `InternalError` if one is no number: they could not be ordered."""
    if not all(map(isfinite, scores)):
        raise InternalError("the engine has returned a score that is no number")
    return TextScores(tuple(scores), tokens)


async def _tokenize(
    request: Tokenize, model: EmbeddingModel, limits: PromptLimits, tokens_max: int, run: RunWork
) -> Tokenized:
    if request.turns:
        raise Unsupported("this model has no chat template: send a prompt", param="messages")
    ids = await tokenize_only(request.text, model, tokens_max, run, special=request.special, param="prompt")
    return Tokenized(ids, limits.total_max)
