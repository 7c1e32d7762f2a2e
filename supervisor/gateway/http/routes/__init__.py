"""The HTTP routes of the gateway, one row each."""

from __future__ import annotations

from protocol.access import Access
from protocol.dialects import chat, reranking, targets
from protocol.dialects import completions as completions_dialect
from protocol.dialects import embeddings as embeddings_dialect
from protocol.dialects import responses as responses_dialect
from protocol.dialects import tokens as tokens_dialect
from protocol.openapi.document import EVENT_STREAM, PLAIN_TEXT, Operation, json_body
from supervisor.gateway.http.routes import (
    admin,
    completions,
    embeddings,
    engine_files,
    health,
    models,
    openapi,
    operations,
    pools,
    responses,
    tokens,
)
from supervisor.gateway.http.routes.route import Handler, HttpRoute, Resource, RouteTable, options

__all__ = ["ROUTES", "Handler", "HttpRoute", "Resource", "RouteTable", "options"]

_CONVERSATION = [{"role": "user", "content": "Tell me about the oak."}]

ROUTES = RouteTable(
    (
        HttpRoute(
            Operation("GET", "/health", "Whether the process is alive.", PLAIN_TEXT, access=Access.OPEN),
            health.health,
            probe=True,
        ),
        HttpRoute(
            Operation("GET", "/ready", "Whether requests can be served now.", PLAIN_TEXT, access=Access.OPEN),
            health.ready,
            probe=True,
        ),
        HttpRoute(
            Operation("GET", "/metrics", "Metrics for Prometheus.", PLAIN_TEXT, access=Access.ADMIN),
            health.metrics,
            probe=True,
        ),
        HttpRoute(Operation("GET", "/openapi.json", "This document.", json_body({"type": "object"})), openapi.openapi),
        HttpRoute(
            Operation("GET", "/v1/models", "The models that are served.", json_body("Models")), models.list_models
        ),
        HttpRoute(
            Operation(
                "GET",
                models.PREFIX + "{model}",
                "One model that is served.",
                json_body("Model"),
                errors=(404,),
                parameters=(models.PATH_PARAMETER,),
            ),
            models.get_model,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/chat/completions",
                "Answer a conversation.",
                {**json_body("ChatCompletion"), **EVENT_STREAM},
                chat.ChatRequest,
                {"model": "tiny", "messages": _CONVERSATION},
                errors=(404,),
                parameters=targets.PARAMETERS,
            ),
            completions.CHAT,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/completions",
                "Complete a text.",
                {**json_body("Completion"), **EVENT_STREAM},
                completions_dialect.CompletionRequest,
                {"model": "tiny", "prompt": "The oak"},
                errors=(404,),
                parameters=targets.PARAMETERS,
            ),
            completions.COMPLETIONS,
        ),
        HttpRoute(
            Operation(
                "GET",
                "/v1/responses",
                "Open a WebSocket for the events that `x-websocket` names.",
                {},
                errors=(426,),
                parameters=targets.PARAMETERS,
                extensions={"x-websocket": {"client": ["Create", "CancelResponse"]}},
            ),
            responses.upgrade,
            websocket=True,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/responses",
                "Answer a conversation, as a response of the Responses API.",
                {**json_body("Response"), **EVENT_STREAM},
                responses_dialect.CreateHttp,
                {"model": "tiny", "input": "Tell me about the oak."},
                errors=(404,),
                parameters=targets.PARAMETERS,
            ),
            responses.answer,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/embeddings",
                "A vector of each text.",
                json_body("Embeddings"),
                embeddings_dialect.EmbeddingsRequest,
                {"model": "tiny", "input": ["The oak", "The elm"]},
                errors=(404,),
            ),
            embeddings.embed,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/rerank",
                "The documents of a list in the order of their relevance to a query.",
                json_body("Reranked"),
                reranking.RerankRequest,
                {"model": "tiny", "query": "Which tree is old?", "documents": ["The oak", "The elm"]},
                errors=(404,),
            ),
            embeddings.rerank,
            # Names in other servers.
            aliases=("/rerank", "/v2/rerank"),
        ),
        HttpRoute(
            Operation(
                "POST",
                "/v1/score",
                "The score of each pair of texts.",
                json_body("Scores"),
                reranking.ScoreRequest,
                {"model": "tiny", "text_1": "Which tree is old?", "text_2": ["The oak", "The elm"]},
                errors=(404,),
            ),
            embeddings.score,
            # A name in vLLM.
            aliases=("/score",),
        ),
        HttpRoute(
            Operation(
                "POST",
                "/tokenize",
                "The token ids of a text or a conversation.",
                json_body("Tokenized"),
                tokens_dialect.TokenizeRequest,
                {"prompt": "The oak"},
                errors=(404,),
            ),
            tokens.tokenize,
        ),
        HttpRoute(
            Operation(
                "POST",
                "/detokenize",
                "The text of token ids.",
                json_body("Detokenized"),
                tokens_dialect.DetokenizeRequest,
                {"tokens": [1, 2]},
                errors=(404,),
            ),
            tokens.detokenize,
        ),
        HttpRoute(
            Operation(
                "GET",
                "/server_info",
                "The models of this server; for an operator also its engines and limits.",
                json_body("ServerInfo"),
                errors=(404,),
            ),
            admin.server_info,
            # An older name in SGLang.
            aliases=("/get_server_info",),
        ),
        HttpRoute(
            Operation(
                "GET",
                "/model_info",
                "Information about one model.",
                json_body("ModelInfo"),
                errors=(404,),
                parameters=(models.QUERY_PARAMETER,),
            ),
            admin.model_info,
            # An older name in SGLang.
            aliases=("/get_model_info",),
        ),
        HttpRoute(
            Operation(
                "GET",
                "/pools",
                "The pools of engines, and the grids that map requests to them.",
                json_body("Pools"),
                access=Access.ADMIN,
            ),
            pools.pools,
        ),
        *operations.routes(),
        HttpRoute(
            Operation(
                "GET",
                engine_files.PREFIX + "{name}",
                "A file that an operation of an engine has left, such as a profile.",
                engine_files.BINARY,
                errors=(404,),
                parameters=(engine_files.FILE_PARAMETER, operations.ENGINE_PARAMETER),
                access=Access.ADMIN,
            ),
            engine_files.get_file,
        ),
    )
)
