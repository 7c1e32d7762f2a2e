"""`python -m actors.engines.trtllm.host LINK NODE LOG BOOT`: the host of one engine, by an interpreter of its own."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

PYTHON_MIN = (3, 11)


def main() -> None:
    """Run the host of the command line's boot message, over its three descriptors: link, node, log."""
    if sys.version_info < PYTHON_MIN:
        raise SystemExit(f"RuntimeError: the host of an engine needs Python 3.11, and {sys.executable} is older")
    from actors.engines.host.watchdog import start_watchdog
    from actors.engines.trtllm import boot_message
    from protocol.messages.cluster import Leg

    link, node, _log = (int(number) for number in sys.argv[1:4])  # the log is already this process's output
    boot = boot_message.decode(sys.argv[4].encode())
    # The import of TensorRT-LLM takes many seconds: the watchdog runs before it.
    watchdog = start_watchdog(Path(boot.folder), link, node)
    if boot.leg is Leg.ENCODE:
        from actors.engines.trtllm.host.encoder import run
    else:
        from actors.engines.trtllm.host.server import run
    run(boot, socket.socket(fileno=link), watchdog)


if __name__ == "__main__":
    main()
