"""Plant one bug at a time in a copy of the code, and say which suites notice: `python -m tests.mutants [WORD ...]`.

A checker that never fails proves nothing. A mutant that survives everything is either harmless, and says here why, or
shows that an oracle is weak. Run by hand or weekly, not on every commit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.planted import LINKS, Bug
from tests.planted_cluster import CLUSTER
from tests.planted_config import CONFIG
from tests.planted_doors import DOORS, TEXT
from tests.planted_engine import ENGINES
from tests.planted_gateway import GATEWAY
from tests.planted_grammars import GRAMMARS
from tests.planted_loop import LOOP
from tests.planted_names import NAMES
from tests.planted_pairs import PAIRS
from tests.planted_pieces import PIECES
from tests.planted_queue import QUEUE
from tests.planted_router import ROUTER
from tests.planted_sim import SIM
from tests.planted_stall import STALL
from tests.planted_telling import TELLING
from tests.planted_text import SIZES
from tests.planted_tree import TREE

ROOT = Path(__file__).parent.parent
PARTS = {  # where a bug of each is likeliest to be noticed
    "links": (LINKS, ("streams", "contract", "examples")),
    "text": (TEXT, ("text",)),
    "sizes": (SIZES, ("sizes", "text")),
    "doors": (DOORS, ("doors",)),
    "gateway": (GATEWAY, ("fair", "delivery", "strangers", "budgets", "doors")),
    "cluster": (CLUSTER, ("streams", "directory", "attached", "examples", "links")),
    "config": (CONFIG, ("config",)),
    "telling": (TELLING, ("telling", "router")),
    "pairs": (PAIRS, ("directory", "router")),
    "pieces": (PIECES, ("pieces", "doors")),
    "loop": (LOOP, ("loop", "examples")),
    "router": (ROUTER, ("router", "examples")),
    "engines": (ENGINES, ("engines",)),
    "sim": (SIM, ("alone", "cluster")),
    "tree": (TREE, ("tree",)),
    "stall": (STALL, ("stall", "examples")),
    "grammars": (GRAMMARS, ("grammars",)),
    "names": (NAMES, ("names",)),
    "queue": (QUEUE, ("pending", "fair")),
}
MUTANTS = [(path, bug, part) for part, (of, _) in PARTS.items() for path, bugs in of.items() for bug in bugs]
SUITES = {  # the quickest first
    "streams": ["tests/test_streams.py", "tests/test_frames.py"],
    "contract": ["tests/test_engine_contract.py"],
    "directory": [f"tests/test_{name}.py" for name in ("directory", "controls", "one_link", "dialing")],
    "attached": ["tests/test_attached.py", "tests/protocol/test_greeting.py"],
    "router": [f"tests/test_{name}.py" for name in ("router", "resumes", "route_drains", "outliers", "moving")],
    "examples": [f"tests/test_{name}.py" for name in ("kit", "queue", "link", "decode", "stuck_slots")],
    "links": ["tests/test_links.py"],
    "stall": ["tests/test_stalls.py", "tests/test_acknowledged.py"],
    "telling": [
        f"tests/{name}.py" for name in ("test_telling", "test_one_link", "test_own_models", "protocol/test_greeting")
    ],
    "engines": [f"tests/{name}.py" for name in ("test_settings", "test_adapter", "protocol/test_model_folder")],
    "grammars": ["tests/test_grammars.py", "tests/protocol/test_grammars.py"],
    "config": [
        f"tests/test_{name}.py"
        for name in ("config", "config_files", "toml_lines", "reloading", "scrape_turns", "operate", "controls")
    ],
    "names": [
        f"tests/test_{name}.py"
        for name in ("grammar_permission", "promised", "strangers", "link_names", "link_strangers")
    ],
    "loop": [f"tests/test_{name}.py" for name in ("say", "chatter", "upward", "turns", "hung", "turn_budget")],
    "tree": [
        f"tests/test_{name}.py"
        for name in (
            "supervise_together",
            "supervise",
            "descriptors",
            "folders",
            "local_control",
            "engine_failures",
            "supervise_any",
        )
    ],
    "text": [f"tests/test_{name}.py" for name in ("choices", "reading", "scores", "processor")],
    "sizes": [f"tests/test_{name}.py" for name in ("text_threads", "encoding", "big_answers")],
    "fair": [f"tests/test_{name}.py" for name in ("fair", "weights", "queue", "gate")],
    "delivery": ["tests/test_delivery.py"],
    "pending": ["tests/test_pending_prefill.py", "tests/simulated/test_legs.py", "tests/test_hearing.py"],
    "budgets": ["tests/test_budgets.py"],
    "strangers": ["tests/test_strangers.py", "tests/test_heads.py"],
    "pieces": ["tests/test_small_pieces.py"],
    "doors": [
        f"tests/test_{name}.py"
        for name in ("gate", "outbox", "gateway", "http_doors", "websocket_door", "lanes", "lane_ends", "no_memory")
    ],
    "cluster": ["tests/test_simulation.py", "-k", "by_a_cluster"],
    "alone": ["tests/test_alone.py"],
    "simulation": ["tests/test_simulation.py", "-k", "nothing_false and not by_a_cluster"],
    "sweep": ["tests/test_sweep.py", "tests/test_sweep_clients.py"],
}
PATIENCE_S = 100  # a suite that hangs has noticed, too


def planted(path: str, bug: Bug, folder: Path) -> Path:
    """Copy what is needed, with the bug in it."""
    for name in ("protocol", "actors", "supervisor", "tests", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "cpu", "*.safetensors")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    text = (folder / path).read_text()
    if text.count(bug.old) != 1:
        sys.exit(f"{bug.name}: what it replaces occurs {text.count(bug.old)} times in {path}")
    (folder / path).write_text(text.replace(bug.old, bug.new))
    return folder


def noticed(folder: Path, arguments: list[str]) -> bool:
    """Run a suite up to its first failure; a suite that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in {0, 1}:  # that is no test's failure
        sys.exit(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 1


@cache
def sound(name: str) -> bool:
    """Whether a suite passes where no bug is planted; one that does not would notice them all."""
    if noticed(ROOT, SUITES[name]):
        sys.exit(f"the suite {name} fails without any bug")
    return True


def verdict(path: str, bug: Bug, suites: list[str], *, first: bool) -> str:
    """Return the suites that notice a bug in a file, or why none need notice, or that none does."""
    by = []
    with tempfile.TemporaryDirectory() as place:
        folder = planted(path, bug, Path(place))
        for name in suites:
            if noticed(folder, SUITES[name]) and sound(name):
                by.append(name)
                if first:
                    break
    return ", ".join(by) or (f"harmless: {bug.harmless}" if bug.harmless else "SURVIVED")


def main() -> int:
    """Try each mutant whose name, or part, has one of the words in it; fail if a harmful one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one")
    parser.add_argument("--first", action="store_true", help="stop at the first suite that notices")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if any(word in f"{each[2]}: {each[1].name}" for word in options.words)]
    survived = 0

    def judged(mutant: tuple[str, Bug, str]) -> str:
        path, bug, part = mutant
        home = PARTS[part][1]
        suites = options.suite or [*home, *(name for name in SUITES if name not in home)]
        return verdict(path, bug, suites, first=options.first)

    with ThreadPoolExecutor(options.processes) as pool:
        for (_, bug, _), said in zip(chosen, pool.map(judged, chosen), strict=True):
            survived += said == "SURVIVED"
            print(f"{bug.name:62s} {said}", flush=True)  # noqa: T201
    print(f"{len(chosen)} planted, {survived} survived")  # noqa: T201
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
