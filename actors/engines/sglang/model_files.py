"""The digest of an engine's model, read where its files are; the weights by samples, for they may be hundreds of GB."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from protocol.model_folder import FILES, WEIGHTS, Digest, digest

SAMPLE_BYTES = 64 * 1024


def told(folder: Path) -> Digest:
    """Return the digest of a model's folder: its files, and of its weights the sizes and three samples of each."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        files[WEIGHTS] = b"".join(map(_sampled, weights))
    return digest(files)


def _sampled(file: Path) -> bytes:
    """Return what stands for a file: its name, its size, and a digest of its beginning, its middle and its end."""
    size, read = file.stat().st_size, blake2b()
    with file.open("rb") as opened:
        for place in (0, size // 2, max(0, size - SAMPLE_BYTES)):
            opened.seek(place)
            read.update(opened.read(SAMPLE_BYTES))
    return f"{file.name} {size} {read.hexdigest()}\n".encode()
