"""A hook at the start of each interpreter of a peer with SGLang on a CPU: what must be registered before its import.

It costs nothing until SGLang or torchvision is imported. `actors/engines/sglang/host/cpu/README.md` has the reasons.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class Preparing(MetaPathFinder):
    """Prepares the libraries once, before the first of them is looked for; finds nothing itself."""

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> None:
        """Prepare, if this is the import to wait for."""
        if fullname in {"sglang.srt", "torchvision"} and self in sys.meta_path:
            sys.meta_path.remove(self)
            import espalier_sglang_cpu  # noqa: PLC0415  # it imports torch, which takes seconds

            espalier_sglang_cpu.prepare()


sys.meta_path.insert(0, Preparing())
