"""A mistake in a model's folder is found by sizes and headers, with what to do about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.files.model_folder import CONVERSION, mistakes
from tests.rig.cluster_files import TINY

OWN = " (docs/first-steps.md has the lines that keep the model's own pattern)"
NEEDED = ("tokenizer.json", "config.json")
SMALL = ("*.json", "*.jinja", "*.model")
WEIGHTS = ("*.safetensors", "*.bin")
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 901000\n"
WHOLE = "model.safetensors"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a whole folder."""
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def found(folder: Path) -> list[str]:
    return list(mistakes(folder, needed=NEEDED, read=SMALL, weights=WEIGHTS))


def shard(folder: Path, *names: str) -> None:
    """Replace the weights by files with other names."""
    data = (folder / WHOLE).read_bytes()
    (folder / WHOLE).unlink()
    for name in names:
        (folder / name).write_bytes(data)


def index(folder: Path) -> None:
    shard(folder, *SHARDS[:1])
    (folder / f"{WHOLE}.index.json").write_text(json.dumps({"weight_map": {name: name for name in SHARDS}}))


def cut(size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda folder: (folder / WHOLE).write_text(POINTER),
            "model.safetensors in {} is a pointer of git-lfs in place of the contents: run `git lfs pull` there",
        ),
        (
            lambda folder: [(folder / name).write_text(POINTER) for name in (WHOLE, "tokenizer.json")],
            (
                "model.safetensors and tokenizer.json in {} are pointers of git-lfs in place of the contents: run"
                " `git lfs pull` there"
            ),
        ),
        (
            lambda folder: [
                (folder / "tokenizer.model").write_text(POINTER),
                (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
            ],
            "tokenizer.model in {} is a pointer of git-lfs in place of the contents: run `git lfs pull` there",
        ),
        (
            lambda folder: (folder / WHOLE).unlink(),
            "there are no weights in {} (*.safetensors, *.bin): copy or download the whole folder of the model",
        ),
        (
            lambda folder: (folder / WHOLE).rename(folder / "tiny-Q4_K_M.gguf"),
            (
                "{} has the weights only as GGUF (tiny-Q4_K_M.gguf), which no engine here loads: take the folder of the"
                " same model with weights as safetensors"
            ),
        ),
        (
            lambda folder: shard(folder, "training_args.bin", "optimizer.bin"),
            (
                "{} has no weights of a model: optimizer.bin and training_args.bin are of a training; copy or download the"
                " whole folder of the model"
            ),
        ),
        (
            lambda folder: shard(folder, "adapter_model.safetensors"),
            (
                "{} has no weights of a model: adapter_model.safetensors is an adapter's; merge the adapter into its"
                " model"
            ),
        ),
        (
            index,
            (
                f"{SHARDS[1]} and {SHARDS[2]} of the model's weights are not in {{}}: the copy or download of the folder is"
                " incomplete"
            ),
        ),
        (
            lambda folder: (folder / f"{WHOLE}.index.json").write_text("{bad"),
            "model.safetensors.index.json in {} is no JSON that lists files of weights: copy or download it again",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_text(POINTER),
            (
                "adapter_model.safetensors in {} is a pointer of git-lfs in place of the contents: run `git lfs pull`"
                " there"
            ),
        ),
        (
            lambda folder: shard(folder, "pytorch_model-00001-of-00002.bin"),
            (
                "pytorch_model-00002-of-00002.bin of the model's weights is not in {}: the copy or download of the folder is"
                " incomplete"
            ),
        ),
        (
            lambda folder: shard(folder, SHARDS[0], SHARDS[2]),
            f"{SHARDS[1]} of the model's weights is not in {{}}: the copy or download of the folder is incomplete",
        ),
        (
            lambda folder: [(folder / WHOLE).unlink(), (folder / WHOLE).symlink_to("../../blobs/0123")],
            "model.safetensors of the model's weights is not in {}: the copy or download of the folder is incomplete",
        ),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "{} has no tokenizer.json: copy or download the whole folder of the model",
        ),
        (
            lambda folder: (folder / "tokenizer.json").rename(folder / "tekken.json"),
            f"{{}} has no tokenizer.json, and its tekken.json is not read: make the file there, by `{CONVERSION}`",
        ),
        (
            lambda folder: (folder / "tokenizer.json").rename(folder / "tiktoken.model"),
            f"{{}} has no tokenizer.json, and its tiktoken.model is not read: make the file there, by `{CONVERSION}`{OWN}",
        ),
        (cut(5), "model.safetensors in {} ends within its header, after 5 bytes: copy or download it again"),
        (cut(100), "model.safetensors in {} ends within its header, after 100 bytes: copy or download it again"),
        (
            cut(100_000),
            "model.safetensors in {} has 100000 bytes, and its header describes 901000: copy or download it again",
        ),
        (
            lambda folder: (folder / WHOLE).write_text("<!DOCTYPE html><html>404</html>"),
            "model.safetensors in {} is no file of safetensors: copy or download it again",
        ),
    ],
)
def test_a_folder_that_was_copied_in_part_is_a_mistake_that_names_the_file_and_what_to_do(
    folder: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    assert found(folder) == []
    spoil(folder)
    assert found(folder) == [sentence.format(folder)]


def test_many_files_are_counted(folder: Path) -> None:
    shard(folder, *(f"model-{number:05}-of-00163.safetensors" for number in range(2, 60)))
    (sentence,) = found(folder)
    names = ", ".join(f"model-{number:05}-of-00163.safetensors" for number in (1, 60, 61))
    assert sentence.startswith(f"{names} and 102 more of the model's weights are not in")


def test_what_is_not_read_may_be_a_pointer_or_missing(folder: Path) -> None:
    (folder / "picture.png").write_text(POINTER)
    (folder / "pytorch_model.bin").write_text(POINTER)  # there are safetensors
    for name in ("tekken.json", "tokenizer.model"):
        (folder / name).write_text(POINTER)  # there is a tokenizer.json
    assert found(folder) == []
    (folder / "consolidated.safetensors").write_text(POINTER)  # of this pair it is left out
    assert found(folder) == []
    (folder / "adapter_model.safetensors").write_text(POINTER)  # the index names neither
    (folder / f"{WHOLE}.index.json").write_text(json.dumps({"weight_map": {"a": WHOLE}}))
    assert found(folder) == []
    (folder / f"{WHOLE}.index.json").unlink()
    (folder / "consolidated.safetensors").unlink()
    (folder / "adapter_model.safetensors").unlink()
    (folder / WHOLE).write_text(POINTER)
    assert list(mistakes(folder, needed=NEEDED, read=SMALL, weights=())) == []
    (folder / WHOLE).unlink()
    assert list(mistakes(folder, needed=NEEDED, read=SMALL, weights=())) == []
    assert "pytorch_model.bin in" in found(folder)[0]


def test_a_tokenizer_of_mistral_is_read_where_its_package_is_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tekken.json").write_text(POINTER)
    (tmp_path / "mistral_common.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert found(folder)[0].startswith("tekken.json in")
