"""Mistakes in the files of a model's folder, found before anything loads them: most are of an incomplete copy.

The weights may be hundreds of GB, so only the header of each file of weights is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from supervisor.files import reading

TOKENIZER = "tokenizer.json"
TIKTOKEN = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_CONFIG_BYTES_MAX = 16 * 1024 * 1024
TEKKEN = "tekken.json"
OTHER_TOKENIZERS = (TIKTOKEN, TEKKEN, "tokenizer.model", "spiece.model", "vocab.json")
CONVERSION = """python -c 'from transformers import AutoTokenizer as T; T.from_pretrained(".").save_pretrained(".")\'"""
POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES_MAX = 1024
LISTED_MAX = 3  # names of files in a sentence
SAFETENSORS = ".safetensors"
CONSOLIDATED, WHOLE = "consolidated.safetensors", "model.safetensors"
INDEXES = {SAFETENSORS: "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
INDEX_BYTES_MAX = 256 * 1024 * 1024
LENGTH_BYTES = 8  # of the length of a header, before the header itself
HEADER_BYTES_MAX = 100_000_000  # the format's own limit
END_OF_TENSOR = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d+)')
ADAPTER = "adapter_model."
OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")  # left out by SGLang
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


def mistakes(folder: Path, *, needed: Sequence[str], read: Collection[str], weights: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each thing that keeps a folder from being used.

    `needed` are the names of the small files that must be there, `read` the patterns of all that are read. `weights`
    are the patterns of the files of weights, of which the first that matches is taken; none if no weights are read.
    """
    if absent := [name for name in needed if not (folder / name).is_file()]:
        yield f"{folder} has no {' and no '.join(absent)}{_advice(folder, absent)}"
    matching = _matching(folder, weights)
    found = _of_model(matching)
    index = _index(folder, found)
    named = _named(index, found)
    loaded = _loaded(found, named)
    small = {path for pattern in read for path in folder.glob(pattern) if path.name not in _unread(folder)}
    pointers = sorted(path.name for path in {*small, *loaded} if _is_pointer(path))
    if pointers:
        yield (
            f"{_listed(pointers)} in {folder} {'is a pointer' if len(pointers) == 1 else 'are pointers'} of git-lfs in"
            " place of the contents: run `git lfs pull` there"
        )
    if weights and not found:
        yield _no_weights(folder, weights, [path.name for path in matching])
    if index.is_file() and _indexed(index) is None:
        yield f"{index.name} in {folder} is no JSON that lists files of weights: copy or download it again"
    if missing := sorted(named - {path.name for path in loaded}):
        yield (
            f"{_listed(missing)} of the model's weights {'is' if len(missing) == 1 else 'are'} not in {folder}:"
            " the copy or download of the folder is incomplete"
        )
    for path in loaded:
        if path.suffix == SAFETENSORS and path.name not in pointers and (why := _damage(path)) is not None:
            yield f"{path.name} in {folder} {why}: copy or download it again"


def loaded_weights(folder: Path, weights: Sequence[str]) -> list[Path]:
    """Return the files of weights that an engine loads, without further copies of them beside."""
    found = _of_model(_matching(folder, weights))
    return _loaded(found, _named(_index(folder, found), found))


def _of_model(matching: Sequence[Path]) -> list[Path]:
    """Return the files that may have a model's weights, none if all of them are an adapter's."""
    found = [path for path in matching if not path.name.endswith(OF_TRAINING)]
    return [] if all(path.name.startswith(ADAPTER) for path in found) else found


def _index(folder: Path, found: Sequence[Path]) -> Path:
    return folder / INDEXES.get(found[0].suffix, "") if found else folder


def _loaded(found: Sequence[Path], named: Collection[str]) -> list[Path]:
    return [path for path in found if path.name in named and path.exists()]  # a link may lead nowhere


def _advice(folder: Path, absent: Sequence[str]) -> str:
    """Return what to do about missing files."""
    reading.record_path(folder)
    if snapshots := sorted(folder.glob("snapshots/*/config.json")):
        return f": it is a cache of downloads, which has the model in {snapshots[-1].parent}"
    if len(absent) > 1:
        return ": it is no folder of a model"
    own = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
    if absent != [TOKENIZER] or own is None:
        return ": copy or download the whole folder of the model"
    pattern = " (docs/first-steps.md has the lines that keep the model's own pattern)" if own == TIKTOKEN else ""
    return f", and its {own} is not read: make the file there, by `{CONVERSION}`{pattern}"


def _unread(folder: Path) -> tuple[str, ...]:
    """Return the names of tokenizers that an engine does not read, since it reads `tokenizer.json`."""
    if not (folder / TOKENIZER).is_file():
        return ()
    try:
        config = json.loads(reading.read(folder / TOKENIZER_CONFIG, TOKENIZER_CONFIG_BYTES_MAX))
        own_code = "AutoTokenizer" in config.get("auto_map", {})  # it may read any of them
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        own_code = False
    if own_code:
        return ()
    # With this package, which SGLang asks for, a Mistral model is read by its own tokenizer.
    return tuple(name for name in OTHER_TOKENIZERS if name != TEKKEN or find_spec("mistral_common") is None)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of the first pattern that matches any."""
    reading.record_path(folder)
    return next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])


