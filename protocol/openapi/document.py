"""The OpenAPI document of the gateway's HTTP routes, made from the classes that parse the requests.

Each route describes itself as one `Operation`. The routes belong to the gateway, which passes their operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from attrs import Factory, frozen

from protocol.access import Access
from protocol.dialects import chat, chat_messages, completions, formats, responses, tokens
from protocol.dialects.responses import items
from protocol.dialects.responses.tools import OtherTool
from protocol.errors import ERRORS_BY_CODE, RequestError
from protocol.messages.text import Role
from protocol.openapi import answer_schemas
from protocol.openapi.request_schemas import NULL, Schema, Schemas, without_null
from protocol.status_phrases import phrase

ERROR: Schema = {"$ref": "#/components/schemas/Error"}
# Statuses that any request can get: for wrong syntax, a missing key or a foreign page, slowness, size, limits, and the
# state of the server.
ALWAYS = (400, 401, 403, 408, 413, 429, 431, 500, 501, 503, 505)

MediaTypes: TypeAlias = Mapping[str, Schema]
"""Schemas of bodies by their media types."""

PLAIN_TEXT: MediaTypes = {"text/plain": {"type": "string"}}
FILE: MediaTypes = {"application/octet-stream": {"type": "string", "format": "binary"}}
# Some tools apply this schema to the whole body, others to each event, so it has no type.
EVENT_STREAM: MediaTypes = {"text/event-stream": {"description": "Server-sent events with JSON, if `stream` is true."}}


@frozen(eq=False)
class Operation:
    """One method of one path: its request, its answer, and who may call it."""

    method: str
    path: str  # its last segment may be a parameter, in braces
    summary: str
    answer: MediaTypes  # of status 200; empty if the operation opens a WebSocket
    request: type | None = None  # the class of its body, which is JSON
    example: object = None  # of a request
    errors: tuple[int, ...] = ()  # statuses besides those that any request, or any body, can get
    parameters: tuple[Schema, ...] = ()
    access: Access = Access.KEY
    extensions: Schema = Factory(dict)
    takes_file: bool = False  # whether its body is a file, in place of JSON


def json_body(schema: Schema | str) -> MediaTypes:
    """Return a JSON body with this schema, or with the schema of this name in the document."""
    return {"application/json": {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else schema}


def document(
    version: str,
    operations: Sequence[Operation],
    *,
    models: Sequence[str] = (),
    keys_wanted: bool = True,
    leave_out_tools: Collection[str] = (),
) -> dict[str, object]:
    """Return the document of a server with these operations and models; without models, any name is valid.

    Tools of the types `leave_out_tools` are accepted without effect.
    """
    schemas = Schemas(_RULES, {OtherTool: _left_out(leave_out_tools)} if leave_out_tools else {})
    paths: dict[str, dict[str, Schema]] = {}
    for operation in operations:
        described = _operation(operation, schemas, keys_wanted)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    for event in (responses.Create, responses.CancelResponse):
        schemas.schema(event)
    if models:
        _name_models(schemas.named, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Espalier",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": (
                "Large language models, with OpenAI's request and response formats. Fields that are not listed here are"
                " refused, and integers are written without a decimal point. Every response has the header"
                " x-request-id, whose value a request may choose. Every path of GET also serves HEAD, and all paths"
                " serve OPTIONS."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.named, **answer_schemas.SCHEMAS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _left_out(types: Collection[str]) -> Schema:
    return {"type": "object", "properties": {"type": {"enum": sorted(types)}}, "required": ["type"]}


def _operation(operation: Operation, schemas: Schemas, keys_wanted: bool) -> Schema:
    name = f"{operation.method.lower()}{operation.path.replace('{model}', 'one')}"
    described: Schema = {
        "operationId": name.replace("/", "_").replace(".", "_"),
        "summary": operation.summary,
        "responses": _responses(operation),
        "security": _security(operation.access, keys_wanted=keys_wanted),
        **operation.extensions,
    }
    if operation.access is Access.ADMIN:
        described["description"] = "Requires an admin key, if the server requires keys."
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.takes_file:
        described["requestBody"] = {
            "required": True,
            "content": {name: {"schema": schema} for name, schema in FILE.items()},
        }
    elif operation.request is not None:
        content = {"schema": schemas.schema(operation.request), "example": operation.example}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _responses(operation: Operation) -> Schema:
    described: Schema = {}
    if operation.answer:
        content = {media: {"schema": schema} for media, schema in operation.answer.items()}
        described["200"] = {"description": "The request succeeded.", "content": content}
    else:
        described["101"] = {"description": "The connection becomes a WebSocket."}
    media = (415,) if operation.request is not None or operation.takes_file else ()
    for status in sorted({*ALWAYS, *operation.errors, *media}):
        content = {"application/json": {"schema": ERROR}}
        described[str(status)] = {"description": _description(status), "content": content}
    return described


def _description(status: int) -> str:
    classes: list[type[RequestError]] = [*ERRORS_BY_CODE.values()]
    codes = [cls.code for cls in classes if cls.http_status == status]
    return f"{phrase(status)}: {', '.join(codes)}." if codes else f"{phrase(status)}."


def _security(access: Access, *, keys_wanted: bool) -> list[Schema]:
    if access is Access.OPEN:
        return []
    return [{"bearer": []}] if keys_wanted else [{}, {"bearer": []}]


# Rules between the fields of a request, as far as a schema can express them ---------------------


def _changed(schema: Schema, **properties: Schema) -> Schema:
    old = schema["properties"]
    assert isinstance(old, dict)
    return {**schema, "properties": {**old, **properties}}


def _property(schema: Schema, name: str) -> Schema:
    properties = schema["properties"]
    assert isinstance(properties, dict)
    schema_of_property: Schema = properties[name]
    return schema_of_property


def _message(schema: Schema) -> Schema:
    """Return the schema of a message; only an answer may lack its content, and only an answer has reasoning."""
    content = without_null(_property(schema, "content"))
    of_answer = {name: {"enum": [None, ""]} for name in ("refusal", "reasoning_content", "reasoning")}
    needed = {"required": ["content"], "properties": {"content": content, **of_answer}}
    return {**_item(schema), "anyOf": [_IS_ANSWER, needed]}


_IS_ANSWER = {"properties": {"role": {"const": Role.ASSISTANT.value}}}


def _parts(types: Schema) -> Schema:
    """Return the schema of a message with parts of these types alone."""
    return {"properties": {"content": {"items": {"properties": {"type": types}}}}}


_TYPES_OF_TEXT = ["text", "input_text", "output_text"]
_OF_TEXT = _parts({"enum": [*_TYPES_OF_TEXT, "refusal"]})
"""A message without images and videos."""


def _item(schema: Schema) -> Schema:
    """Return the schema of a message, in which only a user has images and videos, and only an answer refusals."""
    is_user = {"properties": {"role": {"const": Role.USER.value}}}
    others = {"if": _IS_ANSWER, "then": _OF_TEXT, "else": _parts({"enum": _TYPES_OF_TEXT})}
    return {**schema, "if": is_user, "then": _parts({"not": {"const": "refusal"}}), "else": others}


def _with_url(schema: Schema, name: str) -> Schema:
    """Return the schema of a part whose URL is required."""
    return {**_changed(schema, **{name: without_null(_property(schema, name))}), "required": ["type", name]}


def _format(needed: tuple[str, ...], others: tuple[str, ...]) -> Schema:
    """Return the rule that a format has a schema if and only if its type is `json_schema`."""
    with_schema = {"type": {"const": "json_schema"}, **{name: {"not": NULL} for name in needed}}
    without = {"type": {"enum": ["text", "json_object"]}, **dict.fromkeys((*needed, *others), NULL)}
    return {"oneOf": [{"required": list(needed), "properties": with_schema}, {"properties": without}]}


def _tokenize(schema: Schema) -> Schema:
    for_messages = {
        "messages": NULL,
        "reasoning_effort": NULL,
        "chat_template_kwargs": {"maxProperties": 0},
        "continue_final_message": {"enum": [False, None]},
    }
    prompt = {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, **for_messages}}
    special = {"enum": [False, None]}
    messages = {"messages": {"type": "array", "items": _OF_TEXT}, "prompt": NULL, "add_special_tokens": special}
    return {**schema, "oneOf": [prompt, {"required": ["messages"], "properties": messages}]}


_HAS_TOP_LOGPROBS = {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}}


def _chat(schema: Schema) -> Schema:
    then = {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
    return {**schema, "if": _HAS_TOP_LOGPROBS, "then": then}


def _completion(schema: Schema) -> Schema:
    return _changed(schema, suffix={"enum": [None, ""]})


def _response_request(schema: Schema) -> Schema:
    include = {"type": "array", "items": {"enum": [*responses.INCLUDABLE]}, "maxItems": responses.INCLUDED_MAX}
    then = {
        "required": ["include"],
        "properties": {"include": {"type": "array", "contains": {"const": responses.LOGPROBS}}},
    }
    return {**_changed(schema, include={"anyOf": [include, NULL]}), "if": _HAS_TOP_LOGPROBS, "then": then}


def _response_http(schema: Schema) -> Schema:
    return _response_request(_changed(schema, previous_response_id=NULL))  # only a connection keeps responses


def _name_models(named: Mapping[str, Schema], models: Sequence[str]) -> None:
    for name, schema in named.items():
        properties = schema["properties"]
        if isinstance(properties, dict) and "model" in properties and name != "Create":
            served: Schema = {"type": "string", "enum": list(models)}
            optional = "model" not in list(schema["required"] if isinstance(schema["required"], list) else ())
            properties["model"] = {"anyOf": [served, NULL]} if optional else served


_RULES = {
    chat_messages.ChatMessage: _message,
    chat.ChatRequest: _chat,
    completions.CompletionRequest: _completion,
    formats.ResponseFormat: lambda schema: schema | _format(("json_schema",), ()),
    formats.TextFormat: lambda schema: schema | _format(("name", "schema"), ("description", "strict")),
    items.InputImage: lambda schema: _with_url(schema, "image_url"),
    items.InputMessage: _item,
    items.InputVideo: lambda schema: _with_url(schema, "video_url"),
    responses.Create: _response_request,
    responses.CreateHttp: _response_http,
    tokens.TokenizeRequest: _tokenize,
}
