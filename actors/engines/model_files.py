"""The files of a model's folder, and its digest; only samples of the weights are read, which may be hundreds of GB."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from protocol.model_folder import FILES, TEMPLATES, WEIGHTS, Digest, digest

SAMPLE_BYTES = 64 * 1024


def present(folder: Path) -> list[str]:
    """Return the names of a model's files besides its weights."""
    further = sorted(f"{TEMPLATES}/{path.name}" for path in folder.glob(f"{TEMPLATES}/*.jinja"))
    return [name for name in (*FILES, *further) if (folder / name).is_file()]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a model's files besides its weights, by their names."""
    return {name: (folder / name).read_bytes() for name in present(folder)}


def model_digest(folder: Path) -> Digest:
    """Return the digest of a model's folder: of its files, and of the size and three samples of its weights."""
    files = read_files(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        files[WEIGHTS] = b"".join(map(sampled, weights))
    return digest(files)


def sampled(file: Path) -> bytes:
    """Return a line for a file: its name, its size, and a digest of its beginning, its middle and its end."""
    size, read = file.stat().st_size, blake2b()
    with file.open("rb") as opened:
        for offset in (0, size // 2, max(0, size - SAMPLE_BYTES)):
            opened.seek(offset)
            read.update(opened.read(SAMPLE_BYTES))
    return f"{file.name} {size} {read.hexdigest()}\n".encode()
