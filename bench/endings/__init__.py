"""The endings of a node, and its recovery when one of its processes dies: each scene ten times, with times.

Each scene kills or signals a process, raises `AssertionError` if a promise was broken, and returns the seconds that the
reaction took. `python -m bench.endings` prints a table, and compares the times with those that are promised, which only
a quiet machine keeps; `tests/system/processes/test_endings.py` runs each scene once.
"""
