"""Prompts of the benches, in words that the tiny model of `examples/` knows."""

OAK_PROMPT = "Tell me about the oak"
STORY_PROMPT = "Tell me a long story about the fox"  # answered by some hundred tokens
PROMPTS = (
    OAK_PROMPT,
    "Say hello in Japanese",
    "What is the capital of Paraguay?",
    "Tell me a story about the fox",
    "Tell me about the willow",
    "Write a poem about the moon",
)
"""Prompts whose answers differ, and each ends by itself."""
