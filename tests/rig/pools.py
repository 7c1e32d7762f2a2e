"""Files of clusters with pools, for tests."""

from __future__ import annotations

from tests.rig.cluster_files import MODEL

PREFILL_GRID = """[model.tiny.grid.prefill]
input_tokens_min = 0
input_tokens_max = 100
input_resolution = 2
ttft_min_ms = 10
ttft_max_ms = 1010
ttft_resolution = 2
pools = [["quick", "cheap"], ["quick", "quick"]]
"""
DECODE_GRID = """[model.tiny.grid.decode]
context_tokens_min = 0
context_tokens_max = 200
context_resolution = 2
itl_min_ms = 5
itl_max_ms = 105
itl_resolution = 1
pools = [["short"], ["long"]]
"""
WHOLE_GRID = PREFILL_GRID.replace("prefill", "both")


def worker(name: str, leg: str, node: str = "main", more: str = "") -> str:
    """Return the section of a simulated engine."""
    keys = f'node = "{node}"\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\nleg = "{leg}"\n'
    return f"[engine.{name}]\n{keys}{more}"


def pool(name: str, *engines: str, priority: int | None = None) -> str:
    """Return the section of a pool."""
    names = ", ".join(f'"{engine}"' for engine in engines)
    return f"[pool.{name}]\nengines = [{names}]\n" + ("" if priority is None else f"priority = {priority}\n")


def one_cell(name: str) -> str:
    """Return the section of a grid for engines that compute both legs, which maps all requests to one pool."""
    lengths = "input_tokens_min = 0\ninput_tokens_max = 100\ninput_resolution = 1\n"
    targets = "ttft_min_ms = 0\nttft_max_ms = 100\nttft_resolution = 1\n"
    return f'[model.tiny.grid.both]\n{lengths}{targets}pools = [["{name}"]]\n'


PAIRS = (
    MODEL
    + PREFILL_GRID
    + DECODE_GRID
    + "".join(worker(name, "prefill") for name in ("p0", "p1", "p2"))
    + "".join(worker(name, "decode") for name in ("d0", "d1"))
    + pool("quick", "p0", "p1", priority=2)
    + pool("cheap", "p2")
    + pool("short", "d0", priority=1)
    + pool("long", "d1")
)
WHOLES = (
    MODEL
    + WHOLE_GRID
    + "".join(worker(name, "both") for name in ("w0", "w1", "w2"))
    + pool("quick", "w0", priority=2)
    + pool("cheap", "w1")
)
