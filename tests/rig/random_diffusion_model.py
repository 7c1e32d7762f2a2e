"""A tiny random diffusion language model, made once and kept: SDAR has the weights of Qwen3 under another name."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
CPU_PATCHES = ROOT / "actors" / "engines" / "sglang" / "host" / "cpu"
MADE_WITHIN_S = 180.0
CONFIG: dict[str, Any] = {
    "vocab_size": 151_680,  # SGLang masks places of every SDAR model by the token id 151,669
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def random_diffusion_model() -> Path:
    """Return the folder of the model, which the first call makes in a process of its own."""
    digest = blake2b(b"".join(path.read_bytes() for path in (Path(__file__), TINY / "tokenizer.json")), digest_size=6)
    cache = ROOT / "build" / "diffusion-models"
    folder = cache / digest.hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs of tests, one makes it
        if not folder.exists():
            with TemporaryDirectory(dir=cache) as temporary:
                _make_in_process(Path(temporary) / folder.name)
                (Path(temporary) / folder.name).rename(folder)
    return folder


def _make_in_process(folder: Path) -> None:
    # torch and transformers take some 500 MB and seconds to import, which the process of the tests is spared.
    path = os.pathsep.join(map(str, (ROOT, CPU_PATCHES)))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rig.random_diffusion_model", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr


def make(folder: Path) -> None:
    """Write the model, with weights drawn from one seed and the tokenizer of the example."""
    from espalier_sglang_cpu import prepare

    prepare()  # before transformers imports torchvision
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**CONFIG))  # type: ignore[no-untyped-call]
    words = len(json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"])
    with torch.no_grad():
        model.lm_head.weight[words:] = 0  # its answers are of the tokenizer's tokens
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["SDARForCausalLM"]}, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
