"""What can be asked for by HTTP: each path's methods, who may use them, and what answers."""

from __future__ import annotations

from supervisor.gateway.http.routes import admin, completions, health, models, openapi, responses, tokens
from supervisor.gateway.http.routes.route import Handler, Route, options

__all__ = ["Handler", "Route", "find", "options"]

ROUTES: dict[str, Route] = {
    "*": Route({}, known=b"GET, HEAD, POST, OPTIONS"),
    "/health": Route({"GET": health.health}, open=True),
    "/ready": Route({"GET": health.ready}, open=True),
    "/metrics": Route({"GET": health.metrics}, admin=True),
    "/openapi.json": Route({"GET": openapi.openapi}),
    "/v1/models": Route({"GET": models.listed}),
    "/v1/chat/completions": Route({"POST": completions.CHAT}, reads=True),
    "/v1/completions": Route({"POST": completions.COMPLETIONS}, reads=True),
    "/v1/responses": Route({"GET": responses.upgrade, "POST": responses.answer}, reads=True),
    "/tokenize": Route({"POST": tokens.tokenize}, reads=True),
    "/detokenize": Route({"POST": tokens.detokenize}, reads=True),
    "/server_info": Route({"GET": admin.server_info}),
    "/model_info": Route({"GET": admin.model_info}),
    "/flush_cache": Route({"GET": admin.flush_cache, "POST": admin.flush_cache}, admin=True),
}
ALIASES = {"/get_server_info": "/server_info", "/get_model_info": "/model_info"}  # as SGLang called them before
ONE_MODEL = Route({"GET": models.one})


def find(path: str) -> Route | None:
    """Return what answers at a path, None if nothing does."""
    if path.startswith(models.PREFIX):
        return ONE_MODEL
    return ROUTES.get(ALIASES.get(path, path))
