"""A tiny random mixture of experts, made once and kept: two layers of eight experts, of which each token has two."""

from __future__ import annotations

import fcntl
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
LAYERS, EXPERTS, PER_TOKEN = 2, 8, 2
MADE_WITHIN_S = 180.0
CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def random_expert_model() -> Path:
    """Return the folder of the model, which the first call makes in a process of its own."""
    digest = blake2b(b"".join(path.read_bytes() for path in (Path(__file__), TINY / "tokenizer.json")), digest_size=6)
    cache = ROOT / "build" / "expert-models"
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
    command = [sys.executable, "-m", "tests.rig.random_expert_model", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr


def make(folder: Path) -> None:
    """Write the model, with weights drawn from one seed and the tokenizer of the example."""
    from espalier_sglang_cpu import prepare

    prepare()  # before transformers imports torchvision
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
