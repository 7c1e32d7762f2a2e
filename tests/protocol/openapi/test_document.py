"""The OpenAPI document has every route, and its schemas accept exactly the requests that the parsers accept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.dialects import chat, completions, embeddings, operations, reranking, responses, tokens
from protocol.dialects.http import error_body
from protocol.dialects.media_urls import LocatesMedia
from protocol.errors import ERRORS_BY_CODE, ModelNotFound, RequestError
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF, OPERATIONS
from protocol.openapi.document import document
from supervisor.gateway.http.routes import ROUTES
from supervisor.version import version
from tests.protocol.test_pins import instance
from tests.rig.embedded_texts import Computing, bert_model, served_embeddings
from tests.rig.gateway import chat as chat_body
from tests.rig.gateway import gateway_rig, head, post
from tests.system.fuzz import bodies
from tests.system.fuzz.values import hostile_value

DOCUMENT = json.loads(msgspec.json.encode(document("0.1.0", ROUTES.operations, models=["tiny"])))
SCHEMAS = DOCUMENT["components"]["schemas"]
KINDS = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
PARSERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": chat.parse,
    "/v1/completions": completions.parse,
    "/v1/responses": responses.parse_http,
    "/tokenize": tokens.parse_tokenize,
    "/detokenize": tokens.parse_detokenize,
    "/v1/embeddings": embeddings.parse,
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), reranking.parse_rerank),
    **dict.fromkeys(("/v1/score", "/score"), reranking.parse_score),
    **{
        row.path: partial(operations.parse, row)
        for row in OPERATIONS
        if row.path is not None and row.has_fields and not row.takes_file
    },
}
# Mistakes that a schema cannot express: between fields, the depth and size of JSON, and numbers that are too large.
BEYOND = re.compile(
    "cannot stand beside|must be at least n |must be at most max_|differs from|cannot be streamed|have at most 128"
    "|levels deep|as JSON|an object, or a string|finite|too large|min_tokens|must hold at most 1048576"
    "|must not contain|user name|no host|its whole path|behind its path|no URL that can be read|a safetensors file"
    "|must have at most 8192 characters|images and videos; a request can have|needs the last message|more than 64 bits"
    "|the id of (?:no|an) earlier call|the name of two tools|none of the tools|needs tools|JSON text of an object"
    "|must hold one text, or"
    "|no name of a function|the result of a call|messages of (?:a tool|the assistant) can have"
)


def valid(schema: Any, value: Any) -> bool:
    """Return whether a value is valid by a schema, by the keywords that these schemas use."""
    if "$ref" in schema:
        return valid(SCHEMAS[schema["$ref"].rpartition("/")[2]], value)
    return all(CHECKS[name](schema, value) for name in schema if name not in ANNOTATIONS)


ANNOTATIONS = {"description", "contentMediaType", "contentEncoding", "then", "else", "example", "examples"}
CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda schema, value: type(value) in KINDS[schema["type"]],
    "enum": lambda schema, value: any(same(value, each) for each in schema["enum"]),
    "const": lambda schema, value: same(value, schema["const"]),
    "anyOf": lambda schema, value: any(valid(each, value) for each in schema["anyOf"]),
    "oneOf": lambda schema, value: sum(valid(each, value) for each in schema["oneOf"]) == 1,
    "not": lambda schema, value: not valid(schema["not"], value),
    "if": lambda schema, value: valid(schema.get("then" if valid(schema["if"], value) else "else", {}), value),
    "minimum": lambda schema, value: is_no(value, int, float) or value >= schema["minimum"],
    "maximum": lambda schema, value: is_no(value, int, float) or value <= schema["maximum"],
    "exclusiveMinimum": lambda schema, value: is_no(value, int, float) or value > schema["exclusiveMinimum"],
    "minLength": lambda schema, value: is_no(value, str) or len(value) >= schema["minLength"],
    "maxLength": lambda schema, value: is_no(value, str) or len(value) <= schema["maxLength"],
    "pattern": lambda schema, value: is_no(value, str) or bool(re.fullmatch(schema["pattern"][1:-1], value)),
    "items": lambda schema, value: is_no(value, list) or all(valid(schema["items"], each) for each in value),
    "contains": lambda schema, value: is_no(value, list) or any(valid(schema["contains"], each) for each in value),
    "minItems": lambda schema, value: is_no(value, list) or len(value) >= schema["minItems"],
    "maxItems": lambda schema, value: is_no(value, list) or len(value) <= schema["maxItems"],
    "maxProperties": lambda schema, value: is_no(value, dict) or len(value) <= schema["maxProperties"],
    "required": lambda schema, value: is_no(value, dict) or value.keys() >= set(schema["required"]),
    "propertyNames": lambda schema, value: (
        is_no(value, dict) or all(valid(schema["propertyNames"], each) for each in value)
    ),
    "properties": lambda schema, value: (
        is_no(value, dict)
        or all(valid(schema["properties"][key], value[key]) for key in value if key in schema["properties"])
    ),
    "additionalProperties": lambda schema, value: (
        is_no(value, dict) or all(additional(schema, key, value[key]) for key in value)
    ),
}


def same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def is_no(value: object, *kinds: type) -> bool:
    return type(value) not in kinds


def additional(schema: Any, key: str, value: Any) -> bool:
    rest = schema["additionalProperties"]
    return key in schema.get("properties", {}) or (rest is not False and valid(rest, value))


def asked(path: str) -> Any:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]


# The document -----------------------------------------------------------------------------------


def test_every_route_is_in_the_document_with_each_of_its_paths() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {
        (route.operation.method, path) for route in ROUTES.routes for path in (route.operation.path, *route.aliases)
    }


def test_every_reference_resolves_and_operation_ids_are_unique() -> None:
    def look(schema: object) -> None:
        if isinstance(schema, list):
            for each in schema:
                look(each)
        elif isinstance(schema, dict):
            if isinstance(name := schema.get("$ref"), str):
                assert name.rpartition("/")[2] in SCHEMAS
            for each in schema.values():
                look(each)

    look(DOCUMENT)
    assert len({each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()}) == sum(
        map(len, DOCUMENT["paths"].values())
    )


def test_the_document_names_required_keys_and_known_models() -> None:
    open_one: Any = document("0.1.0", ROUTES.operations, keys_wanted=False)
    assert open_one["paths"]["/v1/models"]["get"]["security"] == [{}, {"bearer": []}]
    assert DOCUMENT["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}]
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    assert SCHEMAS["ChatRequest"]["properties"]["model"] == {"type": "string", "enum": ["tiny"]}
    assert "enum" not in open_one["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert DOCUMENT["info"]["version"] == "0.1.0"


def test_every_status_of_an_error_is_documented_with_the_error_object() -> None:
    statuses = {cls.http_status for cls in ERRORS_BY_CODE.values()} - {405}  # which no operation has
    documented = {
        status for path in DOCUMENT["paths"].values() for each in path.values() for status in each["responses"]
    }
    assert statuses <= {int(status) for status in documented}
    for error in (ModelNotFound("no such model", param="model"), *(cls("x") for cls in ERRORS_BY_CODE.values())):
        assert valid(SCHEMAS["Error"], json.loads(error_body(error)))


# Served ---------------------------------------------------------------------------------


async def test_the_document_is_served(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        served = (await client.ask(head("GET", "/openapi.json"))).json
        assert served == json.loads(
            msgspec.json.encode(document(version(), ROUTES.operations, models=["tiny"], keys_wanted=False))
        )


async def operate(request: Message, _: str | None) -> dict[str, Message | RequestError]:
    """Return the outcome of an operation by one engine that does nothing."""
    await trio.lowlevel.checkpoint()
    return {"main/tiny-0": instance(OPERATION_OF[type(request)].result, count(1), full=False)}


async def test_every_route_answers_as_it_is_documented(rather_slow: MockClock) -> None:
    worth_more_than_the_example = {
        "/v1/chat/completions": chat_body("n=4", logprobs=True, n=2, max_tokens=4),
        "/v1/completions": {"model": "tiny", "prompt": "n=4", "logprobs": 1},
        "/v1/responses": {"model": "tiny", "input": "n=4", "max_output_tokens": 2},
        "/tokenize": {"prompt": "oak"},
        "/detokenize": {"tokens": [5, 6]},
    }
    embedding, run = served_embeddings("tiny", Computing(), bert_model())
    async with gateway_rig() as rig, trio.open_nursery() as nursery:
        await nursery.start(run)
        rig.gateway.administration = evolve(rig.gateway.administration, server_info=dict, operate=operate)
        client, answering = await rig.client(), rig.gateway.runner.served
        # A file is of one engine, and its bytes are asked for piece by piece: `test_engine_files.py` has that route.
        for operation in (each for each in ROUTES.operations if each.answer and each.path != "/engine_files/{name}"):
            path = operation.path.replace("{model}", "tiny")
            body = worth_more_than_the_example.get(path, operation.example)
            computes = operation.request in {
                embeddings.EmbeddingsRequest,
                reranking.RerankRequest,
                reranking.ScoreRequest,
            }
            rig.gateway.runner.served = {"tiny": embedding} if computes else answering
            asked = head(operation.method, path) if operation.request is None else post(body, path)
            reply = await client.ask(asked)
            assert reply.status == 200, f"{operation.method} {path} answers {reply.body!r}"
            media = reply.headers["content-type"].partition(";")[0]
            assert media in operation.answer, f"{operation.method} {path} answers {media}, which its row does not say"
            schema = json.loads(msgspec.json.encode(operation.answer[media]))
            right = valid(schema, reply.json if media == "application/json" else reply.body.decode())
            assert right, (
                f"{operation.method} {path} answers {reply.body!r}, which the schema of its row refuses: {schema}"
            )
        nursery.cancel_scope.cancel()


# Requests --------------------------------------------------------------------------


def test_the_parser_of_every_request_is_tried() -> None:
    with_body = {operation.path for operation in ROUTES.operations if operation.request is not None}
    assert PARSERS.keys() == with_body, "PARSERS of this file has the parser of each route with a body, by its path"


@pytest.mark.parametrize("path", PARSERS)
def test_the_examples_are_valid_requests(path: str) -> None:
    example = asked(path)["example"]
    PARSERS[path](json.dumps(example).encode())
    assert valid(asked(path)["schema"], example)


def test_the_examples_of_urls_are_valid() -> None:
    url = SCHEMAS["ImageUrl"]["properties"]["url"]
    assert len(url["examples"]) == 3
    for example in url["examples"]:
        assert valid(url, example)
        assert LocatesMedia().mistake(example) is None


@pytest.mark.parametrize("path", PARSERS)
def test_the_parser_and_the_schema_agree_about_every_request(path: str) -> None:
    """Thousands of valid and invalid requests."""
    rng, schema, counts = Random(path), asked(path)["schema"], [0, 0]
    operation = next(each for each in ROUTES.operations if (each.path, each.method) == (path, "POST"))
    for _ in range(2000):
        body = bodies.body(rng, operation)
        for _ in range(rng.choice((0, 1, 1, 2))):
            if rng.random() < 0.3:
                body[rng.choice([*SCHEMAS[schema["$ref"].rpartition("/")[2]]["properties"]])] = hostile_value(rng)
            else:
                bodies.spoil(rng, body)
        try:
            data = json.dumps(deepcopy(body), allow_nan=False, ensure_ascii=False).encode()
        except ValueError:  # not representable as JSON
            continue
        if "model" in body and body["model"] not in ("tiny", None):
            body["model"] = "tiny"
            data = json.dumps(body).encode()
        try:
            PARSERS[path](data)
        except RequestError as error:
            refused = error.detail
        else:
            refused = ""
        counts[not refused] += 1
        right = valid(schema, body) and not BEYOND.search(refused)
        assert right != bool(refused), (json.dumps(body), refused)
    assert min(counts) > 100
