"""The environment of an engine's process."""

from __future__ import annotations

from supervisor.engines.sglang.spawn import host_environment


def test_an_engine_reads_files_as_utf_8_in_every_locale_unless_it_is_told_otherwise() -> None:
    assert host_environment({"LC_ALL": "de_DE.ISO-8859-1"}, "cuda")["PYTHONUTF8"] == "1"
    assert host_environment({"PYTHONUTF8": "0"}, "cuda")["PYTHONUTF8"] == "0"
    assert host_environment({}, "cuda", {"PYTHONUTF8": "0"})["PYTHONUTF8"] == "0"
