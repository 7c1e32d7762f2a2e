"""Malformed HTTP."""

from __future__ import annotations

from random import Random

from protocol.openapi.document import Operation
from supervisor.gateway.http.routes import ROUTES, RouteTable
from tests.system.fuzz import bodies
from tests.system.fuzz.bodies import mutated
from tests.system.fuzz.values import LONG, PIECES, corrupted, hostile_value, text


def attacked(routes: RouteTable) -> tuple[Operation, ...]:
    """Return every operation of a server, and some methods that no route names."""
    return (
        *routes.operations,
        Operation("OPTIONS", "*", "The methods of the server.", {}),
        Operation("OPTIONS", "/v1/models", "The methods of a path.", {}),
        Operation("HEAD", "/health", "The head of a GET.", {}),
    )


OPERATIONS = attacked(ROUTES)
METHODS = (
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "get", "G", "QUERY",
    "x" * 300, "M-SEARCH", "GE\x00T", "",
)  # fmt: skip
TARGETS = (
    "/", "//", "*", "?", "/?a", "/..", "/../../etc/passwd", "/%2e%2e/health", "/%00", "/%", "/%zz", "/v1/models/",
    "/v1/models/%74iny", "/v1/models/tiny/", "/v1/models/%ff%fe", "/v1/models/%0d%0aset-cookie:a", "/v1//models",
    "/V1/MODELS", "/health;a=b", "/health#a", "/health?", "/health?a=b&a=b", "/model_info?model=tiny",
    "/model_info?model=", "/model_info?model=%ff", "/model_info?" + "&".join(["model=tiny"] * 99),
    "http://127.0.0.1/health", "https://127.0.0.1:1/v1/models", "http://", "http://[", "http://[::1]/health",
    "http://a@b/health", "ftp://x/health", "127.0.0.1:80", "/v1/responses?model=tiny", "/admin", "/admin/", "/admin/x",
    "/metrics/", "/docs", "/" + "a" * 2_000, "/" + "a" * 40_000, "/\x80\xff", "/a b", "/\t", "\\health",
)  # fmt: skip
FRAMING = (
    ("content-length", "-1"), ("content-length", "+5"), ("content-length", "5, 5"), ("content-length", "5, 6"),
    ("content-length", "0x5"), ("content-length", "5 "), ("content-length", ""), ("content-length", "1e3"),
    ("content-length", "9" * 15), ("content-length", "9" * 25), ("content-length", "9" * 5000),
    ("content-length", "4194305"), ("content-length", "4194304"), ("content-length", "\u0663".encode().decode("latin-1")),
    ("transfer-encoding", "chunked"), ("transfer-encoding", "CHUNKED"), ("transfer-encoding", "gzip, chunked"),
    ("transfer-encoding", "chunked, chunked"), ("transfer-encoding", "identity"), ("transfer-encoding", " chunked"),
    ("transfer-encoding", "xchunked"), ("transfer-encoding", "chunked;q=1"), ("transfer-encoding", "\x0bchunked"),
    ("transfer-encoding", ""), ("content-encoding", "gzip"), ("content-encoding", "identity"),
)  # fmt: skip
HEADERS = (
    ("expect", "100-continue"), ("expect", "100-Continue, x"), ("expect", "pigs"), ("connection", "close"),
    ("connection", "keep-alive, upgrade"), ("connection", "x" * 500), ("upgrade", "h2c"), ("upgrade", "websocket"),
    ("host", ""), ("host", "evil.example"), ("host", "127.0.0.1:99999"), ("host", "["), ("host", "127.0.0.1\t"),
    ("origin", "null"), ("origin", "http://evil.example"), ("origin", "http://127.0.0.1:1"), ("origin", "\xff"),
    ("origin", "http://["), ("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-origin"),
    ("access-control-request-method", "POST"), ("access-control-request-headers", "a\x01b"),
    ("authorization", "Bearer"), ("authorization", "Bearer \xff"), ("authorization", "Bearer " + "k" * 3_000),
    ("authorization", "Basic ="), ("authorization", "bearer a b c"), ("x-api-key", "k"), ("api-key", "\x80"),
    ("x-request-id", "a\r\nset-cookie: b=c"), ("x-request-id", "a\nb"), ("x-request-id", "a\rb"), ("x-request-id", "\xff"),
    ("x-request-id", "i" * 128), ("x-request-id", "i" * 129), ("x-request-id", "%0d%0a"), ("x-request-id", "a b"),
    ("content-type", "text/plain"), ("content-type", "application/json; charset=utf-16"), ("content-type", "/"),
    ("content-type", "application/x-www-form-urlencoded"), ("content-type", "multipart/form-data; boundary=x"),
    ("content-type", "application/json, application/json"), ("content-type", ";;;"), ("content-type", "\xff/\xfe"),
    ("accept", "text/event-stream"), ("accept-encoding", "gzip;q=0"), ("te", "trailers"), ("trailer", "x"),
    ("sec-websocket-key", "x"), ("cookie", "a=" + "b" * 8_000), ("x" * 300, "y"), ("", "empty"), ("a b", "space"),
    ("a:b", "colon"), ("\xff", "high"), (":authority", "x"), ("x-forwarded-for", "127.0.0.1"), ("x", "\0"),
    ("x", "\x7f"), ("if-none-match", "*"), ("range", "bytes=0-0"), ("max-forwards", "0"),
)  # fmt: skip
VERSIONS = ("HTTP/1.1",) * 12 + (
    "HTTP/1.0",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/2.0",
    "HTTP/1.2",
    "HTTP/1.10",
    "http/1.1",
    "",
)
WHOLE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    b"GET /health\r\n",
    b"GET /health\r\n\r\n",
    b"\r\n" * 2_000,
    b"\r\n\r\nGET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"\0" * 100,
    b"\xff" * 70_000,
    b"A" * 70_000,
    b"GET /health HTTP/1.1\nhost: 127.0.0.1\n\n",
    b"GET /health HTTP/1.1\rhost: 127.0.0.1\r\r",
    b"GET  /health  HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b" GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n host: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: a\r\n b\r\n\tc\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost : 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 3_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"".join(b"x%d: y\r\n" % at for at in range(900)) + b"\r\n",
    b"\x05\x01\0",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n",
)


