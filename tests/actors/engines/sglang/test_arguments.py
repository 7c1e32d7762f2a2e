"""The checked-in list of SGLang's arguments is that of the SGLang that is installed.

Written anew by `PYTHONPATH=. .venv/bin/python tests/actors/engines/sglang/test_arguments.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from bench.rig.node import ROOT
from supervisor.engines.sglang.spawn import CPU_PATH, host_environment

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FILE = ROOT / "actors" / "engines" / "sglang" / "arguments.py"
HEAD = '''"""The arguments of SGLang 0.5.23 and what each may be, for a node, which never imports SGLang.

Made from SGLang's own `ServerArgs` by `tests/actors/engines/sglang/test_arguments.py`; not for editing by hand.
"""

from __future__ import annotations

_BY_TYPE = {
'''
TAIL = '''\
}
_CHOICES = {
%s}

TYPES: dict[str, str] = {name: kind for kind, names in _BY_TYPE.items() for name in names.split()}
"""What an argument may be, by its name: `any` where a word does not say it."""

CHOICES: dict[str, tuple[str, ...]] = {name: tuple(words.split()) for name, words in _CHOICES.items()}
"""The only words that some arguments may be."""
'''
READ = """
import espalier_sglang_cpu; espalier_sglang_cpu.prepare()
import json, types, typing
from sglang.srt.server_args import ServerArgs
plain = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
kinds_by_name = {}
for name, kind in typing.get_type_hints(ServerArgs).items():
    if name not in ServerArgs.__struct_fields__ or name.startswith("_"):
        continue
    origin, some = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union and len(some) == 2 and type(None) in some:
        [kind] = (each for each in some if each is not type(None))
        origin, some = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal and all(isinstance(each, str) for each in some):
        kinds_by_name[name] = list(some)
    else:
        kinds_by_name[name] = plain.get(origin or kind, "any")
print(json.dumps(kinds_by_name))
"""


def generated() -> str:
    """Return what the file must be."""
    environment = host_environment(os.environ, "cpu")
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, env=environment)
    kinds_by_name = json.loads(done.stdout.splitlines()[-1])
    by_type: dict[str, list[str]] = {}
    for name, kind in sorted(kinds_by_name.items()):
        by_type.setdefault("choice" if isinstance(kind, list) else kind, []).append(name)
    kinds = "".join(row(kind, names) for kind, names in sorted(by_type.items()))
    return HEAD + kinds + TAIL % "".join(row(name, kinds_by_name[name]) for name in sorted(by_type["choice"]))


def row(name: str, words: list[str]) -> str:
    filled = textwrap.fill(" ".join(words), 112, break_long_words=False, break_on_hyphens=False)
    if len(filled) < 80:
        return f'    "{name}": "{filled}",\n'
    return f'    "{name}": """\n{textwrap.indent(filled, " " * 8)}\n    """,\n'


def test_the_list_of_arguments_is_that_of_the_installed_sglang() -> None:
    assert FILE.read_text() == generated()
    assert CPU_PATH.is_dir()


if __name__ == "__main__":
    FILE.write_text(generated())
