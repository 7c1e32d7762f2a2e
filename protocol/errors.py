"""The closed taxonomy of errors, each with its fault, its HTTP status, and its way to a client or over a link.

A `RequestError` is about one request and crosses links as its code and a sentence; an `ActorError` is about an actor
and ends in a supervisor. Any other exception is a bug.

The docstring of a `RequestError` is the row of its code in `docs/protocol.md`: the event, then the remedy. Clients'
programs depend on `code`, `http_status` and `close_code`, so these stay when sentences change.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["client", "server"]
"""The fault behind a `RequestError`, as a client sees it; `server` covers the peer, the operator and bugs."""


class EspalierError(Exception):
    """Base of every error that this system raises on purpose."""


class RequestError(EspalierError):
    """One request failed; `str(error)` is a sentence for its asker and for the log.

    `param` names the field of the request that is at fault, as the client spelled it. `client_detail` is the sentence
    for a client that may not know the cluster from inside: it names no node, engine or address.
    """

    code: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = "server"
    http_status: ClassVar[int] = 500
    close_code: ClassVar[int | None] = None  # set where the error ends a WebSocket connection
    of_gateway: ClassVar[bool] = False  # sent only by a gateway to its own client; crosses no link
    retry_after_s: int | None = None  # None: not worth retrying; an instance may override it
    outline: ClassVar[str | None] = None  # the `client_detail` of a class whose sentences may name what is inside

    def __init__(
        self,
        detail: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        client_detail: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.client_detail = client_detail or self.outline or detail
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields of a line in a log: the sentence as the `reason`, where a client may get another one."""
        return {} if self.client_detail == self.detail else {"reason": self.detail}


class InternalError(RequestError):
    """A bug of this server, logged where it occurred; report it with the request's id."""

    outline = "the server made a mistake; its log has the details"

    close_code = 1011


class AnswerInvalid(RequestError):
    """The model's answer does not keep to the JSON schema of its request; change the schema or the prompt."""

    code = "answer_invalid"
    of_gateway = True


class BadRequest(RequestError):
    """The request itself is wrong; correct the field named by `param`."""

    code = "invalid_request"
    fault = "client"
    http_status = 400


class Unsupported(BadRequest):
    """The request asks for something that this server or its engine does not do; leave it out."""

    code = "unsupported_parameter"


class ContextTooLong(BadRequest):
    """Prompt and answer together exceed what the model can hold; shorten one of them."""

    code = "context_length_exceeded"


class PreviousResponseNotFound(BadRequest):
    """The response to continue is not in this connection's memory; send the whole conversation."""

    code = "previous_response_not_found"
    of_gateway = True


class StreamLimitReached(BadRequest):
    """The connection has as many lanes as it may; use one of them, or open another connection."""

    code = "websocket_stream_limit_reached"
    of_gateway = True


class InvalidStreamId(BadRequest):
    """The `stream_id` is not a valid name of a lane; send 1 to 256 of A-Z, a-z, 0-9, `_`, `.` and `-`."""

    code = "invalid_stream_id"
    of_gateway = True


class ConnectionExpired(BadRequest):
    """The connection has reached its maximum age; open a new one."""

    code = "websocket_connection_limit_reached"
    of_gateway = True
    close_code = 1000


class EngineRefused(BadRequest):
    """The engine found the request wrong after it had been admitted; correct what the message names."""

    code = "engine_refused"


class Unauthorized(RequestError):
    """The request has no key that this server accepts; send `Authorization: Bearer KEY`."""

    code = "invalid_api_key"
    of_gateway = True
    fault = "client"
    http_status = 401
    close_code = 1008


class Forbidden(RequestError):
    """The `Host` is not a name of this server, or the `Origin` or the key may not do this; ask the operator."""

    code = "forbidden"
    of_gateway = True
    fault = "client"
    http_status = 403
    close_code = 1008


class NotFound(RequestError):
    """There is nothing at this path; `GET /openapi.json` lists all paths."""

    code = "not_found"
    of_gateway = True
    fault = "client"
    http_status = 404


class ModelNotFound(NotFound):
    """No model of this name is served here; `GET /v1/models` lists the served models."""

    code = "model_not_found"


