"""The models of vectors and of scores of a gateway's node: for each the actor that answers its clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from attrs import evolve, frozen

from actors.embedding import EmbeddingRequest, EmbeddingResult, embedding
from actors.kit.calls import Address, Askable, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.processor import TextReply, TextRequest, TextResult
from actors.routing.embedding import Embedding
from actors.text.embedding_model import EmbeddingModel
from actors.text.limits import PromptLimits
from protocol.dialects.http import EmbeddingProperties, Model
from protocol.messages.embedding import EmbeddingInfo, EmbeddingOutput
from supervisor.cluster import models
from supervisor.cluster.model_pool import ModelPool
from supervisor.engines.kind import NodeContext
from supervisor.gateway.requests import ServedEmbeddings, ServedModel
from supervisor.node import router_child
from supervisor.observers import RoutingMetrics
from supervisor.supervision.tree import Child

ROUTES = {"embed": "POST /v1/embeddings, /v1/rerank or /v1/score", "score": "POST /v1/rerank or /v1/score"}
"""How clients ask the models of each task."""


@frozen(kw_only=True)
class EmbeddingsOfModel:
    """One model of vectors or of scores: how clients ask it, and its actor."""

    served: ServedModel
    child: Child


def embedding_models(context: NodeContext, texts: Mapping[str, EmbeddingModel]) -> Mapping[str, EmbeddingsOfModel]:
    """Return every model of vectors or of scores of a gateway's node, by its name."""
    return {name: _embeddings(context, name, text) for name, text in texts.items()}


def _embeddings(context: NodeContext, name: str, text: EmbeddingModel) -> EmbeddingsOfModel:
    cluster, directory, runtime = context.cluster, context.directory, context.runtime
    requests_max, tokens_max = cluster.gateway.requests_max, cluster.gateway.prompt_tokens_max
    limits = partial(models.request_limits, directory, name, tokens_max)
    routing = Embedding(
        pool=ModelPool(directory, name),
        limits=router_child.limits(cluster.model[name]),
        new_id=runtime.new_id,
        observer=RoutingMetrics(runtime.metrics, name),
        spans=runtime.spans,
    )
    requests: Address[EmbeddingRequest, EmbeddingResult, EmbeddingResult]
    requests, inbox = mailbox(requests_max)
    direct: DirectCalls[EmbeddingRequest, EmbeddingResult, EmbeddingResult] = DirectCalls()
    address = DirectAddress(requests.inbox, direct)
    child = Child(
        name=f"embeddings-{name.replace('/', ':')}",
        run=embedding,
        args=(inbox, text, routing.vectors, limits, runtime.run_in_thread, requests_max, direct),
        about=f"texts to {'vectors' if cluster.task(name) == 'embed' else 'scores'}, for {name}",
        limits=(("requests", requests_max),),
    )
    shown = partial(models.model_object, name, directory, int(runtime.now()))
    served = ServedModel(
        partial(_model_object, shown, cluster.task(name), limits, text),
        # It answers what is asked of every model, and refuses the rest by name.
        cast("Askable[TextRequest, TextReply, TextResult]", address),
        partial(models.request_tokens_max, directory, name),
        embeddings=ServedEmbeddings(address, partial(_info, limits), ROUTES[cluster.task(name)]),
    )
    return EmbeddingsOfModel(served=served, child=child)


def _info(limits: Callable[[], PromptLimits | None]) -> EmbeddingInfo | None:
    return None if (current := limits()) is None else current.info.embedding


def _model_object(
    shown: Callable[[], Model], task: str, limits: Callable[[], PromptLimits | None], text: EmbeddingModel
) -> Model:
    """Return a model as the API shows it, with the properties of its vectors."""
    info = _info(limits)
    if info is None or info.output is not EmbeddingOutput.VECTORS:
        return evolve(shown(), task=task)
    properties = EmbeddingProperties(
        dimensions=info.width,
        pooling=info.pooling,
        normalised=info.normalised,
        is_matryoshka=info.is_matryoshka,
        matryoshka_dimensions=info.matryoshka_dimensions,
        prompts=text.prompt_names,
        default_prompt=text.default_prompt,
    )
    return evolve(shown(), task=task, embedding=properties)
