"""Rules that no linter has: what each room may import, and sizes of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from supervisor.version import CHECKOUT
from tests.mutants.bug import bugs

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "actors", "supervisor", "bench")
FILES = [path.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
LINES_MAX = 400
ACTORS = {f"actors.{path.stem}" for path in FILES if path.parent == Path("actors")} - {"actors.__init__"}
FOLDERS = {f"actors.{path.parts[1]}" for path in FILES if path.parts[0] == "actors" and path.parts[2:]}
TRADE_OF = {
    "processor": ("text", "vision"),
    "router": ("routing",),
    "prefix_subscriber": ("routing",),
    "publisher": ("engines",),
    "decode": ("engines",),
    "prefill": ("engines",),
    "canary": ("engines",),
    "text": ("vision",),
    "encoder": ("engines", "vision"),
    "media": ("vision",),
    "media_decoder": ("vision",),
}
"""The folders that an actor may import beside the kit; an actor without a row, and a folder, imports the kit alone."""
FUNCTION_LINES_MAX = 60

STAGES = Path("bench/stages")  # measures the insides of the product, which the rest of the bench does not know

SGLANG = Path("actors/engines/sglang")
HOST = SGLANG / "host"
DECODER = Path("actors/media_decoder")  # processes that decode what clients send; no node imports it
# Beside the folder of the host: what a node imports too, to remove what hosts left, to compare models, and to share
# memory with hosts of any kind.
SHARED_TENSORS = Path("actors/engines/shared_tensors.py")
SHARED = {SGLANG / "shared_memory.py", SGLANG / "model_files.py", SHARED_TENSORS}

# Time, chance, threads, other loops and the machine: they come in through a parameter, or through the supervisor.
UNTAMED = {"asyncio", "anyio", "threading", "concurrent", "multiprocessing", "uuid", "ctypes", "sglang", "torch"}
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets"}
MACHINE = {"os", "socket", "subprocess", "signal", "select", "fcntl", "shutil", "tempfile", "pathlib", "tomllib", "sys"}
TRADES = {  # what an actor's file may import beside `protocol`, trio and attrs: the libraries of its own trade
    Path("actors/text/model.py"): {"jinja2", "tokenizers"},
    Path("actors/text/chat_template.py"): {"jinja2"},
    Path("actors/text/detokenizer.py"): {"tokenizers"},
    Path("actors/text/logprobs.py"): {"tokenizers"},
    Path("actors/text/whole_tokens.py"): {"tokenizers"},
    SGLANG / "boot_message.py": {"msgspec"},
    Path("actors/vision/jobs.py"): {"msgspec"},
}
HANDS = {  # where clock, chance and libc are taken in hand: each has its reason in the file
    Path("supervisor/command_line.py"): {"random", "time"},
    Path("supervisor/node/node.py"): {"time", "random", "secrets"},
    Path("supervisor/engines/sglang/libraries.py"): {"ctypes"},
    Path("supervisor/processes/reaper.py"): {"time", "ctypes"},
    Path("supervisor/telemetry/loop_monitor.py"): {"time", "threading"},
    Path("supervisor/threads/queued_writer.py"): {"threading"},
}
ENDLESS_SHIELDS = {  # a shield without a deadline is allowed where each thing that it waits for has its own
    ("supervisor/engines/sglang/engine.py", "_host"),
    ("supervisor/launcher/node_process.py", "_shield"),
    ("supervisor/supervision/supervise.py", "run"),
    ("supervisor/supervision/life.py", "Life"),
}


HOST_SIDE = [path for path in FILES if path in SHARED or HOST in path.parents]
DECODER_SIDE = [path for path in FILES if DECODER in path.parents]
NODE_SIDE = [path for path in FILES if path.parts[0] != "bench" and path not in {*HOST_SIDE, *DECODER_SIDE}]
each_file = pytest.mark.parametrize("path", FILES, ids=str)
each_node_file = pytest.mark.parametrize("path", NODE_SIDE, ids=str)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def imports(path: Path, *, top: bool = False) -> Iterator[str]:
    """Name every module that a file imports, and what it imports from packages of ours, wherever in it or at its top."""
    package = path.parent.parts
    for node in tree(path).body if top else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            if (ROOT / module.replace(".", "/")).is_dir():
                yield from (f"{module}.{alias.name}" for alias in node.names)


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def foreign(path: Path) -> set[str]:
    return roots(path) - set(sys.stdlib_module_names) - {"__future__"}


def in_room(room: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [path for path in NODE_SIDE if path.parts[0] == room], ids=str)


# Imports ----------------------------------------------------------------------------------


@in_room("protocol")
def test_the_protocol_is_pure_data(path: Path) -> None:
    found = foreign(path) - {"protocol", "attr", "attrs", "cattrs", "msgspec"}
    found |= roots(path) & (UNTAMED | CLOCKS_AND_CHANCE | MACHINE | {"logging"})
    assert not found, f"{path} imports {sorted(found)}: protocol/ is data, without I/O, clocks, randomness and Trio"


@in_room("actors")
def test_an_actor_imports_only_the_libraries_of_its_row(path: Path) -> None:
    libraries = foreign(path) - {"protocol", "actors", "trio", "attrs"} - TRADES.get(path, set()) - UNTAMED
    assert not libraries, f"{path} imports {sorted(libraries)}: take it as a parameter, or add a row to TRADES here"
    machine = roots(path) & (UNTAMED | CLOCKS_AND_CHANCE | MACHINE)
    assert not machine, f"{path} imports {sorted(machine)}: take what you need of it as a parameter"


@in_room("actors")
def test_an_actor_imports_no_other_actor(path: Path) -> None:
    found = theirs(path, ACTORS)
    assert not found, f"{path} imports {sorted(found)}: take the other actor's address as a parameter"


@in_room("actors")
def test_an_actor_imports_the_kit_and_the_folders_of_its_trade_alone(path: Path) -> None:
    own = module(path).split(".")[1:2] or [""]
    found = theirs(path, FOLDERS - {f"actors.{name}" for name in ("kit", *own, *TRADE_OF.get(own[0], ()))})
    assert not found, (
        f"{path} imports {sorted(found)}: beside kit/ an actor imports what its row in TRADE_OF here names"
    )


@in_room("actors")
def test_an_engine_is_imported_by_its_own_folder_alone(path: Path) -> None:
    found = theirs(path, {f"actors.engines.{folder.name}" for folder in (ROOT / "actors/engines").iterdir()})
    assert not found, f"{path} imports {sorted(found)}: engines share only the files that lie in actors/engines/ itself"


def theirs(path: Path, modules: set[str]) -> set[str]:
    """Return what a file imports of these modules and packages, but for those that it is or belongs to."""
    foreign = {each for each in modules if not f"{module(path)}.".startswith(f"{each}.")}
    return {name for name in imports(path) if any(f"{name}.".startswith(f"{each}.") for each in foreign)}


def test_what_is_called_an_actor_is_one() -> None:
    assert {"actors.decode", "actors.prefill", "actors.processor", "actors.router"} <= ACTORS
    folders = {f"actors.{name}" for name in ("engines", "kit", "media_decoder", "routing", "text", "vision")}
    assert folders == FOLDERS, "name a new folder here, and in TRADE_OF at the actor that may import it"
    assert theirs(Path("actors/decode.py"), {"actors.engines"})
    assert theirs(Path("actors/router.py"), {"actors.routing"})
    assert not theirs(Path("actors/routing/route.py"), {"actors.routing"})


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[:2] == ("supervisor", "config")], ids=str)
def test_the_configuration_imports_nothing_that_reads_it(path: Path) -> None:
    """Limits of actors and of processes stand in it; whoever runs by them imports it, and never the other way round."""
    below = {"config", "files", "processes", "engines"}
    addresses = "supervisor.links.endpoint"
    rooms = {name.split(".")[1] for name in {*imports(path)} - {addresses} if name.startswith("supervisor.")}
    assert rooms <= below, f"it imports {sorted(rooms - below)}"


@in_room("supervisor")
def test_the_supervisor_imports_clocks_and_randomness_in_few_files(path: Path) -> None:
    found = roots(path) & (UNTAMED | CLOCKS_AND_CHANCE) - HANDS.get(path, set())
    assert not found, f"{path} imports {sorted(found)}: take it from `Runtime`, or add a row to HANDS here"
    assert not roots(path) & {"bench", "tests"}


@each_node_file
def test_a_node_imports_nothing_of_the_engine_host_and_of_the_decoders(path: Path) -> None:
    assert not theirs(path, {module(HOST), module(DECODER)})


@pytest.mark.parametrize("path", DECODER_SIDE, ids=str)
def test_a_decoder_imports_the_protocol_and_its_jobs_alone(path: Path) -> None:
    ours = {name for name in imports(path) if name.partition(".")[0] in ROOMS}
    own = ("protocol", "actors.media_decoder", "actors.vision.jobs")
    assert all(name.startswith(own) or name == "actors.vision" for name in ours), ours
    assert not foreign(path) - {"PIL", "attrs", "av", "actors", "protocol"}


@pytest.mark.parametrize("path", HOST_SIDE, ids=str)
def test_the_engine_host_imports_its_own_engine_and_the_protocol_alone(path: Path) -> None:
    ours = {name for name in imports(path) if name.partition(".")[0] in ROOMS}
    pure = (
        "actors.engines.block_log",
        "actors.engines.media_check",
        "actors.vision.layout",
        "actors.vision.model_files",
    )
    allowed = ("protocol", "actors.engines.sglang", *pure, module(SHARED_TENSORS))
    assert all(name.startswith(allowed) for name in ours)
    assert "trio" not in roots(path)


@each_node_file
def test_the_environment_is_read_where_the_process_begins(path: Path) -> None:
    names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert path == Path("supervisor/command_line.py") or not names & {"environ", "getenv"}


@in_room("actors")
def test_no_actor_starts_a_thread(path: Path) -> None:
    names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert not names & {"to_thread", "from_thread"}


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "bench"], ids=str)
def test_the_bench_imports_only_what_a_client_may_but_for_its_stages(path: Path) -> None:
    insides = set() if STAGES in path.parents else {"actors", "supervisor"}
    assert not roots(path) & (insides | {"tests", "sglang", "torch"})
    assert STAGES in path.parents or not theirs(path, {module(STAGES)})


def test_no_module_imports_itself_indirectly() -> None:
    """Else it depends on who is imported first whether a program starts."""
    modules = {module(path): path for path in FILES}
    graph = {name: set(imports(path, top=True)) & modules.keys() - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


def test_importing_a_whole_node_imports_neither_torch_nor_sglang() -> None:
    names = [module(path) for path in NODE_SIDE if path.name != "__main__.py"]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "sglang", "transformers", "numpy", "PIL", "av"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# Sizes and manners ------------------------------------------------------------------------


@each_file
def test_files_and_functions_are_below_their_limits_of_lines(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines < LINES_MAX, f"{path} has {lines} lines: split it by subject, below {LINES_MAX}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines < FUNCTION_LINES_MAX, f"{node.name} has {lines} lines: split it, below {FUNCTION_LINES_MAX}"


def shields(node: ast.AST) -> list[ast.Call]:
    return [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
        and any(word.arg == "shield" and getattr(word.value, "value", None) is True for word in inner.keywords)
    ]


@each_node_file
def test_a_function_has_at_most_one_shield_and_it_has_a_deadline(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            fields = [each for each in getattr(node, "body", []) if isinstance(each, ast.AnnAssign)]
            of_class = isinstance(node, ast.ClassDef)
            found = [call for field in fields for call in shields(field)] if of_class else shields(node)
            assert len(found) <= 1, f"{node.name} shields twice"
            endless = [call for call in found if getattr(call.func, "attr", "") == "CancelScope"]
            assert not endless or (str(path), node.name) in ENDLESS_SHIELDS, f"{node.name} shields without a deadline"


@each_node_file
def test_no_handler_catches_a_cancellation(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            assert "Cancelled" not in caught
            if "BaseException" in caught and "Group" not in caught:
                assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), "it must be raised again"


@each_file
def test_no_file_has_an_open_task(path: Path) -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert not any(word in (ROOT / path).read_text() for word in words)


@each_file
def test_a_docstring_begins_with_a_noun_phrase_or_a_verb(path: Path) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    heads = [ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    asking = [head for head in heads if head.partition(" ")[0] in {"What", "Who", "Whose", "How", "Where"}]
    assert not asking, f"{path}: name the thing itself"


def test_the_version_of_a_checkout_is_that_of_its_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == CHECKOUT


def test_the_rules_see_every_room() -> None:
    assert {path.parts[0] for path in FILES} == set(ROOMS)
    assert all((ROOT / path).exists() for path in {HOST, DECODER, STAGES, *SHARED, *TRADES, *HANDS})


def test_planted_bugs_are_a_list_of_classes_that_a_reader_can_hold() -> None:
    assert len(list(bugs())) <= 150, "leave out a bug of the same class"
