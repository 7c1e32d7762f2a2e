"""Errors and the list of models, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from attrs import frozen

from protocol.errors import RequestError, Unauthorized
from protocol.messages.embedding import Pooling


@frozen
class EmbeddingProperties:
    """The properties of the vectors of a model, and the prompts that its authors put before texts."""

    dimensions: int
    pooling: Pooling
    normalised: bool
    is_matryoshka: bool  # whether vectors can have fewer dimensions
    matryoshka_dimensions: tuple[int, ...]  # the numbers of dimensions that they can have; empty: any
    prompts: tuple[str, ...]
    default_prompt: str | None


@frozen
class Model:
    """One model that this server serves."""

    id: str
    created: int  # seconds since 1970
    root: str
    max_model_len: int
    honours_seed: bool
    owned_by: str = "espalier"
    parent: str | None = None  # of an adapter: the model that it changes
    task: str = "generate"  # what it computes: answers, vectors (`embed`) or scores (`score`)
    embedding: EmbeddingProperties | None = None  # of a model of vectors, once an engine has been ready


def error_object(error: RequestError) -> dict[str, str | None]:
    """Return the value of `error` in the body of a failed request."""
    return {"message": error.detail, "type": error_type(error), "param": error.param, "code": error.code}


def error_type(error: RequestError) -> str:
    """Return OpenAI's coarse type of an error."""
    if error.http_status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if error.fault == "client" else "server_error"


def error_body(error: RequestError) -> bytes:
    """Return the body of the HTTP response for an error."""
    return msgspec.json.encode({"error": error_object(error)})


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the headers about a retry: whether, with which authentication, and after how many seconds."""
    challenge = [(b"www-authenticate", b"Bearer")] if isinstance(error, Unauthorized) else []
    if error.retry_after_s is None:
        return [*challenge, (b"x-should-retry", b"false")]
    return [*challenge, (b"retry-after", b"%d" % error.retry_after_s), (b"x-should-retry", b"true")]


def models_body(models: Sequence[Model]) -> bytes:
    """Return the body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_model_object(model) for model in models]})


def model_body(model: Model) -> bytes:
    """Return the body of `GET /v1/models/NAME`."""
    return msgspec.json.encode(_model_object(model))


def _model_object(model: Model) -> dict[str, object]:
    return {"object": "model", **msgspec.to_builtins(model)}
