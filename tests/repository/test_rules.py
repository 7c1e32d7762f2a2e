"""Rules that no linter has: what each room may import, and sizes of files and functions.

Each rule is one test over all files; it fails with every file that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from supervisor.version import CHECKOUT
from tests.repository.sources import (
    FILES,
    ROOMS,
    ROOT,
    foreign,
    imports,
    module,
    nodes,
    refuse,
    roots,
    text,
    theirs,
)

LINES_MAX = 400
ACTORS_IN_FOLDERS = {"actors.media.media"}
ACTORS = {module(path) for path in FILES if path.parent == Path("actors")} - {"actors"} | ACTORS_IN_FOLDERS
FOLDERS = {f"actors.{path.parts[1]}" for path in FILES if path.parts[0] == "actors" and path.parts[2:]}
TRADE_OF = {
    "processor": ("text", "media"),
    "router": ("routing",),
    "publisher": ("engines",),
    "decode": ("engines",),
    "prefill": ("engines",),
    "canary": ("engines",),
    "text": ("media",),
    "encoder": ("engines", "media"),
    "embedder": ("engines",),
    "embedding": ("engines", "routing", "text"),
}
"""The folders that an actor may import beside the kit; an actor without a row, and a folder, imports the kit alone."""
FUNCTION_LINES_MAX = 60

STAGES = Path("bench/stages")  # measures the insides of the product, which the rest of the bench does not know

SGLANG = Path("actors/engines/sglang")
HOSTS = {path.parent for path in FILES if path.match("actors/engines/*/host/__init__.py")} | {
    Path("actors/engines/host")
}
DECODER = Path("actors/media/decoder")  # processes that decode what clients send; no node imports it
# Beside the folder of the host: files that a node imports too, to remove what hosts left, to compare models, and to
# share memory with hosts of any kind.
ENGINES = Path("actors/engines")
SHARED = {
    ENGINES / name
    for name in (
        "adapter_files.py",
        "leftover_memory.py",
        "model_files.py",
        "sglang/embedding_model.py",
        "shared_tensors.py",
    )
}

# Time, chance, threads, other loops and the machine: they come in through a parameter, or through the supervisor.
UNTAMED = {"asyncio", "anyio", "threading", "concurrent", "multiprocessing", "uuid", "ctypes", "sglang", "torch"}
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets"}
MACHINE = {"os", "socket", "subprocess", "signal", "select", "fcntl", "shutil", "tempfile", "pathlib", "tomllib", "sys"}
TRADES = {  # what an actor's file may import beside `protocol`, trio and attrs: the libraries of its own trade
    Path("actors/text/encoders.py"): {"tokenizers"},
    Path("actors/text/model.py"): {"tokenizers"},
    Path("actors/text/embedding_model.py"): {"msgspec", "tokenizers"},
    Path("actors/text/conversations.py"): {"jinja2"},
    Path("actors/text/template_names.py"): {"jinja2"},
    Path("actors/text/template_variables.py"): {"jinja2"},
    Path("actors/text/chat_template.py"): {"jinja2"},
    Path("actors/text/template_loops.py"): {"jinja2"},
    Path("actors/text/template_sizes.py"): {"jinja2"},
    Path("actors/text/template_steps.py"): {"jinja2"},
    Path("actors/text/conformance.py"): {"jsonschema_rs"},
    Path("actors/text/detokenizer.py"): {"tokenizers"},
    Path("actors/text/logprobs.py"): {"tokenizers"},
    Path("actors/text/whole_tokens.py"): {"tokenizers"},
    SGLANG / "boot_message.py": {"msgspec"},
    ENGINES / "trtllm/boot_message.py": {"msgspec"},
    ENGINES / "trtllm/handed.py": {"msgspec"},
    Path("actors/media/jobs.py"): {"msgspec"},
}
HANDS = {  # where clock, chance and libc are taken in hand: each has its reason in the file
    Path("supervisor/command_line.py"): {"random", "time"},
    Path("supervisor/node/node.py"): {"random"},
    Path("supervisor/node/start.py"): {"time", "random", "secrets"},
    Path("supervisor/engines/sglang/libraries.py"): {"ctypes"},
    Path("supervisor/media/filter_check.py"): {"ctypes"},
    Path("supervisor/processes/reaper.py"): {"time", "ctypes"},
    Path("supervisor/telemetry/loop_monitor.py"): {"time", "threading"},
    Path("supervisor/tensors/transfer_agent.py"): {"ctypes"},
    Path("supervisor/threads/queued_writer.py"): {"threading"},
    Path("supervisor/threads/text_threads.py"): {"threading"},
}
ENDLESS_SHIELDS = {  # a shield without a deadline is allowed where each thing that it waits for has its own
    ("supervisor/engines/host/life.py", "run_host"),
    ("supervisor/launcher/node_process.py", "_shield"),
    ("supervisor/supervision/supervise.py", "run"),
    ("supervisor/supervision/life.py", "Life"),
}


KINDS = {f"actors.engines.{path.parts[2]}" for path in FILES if path.name == "spec.py"}

HOST_SIDE = [path for path in FILES if path in SHARED or HOSTS & {*path.parents}]
DECODER_SIDE = [path for path in FILES if DECODER in path.parents]
NODE_SIDE = [path for path in FILES if path.parts[0] != "bench" and path not in {*HOST_SIDE, *DECODER_SIDE}]
PROTOCOL, IN_ACTORS, SUPERVISOR = ([path for path in NODE_SIDE if path.parts[0] == room] for room in ROOMS[:3])
BENCH = [path for path in FILES if path.parts[0] == "bench"]


# Imports ----------------------------------------------------------------------------------


def refuse_imports(found: dict[Path, set[str]], why: str) -> None:
    refuse(f"{path} imports {sorted(names)}: {why}" for path, names in found.items() if names)


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.partition(".")[0] in ROOMS}


def test_the_protocol_is_pure_data() -> None:
    pure, barred = (
        {"protocol", "attr", "attrs", "cattrs", "msgspec"},
        UNTAMED | CLOCKS_AND_CHANCE | MACHINE | {"logging"},
    )
    found = {path: foreign(path) - pure | roots(path) & barred for path in PROTOCOL}
    refuse_imports(found, "protocol/ is data, without I/O, clocks, randomness and Trio")


def test_an_actor_imports_only_the_libraries_of_its_row() -> None:
    common = {"protocol", "actors", "trio", "attrs", *UNTAMED}
    found = {path: foreign(path) - common - TRADES.get(path, set()) for path in IN_ACTORS}
    refuse_imports(found, "take it as a parameter, or add a row to TRADES here")


def test_an_actor_imports_neither_clocks_nor_the_machine() -> None:
    found = {path: roots(path) & (UNTAMED | CLOCKS_AND_CHANCE | MACHINE) for path in IN_ACTORS}
    refuse_imports(found, "take what you need of it as a parameter")


def test_an_actor_imports_no_other_actor() -> None:
    found = {path: theirs(path, ACTORS) for path in IN_ACTORS}
    refuse_imports(found, "take the other actor's address as a parameter")


def test_an_actor_imports_the_kit_and_the_folders_of_its_trade_alone() -> None:
    own = {path: (module(path).split(".")[1:2] or [""])[0] for path in IN_ACTORS}
    may = {path: {f"actors.{each}" for each in ("kit", name, *TRADE_OF.get(name, ()))} for path, name in own.items()}
    found = {path: theirs(path, FOLDERS - may[path]) for path in IN_ACTORS}
    refuse_imports(found, "beside kit/ an actor imports what its row in TRADE_OF here names")


def test_an_engine_is_imported_by_its_own_folder_alone() -> None:
    found = {path: theirs(path, KINDS) for path in IN_ACTORS}
    refuse_imports(found, "a kind of engine shares nothing with another but what lies beside both")


def test_what_is_called_an_actor_is_one() -> None:
    assert {"actors.decode", "actors.prefill", "actors.processor", "actors.router"} <= ACTORS
    folders = {f"actors.{name}" for name in ("engines", "kit", "media", "routing", "text")}
    assert folders == FOLDERS, "name a new folder here, and in TRADE_OF at the actor that may import it"
    assert theirs(Path("actors/decode.py"), {"actors.engines"})
    assert theirs(Path("actors/router.py"), {"actors.routing"})
    assert not theirs(Path("actors/routing/route.py"), {"actors.routing"})


def test_the_configuration_imports_nothing_that_reads_it() -> None:
    may = tuple(f"supervisor.{room}" for room in ("config", "files", "processes", "engines", "links.endpoint"))
    files = [path for path in SUPERVISOR if path.parts[1] == "config"]
    found = {
        path: {name for name in ours(path) if name[:11] == "supervisor." and not name.startswith(may)} for path in files
    }
    refuse_imports(found, "what runs by the limits in the configuration imports it, not the other way round")


def test_the_supervisor_imports_clocks_and_randomness_in_few_files() -> None:
    found = {path: roots(path) & (UNTAMED | CLOCKS_AND_CHANCE) - HANDS.get(path, set()) for path in SUPERVISOR}
    refuse_imports(found, "take it from `Runtime`, or add a row to HANDS here")


def test_a_node_imports_nothing_of_benches_tests_engine_hosts_and_decoders() -> None:
    found = {path: theirs(path, {*map(module, HOSTS), module(DECODER), "bench", "tests"}) for path in NODE_SIDE}
    refuse_imports(found, "it runs in a node")


def test_a_decoder_imports_the_protocol_and_its_jobs_alone() -> None:
    may = ("protocol", "actors.media.decoder", "actors.media.jobs")
    found = {
        path: {name for name in ours(path) - {"actors.media"} if not name.startswith(may)} for path in DECODER_SIDE
    }
    found = {path: names | foreign(path) - {"PIL", "attrs", "av", *ROOMS} for path, names in found.items()}
    refuse_imports(found, "it reads what clients send, in a process of its own")


def test_the_engine_host_imports_its_own_engine_and_the_protocol_alone() -> None:
    pure = (
        "actors.engines.adapter_table",
        "actors.engines.blocks.block_log",
        "actors.engines.expert_record",
        "actors.engines.handlers",
        "actors.engines.host",
        "actors.engines.host_ends",
        "actors.engines.media_check",
        "actors.engines.profile_check",
        "actors.engines.request_check",
        "actors.media.layout",
        "actors.media.model_files",
    )
    may = ("protocol", *pure, *map(module, SHARED))
    packages = {"actors.engines", "actors.engines.blocks"}  # by themselves, in `from PACKAGE import FILE`
    for path in HOST_SIDE:
        own = f"actors.engines.{path.parts[2]}"
        found = {name for name in ours(path) - packages if not name.startswith((*may, own))}
        refuse_imports({path: found | roots(path) & {"trio"}}, "the process of an engine has it")


def attributes(path: Path) -> set[str]:
    return {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}


def test_the_environment_is_read_where_the_process_begins() -> None:
    readers = {path for path in NODE_SIDE if attributes(path) & {"environ", "getenv"}}
    assert readers <= {Path("supervisor/command_line.py")}


def test_no_actor_starts_a_thread() -> None:
    assert not [path for path in IN_ACTORS if attributes(path) & {"to_thread", "from_thread"}]


def test_the_bench_imports_only_what_a_client_may_but_for_its_stages() -> None:
    outside = [path for path in BENCH if path.parent.name != "plugin"]  # that runs in SGLang's processes
    found = {path: roots(path) & {"tests", "sglang", "torch"} for path in outside}
    for path in (path for path in outside if STAGES not in path.parents):
        found[path] |= roots(path) & {"actors", "supervisor"} | theirs(path, {module(STAGES)})
    refuse_imports(found, "a bench measures from outside")


def test_no_module_imports_itself_indirectly() -> None:
    """Else it depends on who is imported first whether a program starts."""
    modules = {module(path): path for path in FILES}
    graph = {name: imports(path, top=True) & modules.keys() - {name} for name, path in modules.items()}
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


# A kind of engines, and the words of the product -------------------------------------------


KIND_NAMES = {kind.rpartition(".")[2] for kind in KINDS}
KIND_FOLDERS = {f"{room}.engines.{name}" for name in KIND_NAMES for room in ("actors", "supervisor")}
TABLE_OF_KINDS = Path("supervisor/engines/kinds.py")


def of_kind(path: Path) -> bool:
    return f"{module(path)}.".startswith(tuple(f"{folder}." for folder in KIND_FOLDERS))


def test_a_kind_of_engine_is_imported_by_its_own_folders_and_the_table_alone() -> None:
    neutral = [path for path in NODE_SIDE if not of_kind(path) and path != TABLE_OF_KINDS]
    refuse_imports({path: theirs(path, KIND_FOLDERS) for path in neutral}, "ask for it by the kind's row in KINDS")
    assert theirs(TABLE_OF_KINDS, KIND_FOLDERS), "the table imports every kind"


def test_a_neutral_file_tests_for_no_kind_and_no_policy_by_its_name() -> None:
    words = KIND_NAMES | {"kv"}
    refuse(
        f"{path}:{node.lineno}: a field of its row says what is to be known of it"
        for path in SUPERVISOR
        if not of_kind(path)
        for node in nodes(path)
        if isinstance(node, ast.Compare)
        and words & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    )


def classes_named(ending: str) -> set[str]:
    names = {node.name for path in NODE_SIDE for node in nodes(path) if isinstance(node, ast.ClassDef)}
    requests = ("Get", "Watch")  # for a load that has a name of its own
    return {name for name in names if re.search(ending, name) and not name.startswith(("_", *requests))}


def test_there_are_four_kinds_of_load_and_four_of_worker() -> None:
    assert classes_named(r"Loads?$|^Load[A-Z]") - {"LoadAdapter"} == {"Load", "LoadUpdate", "EngineLoad", "RankLoad"}
    assert classes_named(r"Worker$") == {"Worker", "ClusterWorker", "LocalWorker", "RemoteWorker"}


# Sizes and manners ------------------------------------------------------------------------


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_are_below_their_limit_of_lines() -> None:
    sizes = {path: len(text(path).splitlines()) for path in FILES}
    refuse(f"{path} has {size} lines: split it by subject" for path, size in sizes.items() if size >= LINES_MAX)


def test_functions_are_below_their_limit_of_lines() -> None:
    sizes = [(path, node, (node.end_lineno or 0) - node.lineno + 1) for path in FILES for node in functions(path)]
    refuse(
        f"{path}: {node.name} has {size} lines: split it" for path, node, size in sizes if size >= FUNCTION_LINES_MAX
    )


def shields(node: ast.AST) -> list[ast.Call]:
    return [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
        and any(word.arg == "shield" and getattr(word.value, "value", None) is True for word in inner.keywords)
    ]


def shields_of_class(node: ast.ClassDef) -> list[ast.Call]:
    return [call for field in node.body if isinstance(field, ast.AnnAssign) for call in shields(field)]


def test_a_function_has_at_most_one_shield_and_it_has_a_deadline() -> None:
    found = [(path, node.name, shields(node)) for path in NODE_SIDE for node in functions(path)]
    classes = [(path, node) for path in NODE_SIDE for node in nodes(path) if isinstance(node, ast.ClassDef)]
    found += [(path, node.name, shields_of_class(node)) for path, node in classes]
    refuse(f"{path}: {name} shields twice" for path, name, calls in found if len(calls) > 1)
    refuse(
        f"{path}: {name} shields without a deadline"
        for path, name, calls in found
        if any(getattr(call.func, "attr", "") == "CancelScope" for call in calls)
        and (str(path), name) not in ENDLESS_SHIELDS
    )


def keeps_a_cancellation(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    if "BaseException" in caught and "Group" not in caught:
        return not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    return "Cancelled" in caught


def test_no_handler_catches_a_cancellation_for_good() -> None:
    refuse(
        f"{path}:{node.lineno}: raise it again"
        for path in NODE_SIDE
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and keeps_a_cancellation(node)
    )


def test_no_file_has_an_open_task() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert not [path for path in FILES if any(word in text(path) for word in words)]


def test_a_docstring_begins_with_a_noun_phrase_or_a_verb() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    heads = [(path, ast.get_docstring(node) or "") for path in FILES for node in nodes(path) if isinstance(node, kinds)]
    asking = {"What", "Who", "Whose", "How", "Where"}
    refuse(f"{path}: name the thing itself: {head}" for path, head in heads if head.partition(" ")[0] in asking)


def test_the_version_of_a_checkout_is_that_of_its_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == CHECKOUT


def test_the_rules_see_every_room() -> None:
    assert {path.parts[0] for path in FILES} == set(ROOMS)
    assert all((ROOT / path).exists() for path in {*HOSTS, DECODER, STAGES, *SHARED, *TRADES, *HANDS})
