"""The address, the body and the protocol of a request, without I/O."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec
from attrs import frozen

from bench.load.http import Headers, HttpDialogue
from bench.load.messages import PATHS, Api, Target
from bench.load.plan import PlannedRequest
from bench.load.websocket import SocketDialogue

Dialogue = HttpDialogue | SocketDialogue
DEFAULT_PORT = 80


@frozen
class Address:
    """The address at which a server listens."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> bytes:
        """The value of the `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        authority = host if self.port == DEFAULT_PORT else f"{host}:{self.port}"
        return authority.encode("idna" if host.isascii() else "utf-8")


def parse_url(url: str, api: Api) -> Address:
    """Parse a server's URL: its root, its `/v1` or an endpoint; raises `ValueError` if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "ws"} or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a server without TLS; write http://host:port")
    return Address(parts.hostname, parts.port or DEFAULT_PORT, _path(parts, PATHS[api]))


def _path(parts: SplitResult, endpoint: str) -> str:
    path = parts.path.rstrip("/")
    if not path.endswith(endpoint):
        path = f"{path}/{endpoint}" if path.endswith("/v1") else f"{path}/v1/{endpoint}"
    return f"{path}?{parts.query}" if parts.query else path


def dialogue(target: Target, where: Address) -> Dialogue:
    """Return the protocol of a new connection."""
    headers: Headers = [(b"user-agent", b"espalier-bench")]
    if target.key:
        headers.append((b"authorization", f"Bearer {target.key}".encode()))
    kind = SocketDialogue if target.api == "responses-ws" else HttpDialogue
    return kind(where.authority, where.path.encode(), headers)


def body(target: Target, request: PlannedRequest) -> bytes:
    """Return the JSON body of a request."""
    fields: dict[str, object] = {"model": target.model, "temperature": 0.0}
    match target.api:
        case "chat":
            fields |= {"messages": [{"role": "user", "content": request.prompt}], "max_tokens": request.output_tokens}
        case "completions":
            fields |= {"prompt": request.prompt, "max_tokens": request.output_tokens}
        case "responses" | "responses-ws":
            fields |= {"input": request.prompt, "max_output_tokens": request.output_tokens, "store": False}
    if target.api == "responses-ws":
        fields |= {"type": "response.create"}
    else:
        fields |= {"stream": True}
    if target.api in {"chat", "completions"}:
        fields |= {"stream_options": {"include_usage": True}}
    if target.ignore_eos:
        fields |= {"ignore_eos": True}
    return msgspec.json.encode(fields)
