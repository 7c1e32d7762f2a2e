"""Run the parts, print their tables, and return 1 if a target was missed."""

from __future__ import annotations

import argparse
import sys

from bench import pictures
from bench.pictures import caching, memory, streams
from bench.rig.node import short_folder

PARTS = ("streams", "memory", "cache")


def main() -> int:
    """Run the chosen parts; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=pictures.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--times", type=int, default=5, help="runs of text streams alone and beside pictures, each")
    parser.add_argument("--pictures", type=int, default=memory.PICTURES, help="of the part memory")
    arguments = parser.parse_args()
    wrong: list[str] = []
    for part in arguments.parts:
        with short_folder() as folder:
            match part:
                case "streams":
                    wrong += streams.measure(folder, arguments.times)
                case "memory":
                    wrong += memory.measure(folder, arguments.pictures)
                case _:
                    wrong += caching.measure(folder)
        print(flush=True)
    for sentence in wrong:
        print(f"MISSED: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
