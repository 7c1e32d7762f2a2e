"""The process of a host with an engine of SGLang's: its environment, its engine, and what SGLang installs in it.

SGLang takes much of a process for its own: the folder for temporary files, signal handlers, a watchdog, the names of
its sockets. Engines of answers and of vectors differ in what they are asked for, and not in this.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from setproctitle import getproctitle
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs

from actors.engines import leftover_memory
from actors.engines.host.watchdog import Watchdog, print_reason
from actors.engines.sglang.boot_message import BootMessage
from actors.engines.sglang.host import scheduler
from actors.engines.sglang.host.follower_rank import pin_to_cores
from actors.engines.sglang.host.outputs import StepReceiver, StepT


class OwnEngine(Engine):
    """SGLang's engine without its detokenizer process, and with a scheduler that aborts at once."""

    run_scheduler_process_func = staticmethod(scheduler.run)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: object) -> tuple[list[object], list[str]]:
        return [], []


def prepare(boot: BootMessage) -> None:
    """Make this process the host of one engine, before SGLang starts."""
    # The library finds the space for titles by the environment's first variable, which may be changed below.
    getproctitle()
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    os.environ.update(boot.environment)
    rank, ranks = boot.arguments.get("node_rank"), boot.arguments.get("dp_size", 1)
    if boot.arguments.get("device") == "cpu" and (isinstance(rank, int) or ranks != 1):
        pin_to_cores(rank if isinstance(rank, int) else 0, ranks if isinstance(ranks, int) else 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    _hook_ports(Path(boot.folder))


def start_engine(boot: BootMessage, watchdog: Watchdog) -> OwnEngine:
    """Start the engine and watch its processes; raises what SGLang raises, and `RuntimeError` without its limits."""
    engine = OwnEngine(**boot.arguments)
    _require_plugin()
    for pid in engine.get_all_child_pids():
        watchdog.watch_child(pid)
    leftover_memory.record(Path(boot.folder), leftover_memory.mapped())
    return engine


def take_over(engine: OwnEngine, receiver: StepReceiver[StepT], watchdog: Watchdog) -> None:
    """Receive the scheduler's steps in the running loop, with signals and children of this process as a host's."""
    loop, manager = asyncio.get_running_loop(), engine.tokenizer_manager
    receiver.start(loop)
    manager.auto_create_handle_loop()
    # SGLang has just installed signal handlers that drain for seconds, and a watchdog: `Watchdog` replaces both.
    for handled in (signal.SIGTERM, signal.SIGQUIT):
        loop.add_signal_handler(handled, watchdog.end, handled.name)
    if manager._subprocess_watchdog is not None:  # noqa: SLF001
        manager._subprocess_watchdog.stop()  # noqa: SLF001


def end(engine: OwnEngine, folder: Path, watchdog: Watchdog, reason: str) -> NoReturn:
    """Shut the engine down, and end this process."""
    print_reason(reason)
    watchdog.unwatch_children()
    engine.shutdown()
    leftover_memory.remove(folder)
    os._exit(0)


def _hook_ports(folder: Path) -> None:
    """Send the scheduler's output to the tokenizer manager, and record the engine's names in /dev/shm."""
    init_new = PortArgs.init_new

    def hooked(*args: object, **kwargs: object) -> PortArgs:
        ports = init_new(*args, **kwargs)
        ports.detokenizer_ipc_name = ports.tokenizer_ipc_name
        leftover_memory.record(folder, {Path(shm_path_for(ports.instance_id)).name})
        return ports

    PortArgs.init_new = staticmethod(hooked)


def _require_plugin() -> None:
    """Raise `RuntimeError` if SGLang serves without the limits of grammars: it only logs why it loads no plugin."""
    if not import_module("espalier_sglang").active:
        raise RuntimeError("SGLang has not loaded the limits of grammars")