class AdapterNotLoaded(RequestError):
    """The engine does not have the LoRA adapter; `GET /v1/models` lists the loaded ones."""

    code = "adapter_not_loaded"
    fault = "client"
    http_status = 404


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method; the header `allow` lists its methods."""

    code = "method_not_allowed"
    of_gateway = True
    fault = "client"
    http_status = 405


class TooLarge(RequestError):
    """The body, the head, the WebSocket message, an image or a video is larger than this server reads; send less."""

    code = "too_large"
    fault = "client"
    http_status = 413
    close_code = 1009


class UpgradeRequired(RequestError):
    """A `GET` of this path opens a WebSocket; connect as one, or send a `POST`."""

    code = "upgrade_required"
    of_gateway = True
    fault = "client"
    http_status = 426


class SlowClient(RequestError):
    """The client reads too slowly, and its backlog is full; read faster, or request less at once."""

    code = "slow_client"
    of_gateway = True
    fault = "client"
    http_status = 408
    close_code = 1013


class RateLimited(RequestError):
    """The key has made more requests than its rate allows; try again later."""

    code = "rate_limit_exceeded"
    of_gateway = True
    fault = "client"
    http_status = 429
    retry_after_s = 1


class ConcurrencyLimited(RequestError):
    """The key has as many open requests or connections as it may; end one, or wait until one has ended."""

    code = "concurrency_limit_exceeded"
    of_gateway = True
    fault = "client"
    http_status = 429
    retry_after_s = 1


class UnsupportedMediaType(RequestError):
    """The body is not JSON, or it is compressed; send uncompressed `content-type: application/json`."""

    code = "unsupported_media_type"
    of_gateway = True
    fault = "client"
    http_status = 415


class Overloaded(RequestError):
    """Everything that could serve the request is busy; try again later."""

    code = "overloaded"
    http_status = 503
    retry_after_s = 1


class NotReady(RequestError):
    """Something that the request needs is not available yet; try again later."""

    code = "not_ready"
    outline = "something that the request needs is not ready yet; the operator of this server knows what"
    http_status = 503
    retry_after_s = 2


class Draining(RequestError):
    """The server is shutting down and admits nothing new; connect again."""

    code = "draining"
    outline = "the server is shutting down"
    http_status = 503
    close_code = 1012
    retry_after_s = 1


class LinkLost(RequestError):
    """The link to the node that was answering was lost; try again."""

    code = "link_lost"
    outline = "the link to the node that was answering was lost"
    http_status = 503
    retry_after_s = 1


class LinkReplaced(LinkLost):
    """A newer link to the answering node replaced the link of the answer; try again."""

    code = "link_replaced"


class EngineLost(RequestError):
    """The answering engine died, or did not release its slot; try again."""

    code = "engine_lost"
    outline = "the engine that was answering was lost"
    http_status = 503
    retry_after_s = 1


class ActorLost(RequestError):
    """The actor that was answering ended; try again."""

    code = "actor_lost"
    outline = "the part of the server that was answering ended"
    http_status = 503
    retry_after_s = 1


class HandOffFailed(RequestError):
    """The KV cache did not get from the prefill to the decode; try again."""

    code = "hand_off_failed"
    outline = "the KV cache did not get from the prefill to the decode"
    http_status = 503
    retry_after_s = 1


class DeadlineExceeded(RequestError):
    """The answer, its first token or its next one did not come in time; try again."""

    code = "deadline_exceeded"
    http_status = 503
    retry_after_s = 1


class Preempted(DeadlineExceeded):
    """The engine ran out of memory and continued other answers in place of this one; try again."""

    code = "preempted"


class AskerLeft(RequestError):
    """The asker left, so the answer was ended; this error has no reader."""

    code = "left"
    fault = "client"
    http_status = 408


class ActorError(EspalierError):
    """An actor failed; it ends in a supervisor and never crosses a link."""

    is_planned: ClassVar[bool] = False  # whether the actor ends on purpose, to be started again


class EngineStuck(ActorError):
    """The engine did not release a slot within its deadline, or did not answer its canary."""


class EngineRenewed(ActorError):
    """An operation ends this life of the engine: the next one differs from it on purpose."""

    is_planned = True


class EngineDied(ActorError):
    """The engine's process ended on its own; this ends its actor, and its requests end with `EngineLost`."""


class PeerLost(ActorError):
    """The other end of a link went away."""


class PeerViolation(ActorError):
    """The other end of a link broke the protocol."""


class LocalViolation(ActorError):
    """This end of a link was about to break the protocol, which is a bug of this node."""


class PeerRefused(ActorError):
    """One end of a link refused the other."""


class TooManyInternalErrors(ActorError):
    """An actor failed more requests by bugs of its own than its limit allows."""


class StartFailed(ActorError):
    """A child could not start; the sentence gives the operator's remedy."""


def _subclasses(cls: type[RequestError]) -> list[type[RequestError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _subclasses(child))]


ERRORS_BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls for cls in _subclasses(RequestError) if cls is not RequestError
}


def from_code(code: str, detail: str, param: str | None = None) -> RequestError:
    """Return the error of a code from a link; an unknown code becomes an `InternalError`."""
    return ERRORS_BY_CODE.get(code, InternalError)(detail, param=param)
