"""Embeddings of clients are two tensors of a safetensors file; whatever does not fit is refused with a reason."""

from __future__ import annotations

import json
import struct

import pytest

from actors.media.decoder import embeddings
from actors.media.decoder.content import ContentRefusal
from actors.media.jobs import EmbeddingFacts
from protocol.tensors import Dtype
from tests.rig import media_samples as samples
from tests.rig.media_samples import safetensors

GRID = ("I64", (3,), struct.pack("<3q", 1, 4, 4))
ROWS = ("F32", (4, 8), bytes(128))


@pytest.mark.parametrize(("name", "dtype"), [("F32", Dtype.FLOAT32), ("F16", Dtype.FLOAT16), ("BF16", Dtype.BFLOAT16)])
def test_embeddings_of_each_type_are_read(name: str, dtype: Dtype) -> None:
    content = samples.embeddings(dtype=name)
    assert embeddings.inspect(content) == EmbeddingFacts(4, 8, dtype, (1, 4, 4))
    assert len(embeddings.decode(content)) == 32 * (4 if name == "F32" else 2)


def test_the_grid_may_be_a_row_and_of_32_bits() -> None:
    content = safetensors(
        {"grid_thw": ("I32", (1, 3), struct.pack("<3i", 1, 2, 4)), "embeddings": ("F32", (2, 1), bytes(8))}
    )
    assert embeddings.inspect(content) == EmbeddingFacts(2, 1, Dtype.FLOAT32, (1, 2, 4))


def test_it_is_what_the_library_of_the_format_writes() -> None:
    import numpy as np
    from safetensors.numpy import save

    rows, grid = np.arange(32, dtype=np.float32).reshape(4, 8), np.array([1, 4, 4])
    content = save({"embeddings": rows, "grid_thw": grid}, {"made": "by a client"})
    assert embeddings.inspect(content) == EmbeddingFacts(4, 8, Dtype.FLOAT32, (1, 4, 4))
    assert embeddings.decode(content) == struct.pack("<32f", *range(32))


def of_header(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4], **changes}


NOT_FINITE = {"F32": struct.pack("<f", float("nan")), "F16": b"\x00\x7c", "BF16": b"\x80\xff"}
REFUSED = [
    (safetensors({"grid_thw": GRID}), "no tensor embeddings"),
    (safetensors({"embeddings": ROWS}), "no tensor grid_thw"),
    (safetensors({"embeddings": ROWS, "grid_thw": GRID, "code": ROWS}), r"no others: it has \['code'\]"),
    (safetensors({"embeddings": ("I64", (4, 4), bytes(128)), "grid_thw": GRID}), "embeddings must be of the type F16"),
    (safetensors({"embeddings": ROWS, "grid_thw": ("F32", (3,), bytes(12))}), "grid_thw must be of the type I64 or I32"),
    (safetensors({"embeddings": ("F32", (32,), bytes(128)), "grid_thw": GRID}), r"shape \[tokens, width\]"),
    (safetensors({"embeddings": ROWS, "grid_thw": ("I64", (4,), bytes(32))}), r"shape \[3\] or \[1, 3\]"),
    (safetensors({"embeddings": ("F32", (5, 8), bytes(128)), "grid_thw": GRID}), r"128 bytes, and its shape \[5, 8\] takes 160"),
    (of_header({"embeddings": entry(data_offsets=[0, 400], shape=[10, 10])}), "truncated: embeddings ends at byte"),
    (of_header({"embeddings": entry(data_offsets=[4, 0])}, bytes(8)), "has 0 bytes"),
    (of_header({"embeddings": entry(shape=[1 << 40, 1 << 40])}, bytes(8)), "not stated as it should be"),
    (of_header({"embeddings": entry(shape="11")}, bytes(8)), "not stated as it should be"),
    (of_header([1]), "no JSON object"),
    (of_header(b"{" + b"[" * 60_000), "no JSON"),
    (of_header(b"{\xff\xfe"), "no JSON"),
    ((1 << 40).to_bytes(8, "little") + b"{}", "too long, or it is truncated"),
    (of_header(b"{" + b" " * 70_000 + b"}"), "too long"),
    (samples.embeddings()[:-1], "truncated: "),
    *(
        (safetensors({"embeddings": (dtype, (1, 1), data), "grid_thw": GRID}), "finite")
        for dtype, data in NOT_FINITE.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_does_not_fit_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ContentRefusal, match=reason):
        embeddings.inspect(content)
