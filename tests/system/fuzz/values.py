"""Values that have broken servers, and JSON text that no encoder writes."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from random import Random

DEEP = 10_000
LONG = 1_000_000

SCALARS: tuple[object, ...] = (
    None, True, False, 0, 1, -1, -0.0, 0.5, 1.0, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63) - 1, 2**64, 10**40, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, "", " ", "a", "0", "-1",
    "1e9", "null", "true", "\0", "\x1b[2J", "\r\n", "\u2028", "\ufeff", "🙂", "e\u0301" * 8, "\U000e0001", "\u202e",
    "a\udc00", "\ud83d", "../../etc/passwd", "%s%n", "{{7*7}}", "{% for x in range(10) %}{{x}}{% endfor %}",
    "<|im_start|>system\n", "<|im_end|>", "<s></s>", "$(id)", "'; --", "tiny", "TINY", "tiny\0", "n=3 fail=1",
    "n=100000", "n=4 s=0.01", "__class__", "__proto__", "length", "x" * 257, "x" * 4097,
)  # fmt: skip
SMALL: tuple[object, ...] = (
    *SCALARS,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": ""},
    {"": None},
    {"__class__": "x"},
    {"type": "text"},
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "https://a\ud83d.example/"}},
    {"type": "image_url", "image_url": {"url": {"url": {"url": {}}}}},
    {"type": "image_url", "image_url": {"url": 7, "detail": 7}},
    {"type": "image_url"},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:8000/admin", "fps": 1e308}},
    {"type": "image_embeds", "image_embeds": "gASVAAAA"},
    {"type": "image_embeds", "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": "AAAA"}},
    {"type": "input_image", "file_id": "file-1"},
    {"type": "input_image", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_video", "video_url": None},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "file-1"}},
    {"url": "data:image/png;base64,AAAA", "detail": "original"},
    "data:image/png;base64,AAAA",
    "https://media.example/cat.png",
    "file:///srv/media/cat.pt",
    "data:image/png;base64,",
    "javascript:alert(1)",
    {"type": "json_object"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}},
    {"type": "message", "role": "user", "content": []},
    {"role": "user", "content": "n=1"},
    {"role": "tool", "content": "a", "tool_call_id": "b"},
    {"0": -100, "511": 100, "512": 1},
    {"-1": 1, "00": 1, "1e1": 1},
    [0, 511, 512],
    [-1],
    [2**31],
    [1.5],
    [True],
    list(range(64)),
    ["a"] * 200,
    [[1], [2], [3]],
    [["a"]],
    [""] * 17,
)

KEYS = (
    "model", "messages", "prompt", "input", "instructions", "role", "content", "type", "text", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output",
    "min_tokens", "ignore_eos", "seed", "regex", "ebnf", "structural_tag", "return_token_ids", "priority",
    "cache_salt", "ttft_target_ms", "itl_target_ms", "n", "best_of", "response_format", "stream", "stream_options", "logprobs", "top_logprobs", "echo",
    "tools", "tool_choice", "functions", "user", "metadata", "store", "reasoning", "include", "truncation",
    "previous_response_id", "generate", "stream_id", "response_id", "tokens", "add_special_tokens", "background",
    "image_url", "video_url", "image_embeds", "input_image", "url", "detail", "file_id", "fps", "modalities", "uuid",
    "name", "schema", "strict", "json_schema", "format", "", "\0", "__class__", "__proto__", "_model", "Model",
)  # fmt: skip


def hostile_value(rng: Random, depth: int = 0) -> object:
    """Return a value that hardly any field expects."""
    kind = rng.random()
    if kind < 0.8 or depth > 3:
        return deepcopy(rng.choice(SMALL))  # somebody may go on to change it
    if kind < 0.85:
        return rng.choice((-1, 1)) * rng.getrandbits(rng.choice((8, 16, 31, 32, 33, 63, 64, 65, 200)))
    if kind < 0.9:
        return "".join(
            chr(rng.choice((rng.randrange(32), rng.randrange(0x250), rng.randrange(0x10FFFF)))) for _ in "abcd"
        )
    if kind < 0.95:
        return [hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def huge(rng: Random) -> bytes:
    """Return the text of a value that is long or deep; a few of these are enough."""
    kind = rng.randrange(9)
    if kind < 3:
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]"), (b'{"image_url":', b"}")))
        return opening * DEEP + b"1" + (closing * DEEP if rng.random() < 0.5 else b"")
    return (
        b'"' + rng.choice((b"x", b"\\n", "é".encode(), b"\\ud83d\\ude42", b"n=9 ")) * (LONG // 8) + b'"',
        b"[" + b"0," * 20_000 + b"0]",
        b"[" + b'{"role":"user","content":""},' * 2_000 + b"1]",
        b"{" + b",".join(b'"%d":%d' % (at, at) for at in range(5_000)) + b"}",
        rng.choice((b"1", b"-1", b"0.", b"1e")) + b"9" * 50_000,
        _seen(rng),
    )[kind - 3]


def _seen(rng: Random) -> bytes:
    """Return the text of a conversation with an image of a megabyte, or with hundreds of them."""
    data = rng.choice((b"A", b"A", b"\\n", "é".encode(), b":", b"{", b"%"))
    url, count = (data * LONG, 1) if rng.random() < 0.5 else (b"AAAA", rng.choice((256, 257, 2_000)))
    head = rng.choice((b"data:image/png;base64,", b"https://a.example/", b""))
    part = b'{"type":"image_url","image_url":{"url":"' + head + url + b'"}}'
    return b'[{"role":"user","content":[' + b",".join([part] * count) + b"]}]"


def text(value: object) -> bytes:
    """Return a value as JSON, or nearly so: what is not a number stands as Python writes it, half pairs too."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def corrupted(rng: Random, data: bytes) -> bytes:
    """Return bytes with a few of them changed, gone, doubled, or of somewhere else."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(8):
            case 0:
                del out[at:end]
            case 1:
                del out[at:]
            case 2:
                out[at:at] = out[at:end] * rng.choice((1, 2, 50))
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                out[at:at] = rng.choice(PIECES)
            case 5:
                start = rng.randrange(len(out) + 1)
                out[at:end] = out[start : start + end - at]
            case _ if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


PIECES = (
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf",
    b'"', b"\\", b"\\u0000", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"1e999", b"-", b" ",
    b"HTTP/1.1", b"POST ", b": ", b"\t", b"0\r\n\r\n", b"\x81\x00", b"\x88\x80\0\0\0\0", b"99999999999999999999",
)  # fmt: skip
