"""What the HTTP doors take and answer, as an OpenAPI document: made of the classes that read the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TypeAlias

from attrs import Factory, frozen

from protocol.dialects import chat, completions, formats, responses, tokens
from protocol.errors import ERRORS_BY_CODE, RequestError
from protocol.openapi import answer_schemas
from protocol.openapi.request_schemas import NULL, Schema, Schemas, without_null

ERROR: Schema = {"$ref": "#/components/schemas/Error"}
# What any request can meet: wrong syntax, no key or a foreign page, slowness, size, limits, and the server's own state.
ALWAYS = (400, 401, 403, 408, 413, 429, 431, 500, 501, 503, 505)

Media: TypeAlias = Mapping[str, Schema]
"""Schemas of bodies by their media types."""


@frozen
class Operation:
    """What one method of one path does."""

    summary: str
    answers: Media
    asked: type | None = None
    example: object = None
    errors: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    needs: str = "key"  # "nothing", "key" or "admin"
    more: Schema = Factory(dict)


def _named(name: str) -> Media:
    return {"application/json": {"$ref": f"#/components/schemas/{name}"}}


_PLAIN_TEXT: Media = {"text/plain": {"type": "string"}}
# Some read this schema as that of the whole body, some as that of each event, so it has no type.
_STREAM: Media = {"text/event-stream": {"description": "Server-sent events with JSON, if `stream` is true."}}
_MODEL: Schema = {
    "name": "model",
    "required": True,
    "in": "path",
    "schema": {"type": "string", "minLength": 1},
    "description": "The model's name, as the list of models has it.",
}
_OF_MODEL: Schema = {
    "name": "model",
    "in": "query",
    "schema": {"type": "string"},
    "description": "Needed where several are served; empty is as if it were not there.",
}
_SAID = [{"role": "user", "content": "Tell me about the oak."}]
_INFO = Operation("The models, the engines and the limits of this server.", _named("ServerInfo"), errors=(404,))
_MODEL_INFO = Operation("About one model.", _named("ModelInfo"), errors=(404,), parameters=(_OF_MODEL,))
_FLUSH = Operation("Forget every engine's prefix cache.", _PLAIN_TEXT, errors=(404,), needs="admin")
_UPGRADE = Operation(
    "Open a WebSocket, on which the events of `x-websocket` are said.",
    {},
    errors=(426,),
    more={"x-websocket": {"client": ["Create", "CancelResponse"]}},
)

OPERATIONS: dict[str, dict[str, Operation]] = {
    "/health": {"get": Operation("Whether the process lives.", _PLAIN_TEXT, needs="nothing")},
    "/ready": {"get": Operation("Whether requests can be served now.", _PLAIN_TEXT, needs="nothing")},
    "/metrics": {"get": Operation("Numbers for Prometheus.", _PLAIN_TEXT, needs="admin")},
    "/openapi.json": {"get": Operation("This document.", {"application/json": {"type": "object"}})},
    "/v1/models": {"get": Operation("Every model that is served.", _named("Models"))},
    "/v1/models/{model}": {
        "get": Operation("One model that is served.", _named("Model"), errors=(404,), parameters=(_MODEL,))
    },
    "/v1/chat/completions": {
        "post": Operation(
            "Answer a conversation.",
            {**_named("ChatCompletion"), **_STREAM},
            chat.ChatRequest,
            {"model": "tiny", "messages": _SAID},
            errors=(404, 415),
        )
    },
    "/v1/completions": {
        "post": Operation(
            "Go on with a text.",
            {**_named("Completion"), **_STREAM},
            completions.CompletionRequest,
            {"model": "tiny", "prompt": "The oak"},
            errors=(404, 415),
        )
    },
    "/v1/responses": {
        "get": _UPGRADE,
        "post": Operation(
            "Answer a conversation, in the shape of Responses.",
            {**_named("Response"), **_STREAM},
            responses.CreateHttp,
            {"model": "tiny", "input": "Tell me about the oak."},
            errors=(404, 415),
        ),
    },
    "/tokenize": {
        "post": Operation(
            "The token ids of a text or a conversation.",
            _named("Tokenized"),
            tokens.TokenizeRequest,
            {"prompt": "The oak"},
            errors=(404, 415),
        )
    },
    "/detokenize": {
        "post": Operation(
            "The text of token ids.",
            _named("Detokenized"),
            tokens.DetokenizeRequest,
            {"tokens": [1, 2]},
            errors=(404, 415),
        )
    },
    "/server_info": {"get": _INFO},
    "/get_server_info": {"get": _INFO},
    "/model_info": {"get": _MODEL_INFO},
    "/get_model_info": {"get": _MODEL_INFO},
    "/flush_cache": {"get": _FLUSH, "post": _FLUSH},
}


def document(version: str, *, models: Sequence[str] = (), keys_wanted: bool = True) -> dict[str, object]:
    """Return the document of a server that serves these models; without names any may be asked for."""
    schemas = Schemas(_MORE)
    paths = {
        path: {method: _operation(path, method, each, schemas, keys_wanted) for method, each in methods.items()}
        for path, methods in OPERATIONS.items()
    }
    for event in (responses.Create, responses.CancelResponse):
        schemas.of(event)
    if models:
        _name_models(schemas.named, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Espalier",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": (
                "Large language models, in OpenAI's shapes. A field that is not named here is refused, and an integer"
                " is written without a point. Every answer says its x-request-id; a request may bring its own. What"
                " a GET knows, a HEAD knows, and every path knows OPTIONS."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.named, **answer_schemas.SCHEMAS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, method: str, each: Operation, schemas: Schemas, keys_wanted: bool) -> Schema:
    said: Schema = {
        "operationId": f"{method}{path.replace('{model}', 'one')}".replace("/", "_").replace(".", "_"),
        "summary": each.summary,
        "responses": _answers(each),
        "security": _security(each.needs, keys_wanted=keys_wanted),
        **each.more,
    }
    if each.needs == "admin":
        said["description"] = "Where there are keys it takes one of an admin."
    if each.parameters:
        said["parameters"] = list(each.parameters)
    if each.asked is not None:
        content = {"schema": schemas.of(each.asked), "example": each.example}
        said["requestBody"] = {"required": True, "content": {"application/json": content}}
    return said


def _answers(each: Operation) -> Schema:
    said: Schema = {}
    if each.answers:
        content = {media: {"schema": schema} for media, schema in each.answers.items()}
        said["200"] = {"description": "What was asked for.", "content": content}
    else:
        said["101"] = {"description": "A WebSocket, for who asked for one."}
    for status in sorted({*ALWAYS, *each.errors}):
        content = {"application/json": {"schema": ERROR}}
        said[str(status)] = {"description": _description(status), "content": content}
    return said


def _description(status: int) -> str:
    known: list[type[RequestError]] = [*ERRORS_BY_CODE.values()]
    codes = [cls.code for cls in known if cls.http_status == status]
    return f"{HTTPStatus(status).phrase}: {', '.join(codes)}." if codes else f"{HTTPStatus(status).phrase}."


def _security(needs: str, *, keys_wanted: bool) -> list[Schema]:
    if needs == "nothing":
        return []
    return [{"bearer": []}] if keys_wanted else [{}, {"bearer": []}]


# What the fields of a request demand of each other, as far as a schema can say it --------------


def _changed(schema: Schema, **properties: Schema) -> Schema:
    old = schema["properties"]
    assert isinstance(old, dict)
    return {**schema, "properties": {**old, **properties}}


def _property(schema: Schema, name: str) -> Schema:
    properties = schema["properties"]
    assert isinstance(properties, dict)
    found: Schema = properties[name]
    return found


def _message(schema: Schema) -> Schema:
    content = without_null(_property(schema, "content"))
    return {**_changed(schema, content=content), "required": ["role", "content"]}


def _format(needed: tuple[str, ...], others: tuple[str, ...]) -> Schema:
    """Say that a format has its schema exactly if it is of the type that has one."""
    with_schema = {"type": {"const": "json_schema"}, **{name: {"not": NULL} for name in needed}}
    without = {"type": {"enum": ["text", "json_object"]}, **dict.fromkeys((*needed, *others), NULL)}
    return {"oneOf": [{"required": list(needed), "properties": with_schema}, {"properties": without}]}


def _tokenize(schema: Schema) -> Schema:
    prompt = {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": NULL}}
    special = {"enum": [False, None]}
    said = {"messages": {"type": "array"}, "prompt": NULL, "add_special_tokens": special}
    return {**schema, "oneOf": [prompt, {"required": ["messages"], "properties": said}]}


_TOP = {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}}


def _chat(schema: Schema) -> Schema:
    then = {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
    return {**schema, "if": _TOP, "then": then}


def _completion(schema: Schema) -> Schema:
    return _changed(schema, suffix={"enum": [None, ""]})


def _asked(schema: Schema) -> Schema:
    include = {"type": "array", "items": {"enum": [responses.LOGPROBS]}}
    then = {"required": ["include"], "properties": {"include": {"type": "array", "minItems": 1}}}
    return {**_changed(schema, include={"anyOf": [include, NULL]}), "if": _TOP, "then": then}


def _http(schema: Schema) -> Schema:
    return _asked(_changed(schema, previous_response_id=NULL))  # nothing is remembered between two requests


def _name_models(named: Mapping[str, Schema], models: Sequence[str]) -> None:
    for name, schema in named.items():
        properties = schema["properties"]
        if isinstance(properties, dict) and "model" in properties and name != "Create":
            known: Schema = {"type": "string", "enum": list(models)}
            optional = "model" not in list(schema["required"] if isinstance(schema["required"], list) else ())
            properties["model"] = {"anyOf": [known, NULL]} if optional else known


_MORE = {
    chat.Message: _message,
    chat.ChatRequest: _chat,
    completions.CompletionRequest: _completion,
    formats.ResponseFormat: lambda schema: schema | _format(("json_schema",), ()),
    formats.TextFormat: lambda schema: schema | _format(("name", "schema"), ("description", "strict")),
    responses.Create: _asked,
    responses.CreateHttp: _http,
    tokens.TokenizeRequest: _tokenize,
}
