"""Tiny random models of vectors and of scores, made once and kept: one of each family that an embedder computes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
CPU_PATCHES = ROOT / "actors" / "engines" / "sglang" / "host" / "cpu"
MADE_WITHIN_S = 180.0
VOCABULARY = 528
WIDTH = 32
ENCODER_TOKENS = 64
"""The positions of the encoders."""
SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
DECODER: dict[str, object] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER: dict[str, object] = {**SIZES, "max_position_embeddings": ENCODER_TOKENS}
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "qwen3-score": ("Qwen3ForSequenceClassification", "Qwen3Config", {**DECODER, "num_labels": 1}),
    "bert-mean": ("BertModel", "BertConfig", ENCODER),
    "bert-cross": ("BertForSequenceClassification", "BertConfig", {**ENCODER, "num_labels": 1}),
}
SCORERS = ("qwen3-score", "bert-cross")
EXPECTED = "expected.json"
LONG_PREFIX = 150
MODULES = "sentence_transformers.models"


def random_text_models() -> Path:
    """Return the folder of all models by name, which the first call makes in a process of its own."""
    digest = blake2b(b"".join(path.read_bytes() for path in (Path(__file__), TINY / "tokenizer.json")), digest_size=6)
    cache = ROOT / "build" / "text-models"
    folder = cache / digest.hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs of tests, one makes them
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as temporary:
                _make_in_process(Path(temporary) / folder.name)
                (Path(temporary) / folder.name).rename(folder)
    return folder


def _make_in_process(folder: Path) -> None:
    # torch and transformers take some 500 MB and seconds to import, which the process of the tests is spared.
    path = os.pathsep.join(map(str, (ROOT, CPU_PATCHES)))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rig.random_text_models", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr


def make(folder: Path) -> None:
    """Write the models into a folder, each into one of its own."""
    import espalier_sglang_cpu

    espalier_sglang_cpu.prepare()  # before torchvision is imported

    import torch
    import transformers

    torch.manual_seed(5)
    torch.set_num_threads(1)
    for name, (kind, config, sizes) in MODELS.items():
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        model.save_pretrained(folder / name)
        (folder / name / EXPECTED).write_text(json.dumps(computed(name, model.eval())))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((TINY / file).read_bytes())
    config = json.loads((folder / "qwen3" / "config.json").read_text())
    (folder / "qwen3" / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    write_modules(folder / "bert-mean", {"pooling_mode_mean_tokens": True}, normalised=True)


def computed(name: str, model: Any) -> list[tuple[list[int], int, list[float]]]:
    """Return items as token ids, each with where its second text begins and what transformers computes for it."""
    import torch

    chance, lengths = Random(name), (2, 3, 17, 40, ENCODER_TOKENS)
    prefix = [chance.randrange(3, VOCABULARY) for _ in range(LONG_PREFIX)]
    longer = () if name.startswith("bert") else (prefix, [*prefix, 7, 8], [*prefix, 9, 8])
    texts = [*([chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths), *longer]
    rows: list[tuple[list[int], int, list[float]]] = []
    for ids in texts:
        second_at = max(1, len(ids) // 3) if name in SCORERS else 0
        types = {"token_type_ids": torch.tensor([[0] * second_at + [1] * (len(ids) - second_at)])}
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True, **(types if name == "bert-cross" else {}))
        if name in SCORERS:
            row = out.logits[0].sigmoid()
        else:
            states = out.hidden_states[-1][0]
            row = states.mean(0) if name == "bert-mean" else states[-1]
            row = torch.nn.functional.normalize(row, dim=-1)
        rows.append((ids, second_at, row.tolist()))
    return rows


def write_modules(folder: Path, pooling: dict[str, object], *, normalised: bool) -> None:
    """Write the files of sentence-transformers for a pooling."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalised else {})}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{MODULES}.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **pooling}))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
