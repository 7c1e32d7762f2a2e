"""Certificates of the gateway and of links, read from their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.config.certificate import Certificate
from tests.rig import certificate


@pytest.mark.parametrize("wrong", ["missing", "swapped", "locked", "empty"])
def test_an_unusable_certificate_is_reported_in_one_sentence(wrong: str, tmp_path: Path) -> None:
    good = certificate.files()
    files = (tmp_path / "a.pem", tmp_path / "b.pem")
    if wrong == "locked":
        certificate.make(*files, "-passout", "pass:secret")
    elif wrong != "missing":
        for file, text in zip(files, (good[1], good[0]), strict=True):
            file.write_bytes(b"" if wrong == "empty" else text.read_bytes())
    with pytest.raises(StartFailed, match="cannot be used: ") as caught:
        Certificate(*files).context()
    assert "\n" not in str(caught.value)
    assert "None" not in str(caught.value)
