"""The operators that SGLang and torchvision must find on a CPU, whichever build of torchvision is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

CPU = import_module("actors.engines.sglang.host.cpu.espalier_sglang_cpu")
SCHEMA = "nms(Tensor dets) -> Tensor"


@pytest.mark.parametrize("fits", [True, False])
def test_an_operator_of_torchvisions_own_library_is_not_defined_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    namespace, kept = f"espalier_test_{fits}", []
    (tmp_path / "_C.so").touch()

    def load_library(path: Path) -> None:
        assert path == tmp_path / "_C.so"
        if not fits:
            raise OSError("libcudart.so.13: cannot open shared object file")
        kept.append(torch.library.Library(namespace, "FRAGMENT"))
        kept[0].define(SCHEMA)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setattr(CPU, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(CPU, "_OPERATORS", {namespace: (SCHEMA, "qnms(Tensor dets) -> Tensor")})
    monkeypatch.setattr(CPU, "_kept", [])
    CPU.prepare()
    assert all(hasattr(getattr(torch.ops, namespace), name) for name in ("nms", "qnms"))
    assert len(kept) == fits
