"""Attacks from outside, each beside an honest client: `python -m bench.attacks [--only NAME] [--engines sglang]`.

An attack is legal or nearly so: large answers, slow readers, connections without a key, engines that fail. Beside each,
an honest client with a key of its own streams answers. None of them may be lost, and no gap between two of their tokens
may be longer than the engine's own by more than `GAP_S_MAX`.
"""

GAP_S_MAX = 0.25
