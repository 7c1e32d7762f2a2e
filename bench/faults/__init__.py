"""Fault scenarios: `python -m bench.faults NAME`. Each does something to running servers, and checks what it costs.

`table` has a row for each scenario, `scenario` runs any of them: every part in a folder of its own, one table of what
was measured, one list of the promises that were broken. The other files are the parts.
"""
