"""A host without the filter of system calls around decoders is refused before anything starts, unless none is required."""

from __future__ import annotations

import ctypes
import errno
import platform
from types import SimpleNamespace

import pytest

from supervisor.config.load import Misconfigured
from supervisor.config.media import MediaSection
from supervisor.media.filter_check import check_filter, missing

PREFERRED = MediaSection(sandbox="preferred")


def test_this_kernel_filters_system_calls() -> None:
    assert missing() is None
    check_filter(MediaSection())


def test_a_kernel_without_filters_is_refused_unless_none_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def prctl(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=prctl))
    with pytest.raises(
        Misconfigured, match=r'is "required", and this kernel lets no .* set sandbox = "preferred"'
    ) as caught:
        check_filter(MediaSection())
    assert caught.value.path == "gateway.media.sandbox"
    check_filter(PREFERRED)


def test_a_machine_whose_system_calls_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(Misconfigured, match="no filter of system calls for riscv64"):
        check_filter(MediaSection())
    check_filter(PREFERRED)
