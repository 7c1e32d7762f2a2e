"""`python -m actors.engines.sglang.host LINK NODE LOG BOOT`: become a host without a zygote, as CUDA demands."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from actors.engines.sglang import boot_message
from actors.engines.sglang.host.watchdog import stand


def main() -> None:
    """Read three descriptors and a boot message from the command line, and run the host."""
    link, node, _log = (int(number) for number in sys.argv[1:4])  # the log is this process's output already
    boot = boot_message.decode(sys.argv[4].encode())
    guard = stand(Path(boot.folder), link, node)  # before SGLang is imported, which takes many seconds
    if boot.checks is not None:
        from actors.engines.sglang.host import grammar_checker

        grammar_checker.run(boot, socket.socket(fileno=link), guard)
    from actors.engines.sglang.host import server

    server.run(boot, socket.socket(fileno=link), guard)


if __name__ == "__main__":
    main()
