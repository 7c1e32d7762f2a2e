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

from tests.mutants.admission import GATEWAY
from tests.mutants.announcements import TELLING
from tests.mutants.cluster import CLUSTER
from tests.mutants.config import CONFIG
from tests.mutants.engines import ENGINES
from tests.mutants.event_loop import LOOP
from tests.mutants.gateway import DOORS, TEXT
from tests.mutants.grammars import GRAMMARS
from tests.mutants.links import LINKS, Bug
from tests.mutants.outliers import ROUTER
from tests.mutants.permissions import NAMES
from tests.mutants.queues import QUEUE
from tests.mutants.routing import PAIRS
from tests.mutants.simulator import SIM
from tests.mutants.small_pieces import PIECES
from tests.mutants.stalls import STALL
from tests.mutants.supervision import TREE
from tests.mutants.text import SIZES

ROOT = Path(__file__).parents[2]
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
    "streams": ["tests/protocol/test_streams.py", "tests/protocol/test_frames.py"],
    "contract": ["tests/contracts/test_fake_engine.py"],
    "directory": [
        "tests/supervisor/cluster/test_directory.py",
        "tests/supervisor/control/test_control.py",
        "tests/supervisor/cluster/test_mesh_one_link.py",
        "tests/supervisor/cluster/test_mesh_dialing.py",
    ],
    "attached": ["tests/protocol/test_attachments.py", "tests/protocol/test_greeting.py"],
    "router": [
        "tests/actors/test_router.py",
        "tests/actors/routing/test_routed_request_resumes.py",
        "tests/actors/routing/test_routed_request_drains.py",
        "tests/actors/routing/test_outliers.py",
        "tests/actors/routing/test_rebalancing.py",
    ],
    "examples": [
        "tests/actors/kit/test_calls.py",
        "tests/actors/kit/test_priority_inbox.py",
        "tests/supervisor/links/test_link.py",
        "tests/actors/test_decode.py",
        "tests/actors/test_decode_stuck_slots.py",
    ],
    "links": ["tests/supervisor/cluster/test_mesh.py"],
    "stall": ["tests/supervisor/links/test_heartbeat.py", "tests/supervisor/links/test_handshake_stream.py"],
    "telling": [
        "tests/supervisor/cluster/test_announcements.py",
        "tests/supervisor/cluster/test_mesh_one_link.py",
        "tests/supervisor/cluster/test_model_identity.py",
        "tests/protocol/test_greeting.py",
    ],
    "engines": [
        "tests/actors/engines/sglang/test_boot_message.py",
        "tests/actors/engines/sglang/test_adapter.py",
        "tests/protocol/test_model_folder.py",
    ],
    "grammars": ["tests/actors/test_grammars.py", "tests/protocol/test_grammars.py"],
    "config": [
        "tests/supervisor/config/test_load.py",
        "tests/supervisor/node/test_file_checks.py",
        "tests/supervisor/config/test_toml_lines.py",
        "tests/supervisor/node/test_reload.py",
        "tests/supervisor/node/test_gauges.py",
        "tests/supervisor/cli/test_commands.py",
        "tests/supervisor/control/test_control.py",
    ],
    "names": [
        "tests/supervisor/gateway/test_keys_grammars.py",
        "tests/supervisor/gateway/test_requests_promises.py",
        "tests/supervisor/sockets/test_unauthenticated.py",
        "tests/supervisor/links/test_tls.py",
        "tests/supervisor/cluster/test_mesh_unauthenticated.py",
    ],
    "loop": [
        "tests/supervisor/telemetry/test_logs.py",
        "tests/supervisor/processes/test_output_log.py",
        "tests/supervisor/launcher/test_parent_pipe.py",
        "tests/supervisor/telemetry/test_loop_monitor.py",
        "tests/supervisor/launcher/test_node_process.py",
        "tests/rig/test_turns.py",
    ],
    "tree": [
        "tests/supervisor/supervision/test_supervise_siblings.py",
        "tests/supervisor/supervision/test_supervise.py",
        "tests/supervisor/node/test_descriptor_needs.py",
        "tests/supervisor/processes/test_run_folder.py",
        "tests/supervisor/control/test_unix_socket.py",
        "tests/supervisor/cluster/test_engine_control_failures.py",
        "tests/supervisor/supervision/test_supervise_random_trees.py",
    ],
    "text": [
        "tests/actors/text/test_choices.py",
        "tests/actors/text/test_detokenizer.py",
        "tests/actors/text/test_logprobs.py",
        "tests/actors/test_processor.py",
    ],
    "sizes": [
        "tests/supervisor/threads/test_text_threads.py",
        "tests/actors/text/test_encoding.py",
        "tests/actors/text/test_candidates.py",
    ],
    "fair": [
        "tests/actors/kit/test_fair_queue.py",
        "tests/protocol/test_cost.py",
        "tests/actors/kit/test_priority_inbox.py",
        "tests/supervisor/gateway/test_admission.py",
    ],
    "delivery": ["tests/supervisor/gateway/test_requests_delivery.py"],
    "pending": [
        "tests/actors/test_prefill.py",
        "tests/actors/kit/test_pending_prefill.py",
        "tests/actors/engines/simulated/test_rendezvous_rooms.py",
        "tests/supervisor/gateway/websocket/test_message_reader.py",
    ],
    "budgets": ["tests/supervisor/gateway/test_memory_budgets.py"],
    "strangers": [
        "tests/supervisor/sockets/test_unauthenticated.py",
        "tests/supervisor/gateway/http/test_head_checks.py",
    ],
    "pieces": ["tests/supervisor/gateway/websocket/test_frame_counter.py"],
    "doors": [
        "tests/supervisor/gateway/test_admission.py",
        "tests/supervisor/gateway/test_outbox.py",
        "tests/supervisor/gateway/test_server.py",
        "tests/supervisor/gateway/http/test_connection.py",
        "tests/supervisor/gateway/websocket/test_session.py",
        "tests/supervisor/gateway/websocket/test_lanes.py",
        "tests/supervisor/gateway/websocket/test_lanes_ends.py",
        "tests/supervisor/gateway/http/test_exchange_no_memory.py",
    ],
    "cluster": ["tests/system/simulator/test_seeds.py", "-k", "by_a_cluster"],
    "alone": ["tests/system/simulator/test_single_fault.py"],
    "simulation": ["tests/system/simulator/test_seeds.py", "-k", "nothing_false and not by_a_cluster"],
    "sweep": ["tests/system/test_sweep.py", "tests/system/test_sweep_clients.py"],
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
