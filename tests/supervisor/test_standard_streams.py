"""Commands write to a terminal of any encoding, and to none."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from bench.rig.node import ROOT
from supervisor import standard_streams

FILE = str(ROOT / "examples" / "quickstart.toml")


def checked(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, FILE], cwd=ROOT, env=environment, capture_output=True, check=False
    )


def test_a_check_succeeds_at_a_terminal_that_lacks_the_characters_of_the_tree() -> None:
    run = checked('exec "$0" -m supervisor --check "$1"', PYTHONIOENCODING="latin-1:strict")
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"`- " in run.stdout or b"|- " in run.stdout
    assert "│" not in run.stdout.decode("latin-1")


def test_closed_streams_are_opened_where_nothing_is_read_or_written() -> None:
    program = "import os; from supervisor import standard_streams as s; s.prepare(); print(os.open('/', 0) > 2)"
    run = checked(
        f'exec "$0" -c "{program}; import sys; print(1, file=sys.stderr); sys.exit(len(sys.stdin.read()))" <&- >&- 2>&-'
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
    seen = checked(f'exec "$0" -c "{program}" <&- 2>&-')
    assert (seen.returncode, seen.stdout) == (0, b"True\n")


@pytest.mark.parametrize(
    ("text", "encoding", "written"),
    [
        ("│  └─ a · b", "ascii", b"|  `- a - b"),
        ("Łódź", "latin-1", b"\\u0141\xf3d\\u017a"),
        ("file\udcff", "utf-8", b"file\\udcff"),
        ("│", "utf-8", "│".encode()),
    ],
)
def test_a_character_without_a_code_is_written_in_ascii(
    monkeypatch: pytest.MonkeyPatch, text: str, encoding: str, written: bytes
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    standard_streams.prepare()
    sys.stdout.write(text)
    sys.stdout.flush()
    assert raw.getvalue() == written


UMASK = """
import os, sys
from supervisor import command_line
sys.argv[1:] = ["--version"]
try:
    command_line.main()
except SystemExit:
    print(oct(os.umask(0)))
"""


@pytest.mark.parametrize(("umask", "kept"), [("0777", "0o77"), ("0022", "0o22")])
def test_a_umask_takes_no_right_from_the_user_itself(umask: str, kept: str) -> None:
    run = checked(f'umask {umask}; exec "$0" -c "$UMASK"', UMASK=UMASK)
    assert run.stdout.decode().split()[-1] == kept
