"""The program `python -m supervisor`: the command line, whose modules take most of a second to import.

Nothing is imported here before Ctrl-C has its meaning, so that an operator who interrupts a start sees no traceback. A
SIGHUP that asks for a reload waits until there is a handler for it: by default it would end the process.
"""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def main() -> int:
    """Run the command line and return the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    try:
        from supervisor import command_line

        return command_line.main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:  # from a nursery that was open
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
