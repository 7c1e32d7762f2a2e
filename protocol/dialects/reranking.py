"""Reranking in the shape of Cohere's and Jina's APIs, and scores in that of vLLM's server.

A document is scored with a query: by a model of scores as a pair, or else by the similarity of two vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from attrs import evolve, frozen

from protocol.dialects.answer_builder import AnswerBody
from protocol.dialects.embeddings import IGNORED, INPUTS_MAX, CutOptions, Texts
from protocol.dialects.options import INT32_MAX, Name
from protocol.dialects.request_body import decode, read
from protocol.messages.embedding import Cut, ScoreTexts, TextScores
from protocol.strict.checks import Holds, Within
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import FieldCheck, Harmless

DocumentText: TypeAlias = Annotated[str, Holds(1)]

_encode = msgspec.json.Encoder().encode


@frozen
class TextDocument:
    """A document as an object."""

    text: DocumentText


@frozen(kw_only=True)
class RerankRequest(CutOptions):
    """The body of `POST /v1/rerank`."""

    harmless: ClassVar[Harmless] = {
        **IGNORED,
        "rank_fields": (),
        "max_chunks_per_doc": (),
        "return_embeddings": (False,),
    }

    model: Name
    query: Annotated[str, Holds(1)]
    documents: Annotated[tuple[DocumentText | TextDocument, ...], Holds(1, INPUTS_MAX)]
    top_n: Annotated[int, Within(at_least=1, at_most=INT32_MAX)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Within(at_least=1, at_most=INT32_MAX)] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each document."""
        return tuple([each if isinstance(each, str) else each.text for each in self.documents])

    @property
    def cut(self) -> Cut | None:
        """The cutting of documents that are too long, None if they are refused."""
        cut = super().cut
        if self.max_tokens_per_doc is None:
            return cut
        return evolve(cut or Cut(), second_max=self.max_tokens_per_doc)


@frozen(kw_only=True)
class ScoreRequest(CutOptions):
    """The body of `POST /v1/score`: one text for all of `text_2`, or one for each."""

    harmless: ClassVar[Harmless] = {**IGNORED, "encoding_format": ("float",)}

    model: Name
    text_1: Texts
    text_2: Texts

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (self._check_counts,)

    def _check_counts(self) -> Iterator[Mistake]:
        first, second = len(self.text_1.texts), len(self.text_2.texts)
        if first not in {1, second}:
            yield Mistake("text_1", f"must hold one text, or {second} like text_2, holds {first}")


def parse_rerank(body: bytes) -> RerankRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), RerankRequest)


def parse_score(body: bytes) -> ScoreRequest:
    """Return the client's request, or raise one `RequestError` with all its mistakes."""
    return read(decode(body), ScoreRequest)


def rerank_texts(request: RerankRequest, *, request_id: str) -> ScoreTexts:
    """Return the request of a reranking for the embeddings of a model."""
    return ScoreTexts(
        id=request_id,
        queries=(request.query,),
        documents=request.texts,
        as_search=True,
        cut=request.cut,
        priority=request.priority,
        params={"queries": "query", "documents": "documents"},
    )


def score_texts(request: ScoreRequest, *, request_id: str) -> ScoreTexts:
    """Return the request of scores for the embeddings of a model."""
    return ScoreTexts(
        id=request_id,
        queries=request.text_1.texts,
        documents=request.text_2.texts,
        cut=request.cut,
        priority=request.priority,
        params={"queries": "text_1", "documents": "text_2"},
    )


def reranked(request: RerankRequest, answer: TextScores, *, request_id: str) -> AnswerBody:
    """Return the body that answers `POST /v1/rerank`: the most relevant document first; of equal ones the first."""
    scores = answer.scores
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    texts = request.texts if request.return_documents else ()
    results = [
        _encode(
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": texts[index]}} if texts else {}),
            }
        )
        for index in order
    ]
    head = {"id": f"rerank-{request_id}", "model": request.model}
    tail = {
        "usage": _usage(answer),
        "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": answer.tokens, "output_tokens": 0}},
    }
    return _body(head, "results", results, tail)


def scored(request: ScoreRequest, answer: TextScores, *, request_id: str, created: int) -> AnswerBody:
    """Return the body that answers `POST /v1/score`."""
    data = [_encode({"index": index, "object": "score", "score": score}) for index, score in enumerate(answer.scores)]
    head = {"id": f"score-{request_id}", "object": "list", "created": created, "model": request.model}
    return _body(head, "data", data, {"usage": _usage(answer)})


def _usage(answer: TextScores) -> dict[str, int]:
    return {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens}


def _body(head: Mapping[str, object], name: str, items: Sequence[bytes], tail: Mapping[str, object]) -> AnswerBody:
    separated = [piece for item in items for piece in (b",", item)][1:]
    begin = b'%b,"%b":[' % (_encode(head)[:-1], name.encode())
    return AnswerBody.from_parts([begin, *separated, b"]," + _encode(tail)[1:]])
