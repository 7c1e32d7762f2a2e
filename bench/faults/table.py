"""The table of fault scenarios: their measurements, their columns, and their options with defaults."""

from __future__ import annotations

from bench.faults import aborts, attacks, growth, pictures, servers, slowdown, zombies
from bench.faults.chaos import KINDS, chaos
from bench.faults.endings import endings
from bench.faults.media_aborts import media_abort_times
from bench.faults.pair_aborts import TARGET_P90_MS, pair_abort_times
from bench.faults.rolling import rolling
from bench.faults.scenario import Scenario

TRIES = {"tries": (50, "of each stage")}
ENGINES = {"engines": (tuple(KINDS), "of the workers")}
SEED = {"seed": (20, "of all that is random")}
TIMES = {"times": (5, "runs alone and beside the others, each")}
SERVERS = ["espalier", "sglang", "dynamo", "smg"]

SCENARIOS = {
    "soak": Scenario(
        "Many requests on a real engine, of which a third are left early: does anything grow, is any answer wrong?",
        growth.soak,
        growth.COLUMNS,
        {"requests": (2000, "in all"), "concurrency": (16, "clients at once"), **SEED},
    ),
    "chaos": Scenario(
        "Random faults under load: killed, stopped and drained processes, cut links: is any answer wrong?",
        chaos,
        ("outcome", "requests"),
        {
            **ENGINES,
            "minutes": (10.0, "of faults"),
            **SEED,
        },
    ),
    "rolling": Scenario(
        "Each node is drained and restarted in turn under load: is any request refused or truncated?",
        rolling,
        ("node", "drained s", "back s", "moved"),
        {
            **ENGINES,
            "rounds": (0, "how often each worker is restarted; 0: 5 times, real engines once"),
            "gateways": (1, "fronts that share the port"),
            "policy": ("least_loaded", "of routing; with kv, how many requests were routed blind"),
            **SEED,
        },
    ),
    "siege": Scenario(
        "Wrong keys, slow heads and a flood of connections: how long do others wait for their first token (p99)?",
        slowdown.siege,
        slowdown.COLUMNS,
        {"clients": (32, "of each run"), "seconds": (12.0, "of each run"), **TIMES},
    ),
    "crowd": Scenario(
        "Clients that never read what they asked for: how long do others wait from token to token (p99)?",
        slowdown.crowd,
        slowdown.COLUMNS,
        {"clients": (500, "that read"), "mutes": (10, "that never read"), **TIMES},
    ),
    "attacks": Scenario(
        "Attacks beside an honest client: is any of its answers lost, and does any token come late?",
        attacks.attacks,
        attacks.COLUMNS,
    ),
    "endings": Scenario(
        "Every way in which a node or one of its processes ends: what becomes of streams, and what is left?",
        endings,
        ("what happens", "what is timed", "tries", "s"),
        {"times": (10, "tries of each scene")},
    ),
    "abort-times": Scenario(
        "From a client's close until its request is out of a real engine",
        aborts.abort_times,
        aborts.COLUMNS,
        TRIES,
    ),
    "pair-abort-times": Scenario(
        "From a client's close until its request is out of both engines of a pair",
        pair_abort_times,
        aborts.COLUMNS,
        {"kind": (("both", *TARGET_P90_MS), "of engines"), **TRIES},
    ),
    "media-abort-times": Scenario(
        "From a client's close until nothing of its request with a picture is left anywhere",
        media_abort_times,
        aborts.COLUMNS,
        TRIES,
    ),
    "picture-streams": Scenario(
        "Text streams beside clients that send pictures: how long do they wait from token to token (p99)?",
        pictures.streams,
        slowdown.COLUMNS,
        TIMES,
    ),
    "picture-memory": Scenario(
        "Many different pictures: does anything grow?",
        pictures.memory,
        growth.COLUMNS,
        {"pictures": (2000, "in all")},
    ),
    "zombies": Scenario(
        "Clients that leave: for how long does a server's engine compute on for nobody?",
        zombies.zombies,
        zombies.COLUMNS,
        {"servers": (SERVERS, "to measure"), "tries": (3, "of each")},
        zombies.NOTE,
    ),
    "resume": Scenario(
        "The death of a worker under streams: when does each go on, and is its text exact?",
        servers.resume,
        servers.RESUME_COLUMNS,
        {
            "servers": (["espalier", "espalier-nodes", "dynamo", "smg", "sglang"], "to measure"),
            "tries": (1, "of each death, each on a new server"),
        },
        servers.RESUME_NOTE,
    ),
    "shutdown": Scenario(
        "The end of a server, idle or in the middle of answers: how long, what is lost, what is left?",
        servers.shutdown,
        servers.SHUTDOWN_COLUMNS,
        {"servers": (SERVERS, "to measure"), "tries": (1, "of each scene")},
        servers.SHUTDOWN_NOTE,
    ),
}
