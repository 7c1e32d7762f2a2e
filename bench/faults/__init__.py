"""Fault scenarios: `python -m bench.faults NAME`. Each injects faults into running servers, and checks the damage.

`table` has a row for each scenario, `scenario` runs any of them: every part in a folder of its own, one table of
measurements, one list of broken promises. The other files are the parts.
"""
