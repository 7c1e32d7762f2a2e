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
HEAD = '''"""The arguments of SGLang 0.5.23 and their types, for nodes, which never import SGLang.

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
"""The types of arguments, by name: `any` where no word of these describes it."""

CHOICES: dict[str, tuple[str, ...]] = {name: tuple(words.split()) for name, words in _CHOICES.items()}
"""The only words, or numbers, that some arguments may be."""
'''
READ = """
import espalier_sglang_cpu; espalier_sglang_cpu.prepare()
import argparse, json, types, typing
from sglang.srt.server_args import ServerArgs
plain = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
# Arguments of a command line have more choices than their types; those of a flag, or of items of a list, say nothing.
choices_by_name = {
    each.dest: [str(choice) for choice in each.choices]
    for each in parser._actions if each.choices is not None and each.type is not None and each.nargs is None
}
kinds_by_name = {}
for name, kind in typing.get_type_hints(ServerArgs).items():
    if name not in ServerArgs.__struct_fields__ or name.startswith("_"):
        continue
    origin, some = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union and len(some) == 2 and type(None) in some:
        [kind] = (each for each in some if each is not type(None))
        origin, some = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal and all(isinstance(each, str) for each in some):
        kinds_by_name[name] = "choice"
        choices_by_name.setdefault(name, list(some))
    else:
        kinds_by_name[name] = plain.get(origin or kind, "any")
    if kinds_by_name[name] == "string" and name in choices_by_name:
        kinds_by_name[name] = "choice"
print(json.dumps([kinds_by_name, choices_by_name]))
"""


def generated() -> str:
    """Return what the file must be."""
    # Some choices are a set, whose order depends on the seed.
    environment = {**host_environment(os.environ, "cpu"), "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, env=environment)
    kinds_by_name, choices_by_name = json.loads(done.stdout.splitlines()[-1])
    by_type: dict[str, list[str]] = {}
    for name, kind in sorted(kinds_by_name.items()):
        by_type.setdefault(kind, []).append(name)
    kinds = "".join(row(kind, names) for kind, names in sorted(by_type.items()))
    return HEAD + kinds + TAIL % "".join(row(name, words) for name, words in sorted(choices_by_name.items()))


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
