"""What HTTP clients get beside answers: errors and the list of models, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from attrs import frozen

from protocol.errors import RequestError, Unauthorized


@frozen
class Model:
    """One model that is served here."""

    id: str
    created: int  # seconds since 1970
    root: str
    max_model_len: int
    honours_seed: bool
    owned_by: str = "espalier"


def error_object(error: RequestError) -> dict[str, str | None]:
    """Return the object that OpenAI's clients look for under `error`."""
    return {"message": error.detail, "type": error_type(error), "param": error.param, "code": error.code}


def error_type(error: RequestError) -> str:
    """Return the coarse type by which OpenAI's clients tell errors apart."""
    if error.http_status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if error.fault == "client" else "server_error"


def error_body(error: RequestError) -> bytes:
    """Return the body of the HTTP answer that an error becomes."""
    return msgspec.json.encode({"error": error_object(error)})


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a client whether, how, and after how many seconds to ask again."""
    how = [(b"www-authenticate", b"Bearer")] if isinstance(error, Unauthorized) else []
    if error.retry_after_s is None:
        return [*how, (b"x-should-retry", b"false")]
    return [*how, (b"retry-after", b"%d" % error.retry_after_s), (b"x-should-retry", b"true")]


def models_body(models: Sequence[Model]) -> bytes:
    """Return the body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_listed(model) for model in models]})


def model_body(model: Model) -> bytes:
    """Return the body of `GET /v1/models/NAME`."""
    return msgspec.json.encode(_listed(model))


def _listed(model: Model) -> dict[str, object]:
    return {"object": "model", **msgspec.to_builtins(model)}
