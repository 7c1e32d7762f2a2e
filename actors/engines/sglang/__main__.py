"""`python -m actors.engines.sglang LINK NODE LOG BOOT`: become a host without a zygote, as CUDA demands."""

from __future__ import annotations

import socket
import sys

from actors.engines.sglang import settings


def main() -> None:
    """Read three descriptors and a boot message from the command line, and run the host."""
    link, node, log = (int(number) for number in sys.argv[1:4])
    from actors.engines.sglang import host

    host.run(settings.decode(sys.argv[4].encode()), socket.socket(fileno=link), node, log)


if __name__ == "__main__":
    main()