def head(method: str, target: str, headers: list[tuple[str, str]], version: str = "HTTP/1.1") -> bytes:
    lines = [f"{method} {target} {version}".rstrip(" ")] + [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def posted(path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """Return a request whose framing is right."""
    given = [("host", "127.0.0.1"), ("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    return head("POST", path, given) + body


def chunked(rng: Random, body: bytes) -> bytes:
    """Return a body in chunks, which may lie about their sizes."""
    out = b""
    while body:
        size = rng.choice((1, 2, 7, 4_000, len(body)))
        piece, body = body[:size], body[size:]
        extension = rng.choice((b"",) * 6 + (b";a=b", b";" + b"x" * 5_000, b" ;a", b"; a=\xff"))
        out += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        if rng.random() < 0.04:
            out += rng.choice(CHUNKS)
    return out + rng.choice(
        (b"0\r\n\r\n",) * 8 + (b"", b"0\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\n: y\r\n\r\n", b"00000\r\n\r\n")
    )


CHUNKS = (
    b"ffffffffffffffff\r\na\r\n", b"-1\r\na\r\n", b"0x1\r\na\r\n", b"+1\r\na\r\n", b"g\r\n", b"\r\n", b"5\r\nab\r\n",
    b"1\r\nabc\r\n", b"f" * 17 + b"\r\n", b"f" * 5_000 + b"\r\n", b"1\na\n", b"1 \r\na\r\n", b"0;\r\n", b"7fffffff\r\na\r\n",
)  # fmt: skip


def request(rng: Random) -> bytes:
    """Return one request with an oddity or some."""
    operation = rng.choice(OPERATIONS)
    method, target = operation.method, operation.path.replace("{model}", "tiny")
    version, headers = "HTTP/1.1", [("host", "127.0.0.1")]
    body = b"" if operation.request is None else mutated(rng, bodies.body(rng, operation))
    if rng.random() < 0.05:
        body = text(hostile_value(rng))
    framing = [("content-length", str(len(body)))] if body else []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        match rng.randrange(8):
            case 0:
                method = rng.choice(METHODS)
            case 1:
                target = rng.choice(TARGETS)
            case 2:
                version = rng.choice(VERSIONS)
            case 3:
                framing = [*framing, rng.choice(FRAMING)] if rng.random() < 0.5 else [rng.choice(FRAMING)]
            case 4:
                framing, body = [("transfer-encoding", "chunked")], chunked(rng, body)
            case 5 if rng.random() < 0.3:
                headers = [] if rng.random() < 0.5 else headers * 2
            case _:
                headers.append(rng.choice(HEADERS))
    rest = headers + framing
    rng.shuffle(rest)
    return head(method, target, rest, version) + body


def raw(rng: Random) -> list[bytes]:
    """Return the bytes of one connection, in the pieces in which they are sent."""
    kind = rng.random()
    if kind < 0.06:
        data = rng.choice(WHOLE)
    elif kind < 0.08:
        data = rng.randbytes(rng.choice((1, 10, 100, 5_000)))
    elif kind < 0.085:
        data = posted("/v1/completions", b"x" * (5 * LONG))
    elif kind < 0.2:
        data = b"".join(request(rng) for _ in range(rng.choice((2, 2, 3, 9))))  # nobody waits for answers here
    else:
        data = request(rng)
    if rng.random() < 0.3:
        data = corrupted(rng, data)
    if rng.random() < 0.1:
        data += rng.choice(PIECES)
    return pieces(rng, data)


def pieces(rng: Random, data: bytes) -> list[bytes]:
    """Return bytes as the network may deliver them."""
    if len(data) < 2 or rng.random() < 0.7:
        return [data]
    cuts = sorted({rng.randrange(1, len(data)) for _ in range(rng.choice((1, 1, 2, 5)))})
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
