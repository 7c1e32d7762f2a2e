"""The durations of an engine's step and of an encoder's batch: sums of a few costs, each in seconds."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from protocol.strict.checks import Within

Price = Annotated[float, Within(at_least=0)]


@frozen(kw_only=True)
class Costs:
    """`[engine.NAME.simulated.costs]`: the costs of one engine step, of an abort and of a transfer.

    The defaults are of the order of an 8B model on one recent GPU, and measured on none:
    `python -m bench.calibration.fit` fits them to a server that runs.
    """

    fixed_s: Annotated[float, Within(above=0)] = 0.008  # each step: above all, reading the weights once
    per_prefill_token_s: Price = 0.00003  # each prompt token that the step computes
    per_running_s: Price = 0.00005  # each request that takes part in the step
    per_kv_token_s: Price = 0.0  # each token of KV memory that the step reads
    release_s: Price = 0.0  # from an abort until the slot and its pages are free
    transfer_s: Price = 0.0  # from the end of a prefill until the KV cache is at the decode

    def step_s(self, prefill_tokens: int, running: int, kv_tokens: int) -> float:
        """Return how long a step lasts, in seconds."""
        return (
            self.fixed_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_running_s * running
            + self.per_kv_token_s * kv_tokens
        )


@frozen(kw_only=True)
class EncodingCosts:
    """`[engine.NAME.simulated.encoding_costs]`: the costs of one batch of an encoder, measured on none."""

    fixed_s: Annotated[float, Within(above=0)] = 0.004  # each batch
    per_item_s: Price = 0.001  # each image or video of the batch
    per_token_s: Price = 0.00001  # each token of the batch

    def batch_s(self, items: int, tokens: int) -> float:
        """Return how long a batch lasts, in seconds."""
        return self.fixed_s + self.per_item_s * items + self.per_token_s * tokens
