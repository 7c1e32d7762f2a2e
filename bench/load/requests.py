"""A request on the wire, as pure data: its body, and the protocol that carries it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec
from attrs import frozen

from bench.load.http import Headers, HttpDialogue
from bench.load.messages import PATHS, Api, Target
from bench.load.plan import PlannedRequest
from bench.load.websocket import SocketDialogue

Dialogue = HttpDialogue | SocketDialogue
CANCEL = b'{"type":"response.cancel"}'
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@frozen
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    path: str

    @property
    def authority(self) -> bytes:
        """What a `host` header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.tls else 80)
        return (host if usual else f"{host}:{self.port}").encode("idna" if host.isascii() else "utf-8")


def parse_url(url: str, api: Api) -> Address:
    """Read a server's URL: its root, its `/v1`, or the whole of an endpoint's; raises `ValueError` at what is none."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a server; say http://host:port or https://host")
    port = parts.port or PORTS[parts.scheme]
    return Address(parts.hostname, port, parts.scheme in {"https", "wss"}, _path(parts, PATHS[api]))


def _path(parts: SplitResult, endpoint: str) -> str:
    path = parts.path.rstrip("/")
    if not path.endswith(endpoint):
        path = f"{path}/{endpoint}" if path.endswith("/v1") else f"{path}/v1/{endpoint}"
    return f"{path}?{parts.query}" if parts.query else path


def dialogue(target: Target, where: Address) -> Dialogue:
    """Return a new connection's dialogue."""
    headers: Headers = [(b"user-agent", b"espalier-bench")]
    if target.key:
        headers.append((b"authorization", f"Bearer {target.key}".encode()))
    kind = SocketDialogue if target.api == "responses-ws" else HttpDialogue
    return kind(where.authority, where.path.encode(), headers)


def body(target: Target, ask: PlannedRequest) -> bytes:
    """Return a request's body."""
    said: dict[str, object] = {"model": target.model}
    match target.api:
        case "chat":
            said |= {"messages": [{"role": "user", "content": ask.prompt}], "max_tokens": ask.output_tokens}
        case "completions":
            said |= {"prompt": ask.prompt, "max_tokens": ask.output_tokens}
        case "responses":
            said |= {"input": ask.prompt, "max_output_tokens": ask.output_tokens, "store": False}
        case "responses-ws":
            said |= {"type": "response.create", "input": ask.prompt, "max_output_tokens": ask.output_tokens}
            said |= {"store": False}
    if target.api != "responses-ws":
        said |= {"stream": True}
    if target.api in {"chat", "completions"}:
        running = {"continuous_usage_stats": True} if target.running_usage else {}
        said |= {"stream_options": {"include_usage": True, **running}}
    if target.temperature is not None:
        said |= {"temperature": target.temperature}
    if target.ignore_eos:
        said |= {"ignore_eos": True}
    return msgspec.json.encode(said | msgspec.json.decode(target.extra, type=dict[str, object]))
