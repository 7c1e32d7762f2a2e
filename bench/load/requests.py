"""The address, the body and the protocol of a request, without I/O."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import msgspec
from attrs import define, field, frozen

from bench.load.answers import Answer
from bench.load.http import Headers, HttpDialogue
from bench.load.messages import PATHS, Api, Target
from bench.load.plan import PlannedRequest
from bench.load.websocket import SocketDialogue

Dialogue = HttpDialogue | SocketDialogue
CANCEL = b'{"type":"response.cancel"}'
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@frozen
class Address:
    """The address at which a server listens."""

    host: str
    port: int
    tls: bool
    path: str

    @property
    def authority(self) -> bytes:
        """The value of the `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = self.port == (443 if self.tls else 80)
        return (host if default else f"{host}:{self.port}").encode("idna" if host.isascii() else "utf-8")


def parse_url(url: str, api: Api) -> Address:
    """Parse a server's URL: its root, its `/v1` or an endpoint; raises `ValueError` if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a server; write http://host:port or https://host")
    port = parts.port or PORTS[parts.scheme]
    return Address(parts.hostname, port, parts.scheme in {"https", "wss"}, _path(parts, PATHS[api]))


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


@define
class History:
    """The turns of a conversation so far: their texts, or the name of the last response if the server keeps them."""

    messages: list[dict[str, str]] = field(factory=list)
    response_id: str | None = None

    def add(self, prompt: str, answer: Answer) -> None:
        """Add a turn that was answered."""
        self.messages.append({"role": "user", "content": prompt})
        self.messages.append({"role": "assistant", "content": "".join(answer.parts or ())})
        self.response_id = answer.response_id


def body(target: Target, request: PlannedRequest, history: History | None = None) -> bytes:
    """Return the JSON body of a request."""
    fields: dict[str, object] = {"model": target.model}
    before = [] if history is None else history.messages
    messages = [*before, {"role": "user", "content": request.prompt}]
    match target.api:
        case "chat":
            fields |= {"messages": messages, "max_tokens": request.output_tokens}
        case "completions":
            fields |= {"prompt": request.prompt, "max_tokens": request.output_tokens}
        case "responses":
            fields |= {"input": messages if before else request.prompt}
            fields |= {"max_output_tokens": request.output_tokens, "store": False}
        case "responses-ws":
            fields |= {"type": "response.create", "input": request.prompt, "max_output_tokens": request.output_tokens}
            fields |= {"store": False}
            if history is not None and history.response_id is not None:
                fields |= {"previous_response_id": history.response_id}
    if target.api != "responses-ws":
        fields |= {"stream": True}
    if target.api in {"chat", "completions"}:
        running = {"continuous_usage_stats": True} if target.running_usage else {}
        fields |= {"stream_options": {"include_usage": True, **running}}
    if target.temperature is not None:
        fields |= {"temperature": target.temperature}
    if target.ignore_eos:
        fields |= {"ignore_eos": True}
    return msgspec.json.encode(fields | msgspec.json.decode(target.extra, type=dict[str, object]))
