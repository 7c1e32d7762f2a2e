"""JSON Schemas of answers; an answer may have more fields than its schema."""

from __future__ import annotations

from typing import cast

from protocol.errors import ERRORS_BY_CODE
from protocol.messages.embedding import Pooling
from protocol.messages.generation import FinishReason
from protocol.openapi.request_schemas import NULL, Schema

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _COUNT}
_REASON: Schema = {"enum": [*map(str, FinishReason), "tool_calls"]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _properties(schema: Schema) -> dict[str, Schema]:
    return cast("dict[str, Schema]", schema["properties"])


def _object_by_weights(**properties: Schema) -> Schema:
    """Return an object that may have the versions of its weights, too."""
    versions: Schema = {"weight_version": _TEXT, "weight_versions": _list(_object(version=_TEXT, tokens=_COUNT))}
    return _object(**properties) | {"properties": properties | versions}


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_SHARED: dict[str, Schema] = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": _USAGE}
_CHOICE: dict[str, Schema] = {"index": _COUNT, "logprobs": _nullable({"type": "object"}), "finish_reason": _REASON}
_CALLED = _object(name=_TEXT, arguments=_TEXT)
_CALL = _object(id=_TEXT, type={"const": "function"}, function=_CALLED)
_MESSAGE = _object(role={"const": "assistant"}, content=_nullable(_TEXT))
_MESSAGE["properties"] = {**_properties(_MESSAGE), "reasoning_content": _TEXT, "tool_calls": _list(_CALL)}
_PART = _object(type={"const": "output_text"}, text=_TEXT, annotations=_list({}), logprobs=_list({}))
_ITEM: dict[str, Schema] = {"id": _TEXT, "status": _TEXT}
_TEXT_ITEM = _object(type={"const": "message"}, role={"const": "assistant"}, content=_list(_PART), **_ITEM)
_REASONING_ITEM = _object(
    type={"const": "reasoning"},
    summary=_list({}),
    content=_list(_object(type={"const": "reasoning_text"}, text=_TEXT)),
    **_ITEM,
)
_CALL_ITEM = _object(type={"const": "function_call"}, call_id=_TEXT, name=_TEXT, arguments=_TEXT, **_ITEM)
_CALL_ITEM["properties"] = {**_properties(_CALL_ITEM), "namespace": _TEXT}
_OUTPUT_ITEM: Schema = {"anyOf": [_TEXT_ITEM, _REASONING_ITEM, _CALL_ITEM]}

_NUMBER: Schema = {"type": "number"}
_NUMBERS = _list(_NUMBER)
_PROMPT_USAGE = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
_EMBEDDING = _object(
    dimensions=_COUNT,
    pooling={"enum": [*map(str, Pooling)]},
    normalised={"type": "boolean"},
    is_matryoshka={"type": "boolean"},
    matryoshka_dimensions=_IDS,
    prompts=_list(_TEXT),
    default_prompt=_nullable(_TEXT),
)

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message=_TEXT,
            type={"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
            param=_nullable(_TEXT),
            code={"enum": sorted(ERRORS_BY_CODE)},
        )
    ),
    "ChatCompletion": _object(
        object={"const": "chat.completion"},
        choices=_list(_object_by_weights(message=_MESSAGE, **_CHOICE)),
        **_SHARED,
    ),
    "Completion": _object(
        object={"const": "text_completion"}, choices=_list(_object_by_weights(text=_TEXT, **_CHOICE)), **_SHARED
    ),
    "Response": _object_by_weights(
        id=_TEXT,
        object={"const": "response"},
        status={"enum": ["completed", "incomplete"]},
        created_at=_COUNT,
        model=_TEXT,
        output=_list(_OUTPUT_ITEM),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Embeddings": _object(
        object={"const": "list"},
        data=_list(_object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [_NUMBERS, _TEXT]})),
        model=_TEXT,
        usage=_PROMPT_USAGE,
    ),
    "Reranked": _object(
        id=_TEXT,
        model=_TEXT,
        results=_list(_object(index=_COUNT, relevance_score=_NUMBER)),
        usage=_PROMPT_USAGE,
        meta={"type": "object"},
    ),
    "Scores": _object(
        id=_TEXT,
        object={"const": "list"},
        created=_COUNT,
        model=_TEXT,
        data=_list(_object(index=_COUNT, object={"const": "score"}, score=_NUMBER)),
        usage=_PROMPT_USAGE,
    ),
    "Tokenized": _object(tokens=_IDS, count=_COUNT, max_model_len=_COUNT),
    "Detokenized": _object(text=_TEXT, prompt=_TEXT),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        parent=_nullable(_TEXT),
        root=_TEXT,
        max_model_len=_COUNT,
        honours_seed={"type": "boolean"},
        task={"enum": ["generate", "embed", "score"]},
        embedding=_nullable(_EMBEDDING),
    ),
    "Models": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
    "ModelInfo": _object(
        model_path=_TEXT,
        tokenizer_path=_TEXT,
        served_model_name=_TEXT,
        is_generation={"type": "boolean"},
        task=_TEXT,
        max_model_len=_COUNT,
    ),
    "ServerInfo": {"type": "object"},
    "Pool": _object(
        name=_TEXT,
        model=_TEXT,
        leg=_TEXT,
        priority={"type": "integer"},
        engines=_list(_object(name=_TEXT, up={"type": "boolean"}, busy=_COUNT, slots=_COUNT)),
        up=_COUNT,
        busy=_COUNT,
        slots=_COUNT,
        waiting=_COUNT,
    ),
    "Pools": _object(pools=_list({"$ref": "#/components/schemas/Pool"}), grids=_list({"type": "object"})),
}
