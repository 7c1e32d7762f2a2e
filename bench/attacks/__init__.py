"""Attacks from outside, each beside an honest client: `python -m bench.attacks [--only NAME] [--engines sglang]`.

An attack is legal or nearly so: big answers, slow readers, strangers, engines that fail. In each, an honest client with
a key of its own streams and asks beside it. None of its answers may be lost, and no gap between two of its tokens may
be longer than the engine's own by more than `GAP_S_MAX`.
"""

GAP_S_MAX = 0.25
