"""Sections of cluster files, for tests."""

from __future__ import annotations

from bench.rig.node import ROOT

TINY = ROOT / "examples" / "tiny"
MODEL = f'[model.tiny]\npath = "{TINY}"\n'


def engine(name: str, node: str = "main") -> str:
    """Return the section of a simulated engine of the model `tiny`."""
    return f'[engine.{name}]\nnode = "{node}"\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\n'
