"""Prompts of the benches, in words that are in the training data of the tiny model of `examples/`."""

OAK_PROMPT = "Tell me about the oak"
STORY_PROMPT = "Tell me a long story about the fox"  # its answer has some hundred tokens
PROMPTS = (
    OAK_PROMPT,
    "Say hello in Japanese",
    "What is the capital of Paraguay?",
    "Tell me a story about the fox",
    "Tell me about the willow",
    "Write a poem about the moon",
)
"""Prompts with different answers, each of which ends by itself."""

WORDS = "the old oak by the river tells the quiet fox a story of apples and rain and bread "
WORDS_TOKENS = 33


def uncached_prompt(tokens: int, number: int) -> str:
    """Return a prompt of about so many tokens; different numbers share no beginning that a prefix cache could keep."""
    if tokens < 50:
        return f"{number % 100}"  # about 8 tokens with those of the chat template
    return f"{number} " + WORDS * (tokens // WORDS_TOKENS)
