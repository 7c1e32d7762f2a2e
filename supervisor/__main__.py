"""The program `python -m supervisor`: the command line, whose modules take most of a second to import.

Nothing is imported here before Ctrl-C is handled, so that an interrupted start prints no traceback. A SIGHUP, a request
for a reload, is blocked until there is a handler: by default it would end the process.
"""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130  # 128 plus the number of SIGINT, the convention of shells


def main() -> int:
    """Run the command line and return the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    try:
        from supervisor import standard_streams

        standard_streams.prepare()
        from supervisor import command_line

        return command_line.main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:  # raised by an open nursery
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
