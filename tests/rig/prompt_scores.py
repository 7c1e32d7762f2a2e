"""The log probabilities of prompts, as every worker of a test without an engine answers them."""

from __future__ import annotations

from actors.engines.simulated.scores import PromptScorer
from protocol.messages.generation import Generate, PromptScores


def scores_of(request: Generate, vocabulary_size: int = 512, seed: int = 0) -> PromptScores | None:
    """Return the log probabilities of a request's prompt, None if they are not wanted."""
    if not request.prompt_logprobs:
        return None
    scorer = PromptScorer(vocabulary_size, request.logprobs or 0, seed)
    scorer.add(request.tokens[: len(request.tokens) - request.resumed_tokens])
    return scorer.scores()
