"""A gateway whose models compute vectors and scores: the real actor, over simulated vectors without an engine."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import trio
from attrs import Factory, define, evolve
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from actors.embedding import EmbeddingRequest, EmbeddingResult, embedding
from actors.engines.simulated.embedder import vector
from actors.kit.calls import Address, Askable, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.kit.offload import run_inline
from actors.processor import TextReply, TextRequest, TextResult
from actors.routing.embedding import EmbedWork
from actors.text.embedding_model import EmbeddingModel, load
from actors.text.limits import PromptLimits
from protocol.dialects.http import Model
from protocol.errors import EngineLost
from protocol.messages.embedding import EmbeddingInfo, Vectors
from protocol.messages.engine import EngineInfo
from protocol.tensors import Dtype, Tensor
from supervisor.gateway.requests import ServedEmbeddings, ServedModel
from tests.rig.embedders import EMBEDDER, SCORES, VECTORS
from tests.rig.gateway import Rig, gateway_rig

WORDS = ["the", "oak", "elm", "is", "old", "which", "tree", "query", ":", "?"]
TOKENS_MAX = 16


def bert_files(**config: object) -> dict[str, bytes]:
    """Return the files of a model whose tokenizer puts `[CLS]` and `[SEP]` around a text, and between two."""
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # no password
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    files = {"tokenizer.json": tokenizer.to_str().encode(), "config.json": b"{}"}
    return files | ({"config_sentence_transformers.json": json.dumps(config).encode()} if config else {})


def bert_model(**config: object) -> EmbeddingModel:
    """Return a model with such a tokenizer; `config` is its `config_sentence_transformers.json`."""
    return load(bert_files(**config), encodes="tokenizers")


@define(eq=False)
class Computing:
    """The engines of a model: parts that were asked for, and how they are answered."""

    info: EmbeddingInfo = VECTORS
    seconds: float = 0.0
    fails: bool = False
    number: float | None = None  # of which every vector consists
    works: list[EmbedWork] = Factory(list)
    running: int = 0
    left: int = 0
    began: trio.Event = Factory(trio.Event)

    @property
    def engine(self) -> EngineInfo:
        """The properties of its engines."""
        return evolve(EMBEDDER, embedding=self.info, request_tokens_max=TOKENS_MAX, vocabulary_size=14)

    async def compute(self, work: EmbedWork) -> tuple[Vectors, ...]:
        """Return the vectors of each part, after some time."""
        self.works.append(work)
        self.running += len(work.parts)
        self.began.set()
        whole = False
        try:
            await trio.sleep(self.seconds)
            if self.fails:
                raise EngineLost("the engine main/e that was answering died")
            whole = True
        finally:
            self.running -= len(work.parts)
            self.left += not whole
        return tuple(self._vectors(work, index) for index in range(len(work.parts)))

    def _vectors(self, work: EmbedWork, index: int) -> Vectors:
        rows = [vector(item, self.info, work.dimensions) for item in work.parts[index]]
        numbers = [number if self.number is None else self.number for row in rows for number in row]
        data = array("f", numbers).tobytes()
        return Vectors(Tensor(Dtype.FLOAT32, (len(rows), len(rows[0])), memoryview(data)))


Served = tuple[ServedModel, Callable[..., Any]]


def served_embeddings(
    name: str, computing: Computing, model: EmbeddingModel, requests_max: int = 8, *, ready: bool = True
) -> Served:
    """Return a model for a gateway, and the actor that answers for it."""
    asked: Address[EmbeddingRequest, EmbeddingResult, EmbeddingResult]
    asked, inbox = mailbox(requests_max)
    direct: DirectCalls[EmbeddingRequest, EmbeddingResult, EmbeddingResult] = DirectCalls()
    address = DirectAddress(asked.inbox, direct)
    shown = Model(name, 7, name, TOKENS_MAX, honours_seed=False, task="embed")
    embeddings = ServedEmbeddings(address, lambda: computing.info, "POST /v1/embeddings")
    served = ServedModel(
        lambda: shown,
        cast("Askable[TextRequest, TextReply, TextResult]", address),
        lambda: TOKENS_MAX,
        embeddings=embeddings,
    )
    limits = PromptLimits(computing.engine, TOKENS_MAX, TOKENS_MAX)
    run = partial(
        embedding,
        inbox,
        model,
        computing.compute,
        lambda: limits if ready else None,
        run_inline,
        requests_max,
        direct,
        tokenize_tokens_max=64,
    )
    return served, run


@define(eq=False)
class EmbeddingRig:
    """A running gateway with `tiny`, which answers, `vectors` and `scores`, and the engines of the last two."""

    rig: Rig
    vectors: Computing
    scores: Computing


@asynccontextmanager
async def embedding_rig(
    vectors: Computing | None = None, model: EmbeddingModel | None = None, **limits: Any
) -> AsyncIterator[EmbeddingRig]:
    """Serve a model that answers, one of vectors, and one of scores."""
    model = model or bert_model()
    computing = {"vectors": vectors or Computing(), "scores": Computing(SCORES)}
    async with gateway_rig(**limits) as rig, trio.open_nursery() as nursery:
        served = dict(rig.gateway.runner.served)
        for name, each in computing.items():
            served[name], run = served_embeddings(name, each, model)
            await nursery.start(run, name=f"embeddings of {name}")
        rig.gateway.runner.served = served
        yield EmbeddingRig(rig, computing["vectors"], computing["scores"])
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def asked_embeddings(
    computing: Computing, requests_max: int = 8, *, ready: bool = True
) -> AsyncIterator[Callable[[EmbeddingRequest], Awaitable[EmbeddingResult | None]]]:
    """Run the actor alone, and yield a function that asks it."""
    served, run = served_embeddings("vectors", computing, bert_model(), requests_max, ready=ready)
    assert served.embeddings is not None
    address = cast("Askable[EmbeddingRequest, EmbeddingResult, EmbeddingResult]", served.embeddings.ask)

    async def ask(request: EmbeddingRequest) -> EmbeddingResult | None:
        async with address.ask(request, 0) as answer:
            return await answer.result()

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        yield ask
        nursery.cancel_scope.cancel()