def _is_pointer(path: Path) -> bool:
    """Whether git-lfs has left a pointer in place of a file; not if it cannot be read, which is reported elsewhere."""
    reading.record_path(path)
    try:
        return path.stat().st_size <= POINTER_BYTES_MAX and reading.beginning(path, len(POINTER)) == POINTER
    except OSError:
        return False


def _no_weights(folder: Path, weights: Sequence[str], others: Sequence[str]) -> str:
    """Return the sentence about a folder without weights; `others` are the files that only look like them."""
    if others:
        adapter = any(name.startswith(ADAPTER) for name in others)
        advice = "merge the adapter into its model" if adapter else "copy or download the whole folder of the model"
        kind = "an adapter's" if adapter else "of a training"
        are = "is" if len(others) == 1 else "are"
        return f"{folder} has no weights of a model: {_listed(others)} {are} {kind}; {advice}"
    if ggufs := sorted(path.name for path in folder.glob("*.gguf")):
        return (
            f"{folder} has the weights only as GGUF ({_listed(ggufs)}), which no engine here loads:"
            " take the folder of the same model with weights as safetensors"
        )
    return f"there are no weights in {folder} ({', '.join(weights)}): copy or download the whole folder of the model"


def _named(index: Path, found: Sequence[Path]) -> set[str]:
    """Return the names of the files that all of the weights are in, by the index of the folder, else by their numbers.

    Of files that an index does not name, such as a second copy in one piece, none is loaded.
    """
    if (indexed := _indexed(index)) is not None:
        return indexed
    names = {path.name for path in found}
    if names == {CONSOLIDATED, WHOLE}:  # which SGLang knows as copies of the same
        return {WHOLE}
    numbered = [match for name in names if (match := SHARD.fullmatch(name)) is not None]
    return names | {
        f"{match[1]}-{number:05}-of-{match[2]}{match[3]}"
        for match in numbered
        for number in range(1, int(match[2]) + 1)
    }


def _indexed(index: Path) -> set[str] | None:
    """Return the names of the files in an index of weights, None if it is not one or is not there."""
    try:
        return {str(name) for name in json.loads(reading.read(index, INDEX_BYTES_MAX))["weight_map"].values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _damage(path: Path) -> str | None:
    """Return why a file of safetensors cannot be loaded, None if it looks whole."""
    try:
        size = path.stat().st_size
        begin = reading.beginning(path, LENGTH_BYTES)
        header_bytes = int.from_bytes(begin, "little")
        if len(begin) < LENGTH_BYTES or (header_bytes <= HEADER_BYTES_MAX and LENGTH_BYTES + header_bytes > size):
            return f"ends within its header, after {size} bytes"
        if header_bytes > HEADER_BYTES_MAX:
            return "is no file of safetensors"
        header = reading.beginning(path, LENGTH_BYTES + header_bytes)[LENGTH_BYTES:]
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror or error})"
    whole = LENGTH_BYTES + header_bytes + max((int(end[1]) for end in END_OF_TENSOR.finditer(header)), default=0)
    return None if whole <= size else f"has {size} bytes, and its header describes {whole}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    shown = names[:LISTED_MAX]
    return f"{', '.join(shown)}{more}" if more else " and ".join([", ".join(shown[:-1]), shown[-1]][not shown[1:] :])
