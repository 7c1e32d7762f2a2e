"""SGLang's flags, and the variables by which it runs on a CPU: the same for every peer that has its engine.

What our engine host changes of SGLang on a CPU, the attention of cached tokens among it, these peers have, too.
"""

from __future__ import annotations

from bench.peers.peer import MODEL, MODEL_FOLDER, PAGE_SIZE, PREFILL_CHUNK, ROOT, Setup

SHIM = ROOT / "actors" / "engines" / "sglang" / "host" / "cpu"
PREPARE = ROOT / "bench" / "peers" / "cpu"

VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": f"{PREPARE}:{SHIM}",
}


def flags(setup: Setup) -> tuple[str, ...]:
    """Return the words for an engine like ours: what our engine host gives SGLang, by the names of its command line."""
    values = {
        "model-path": MODEL_FOLDER,
        "served-model-name": MODEL,
        "device": "cpu",
        "attention-backend": "torch_native",
        "mem-fraction-static": 0.1,
        "max-total-tokens": setup.kv_tokens_max,
        "max-running-requests": setup.slots,
        "page-size": PAGE_SIZE,
        "chunked-prefill-size": PREFILL_CHUNK,
        "log-level": "warning",
    }
    switches = ("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup")
    return (*(word for name, value in values.items() for word in (f"--{name}", str(value))), *switches)
