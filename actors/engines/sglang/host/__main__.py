"""`python -m actors.engines.sglang.host LINK NODE LOG BOOT`: a host that is spawned, since CUDA cannot be forked."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from actors.engines.host.watchdog import start_watchdog
from actors.engines.sglang import boot_message


def main() -> None:
    """Run the host of the command line's boot message, over its three descriptors: link, node, log."""
    link, node, _log = (int(number) for number in sys.argv[1:4])  # the log is already this process's output
    boot = boot_message.decode(sys.argv[4].encode())
    # The import of SGLang takes many seconds: the watchdog runs before it.
    watchdog = start_watchdog(Path(boot.folder), link, node)
    if boot.checks is not None:
        from actors.engines.sglang.host.grammars import grammar_checker

        grammar_checker.run(boot, socket.socket(fileno=link), watchdog)
    if boot.task is not None:
        from actors.engines.sglang.host.embedding import server as embedding_server

        embedding_server.run(boot, socket.socket(fileno=link), watchdog)
    if boot.batch_max is not None:
        from actors.engines.sglang.host.vision import encoder

        encoder.run(boot, socket.socket(fileno=link), watchdog)
    from actors.engines.sglang.host import server

    server.run(boot, socket.socket(fileno=link), watchdog)


if __name__ == "__main__":
    main()
