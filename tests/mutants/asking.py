"""More bugs to plant: in how requests name images and videos, and in what the gateway keeps of them."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "protocol/dialects/media_urls.py": (
        Bug("a URL may name a user", 'if "@" in parts.netloc:', "if False:"),
        Bug(
            "a URL may have a backslash, behind which parsers see different hosts",
            r're.compile(r"[^!-\[\]-~]")',
            r're.compile(r"[^!-~]")',
        ),
        Bug(
            "the name of a pickle may be percent-encoded",
            "name = unquote(path).lower()",
            "name = path.lower()",
        ),
        Bug("a file of another host is taken for one of this", 'not in {"", "localhost"} or', "is None or"),
        Bug("an image may be a pickle in base64", "if _PICKLE_HEAD.match(value):", "if False:"),
        Bug(
            "the whole of a data URL is searched for its comma",
            'url[: DATA_HEAD_CHARACTERS_MAX + 1].partition(",")',
            'url.partition(",")',
        ),
    ),
    "protocol/dialects/media_parts.py": (
        Bug("any message may have images", "if role is Role.USER or parts", "if parts"),
        Bug("an image of original detail is of low detail", '"original": Detail.HIGH', '"original": Detail.LOW'),
        Bug("images stand behind the texts", "else pieces", "else (*texts, *(p for p in pieces if p not in texts))"),
    ),
    "protocol/dialects/responses/items.py": (
        Bug(
            "an image of an earlier response has the name of a field of this request",
            "evolve(part, param=CONTINUES)",
            "part",
        ),
    ),
    "protocol/strict/tagged.py": (
        Bug(
            "an object without a tag is read as the first kind", 'if name in value else "is missing"', 'if True else ""'
        ),
    ),
    "supervisor/gateway/http/exchange.py": (
        Bug("a body is kept beside what was read from it", 'data, self.data = self.data, b""', "data = self.data"),
    ),
    "supervisor/gateway/websocket/history.py": (
        Bug(
            "the images of a conversation take no memory",
            "part if isinstance(part, str) else part.url",
            '"" or str(part)[:0]',
        ),
    ),
    "supervisor/gateway/websocket/session.py": (
        Bug("an idle WebSocket keeps its last message", "del message  #", "#"),
    ),
    "supervisor/gateway/http/request_reader.py": (
        Bug("any number of long bodies is read in one pass", "if len(body) >= turn_at:", "if False:"),
    ),
    "protocol/dialects/request_body.py": (
        Bug("a long body is counted in the event loop", "head = text[:COUNTED_MAX]", "head = text"),
    ),
}
