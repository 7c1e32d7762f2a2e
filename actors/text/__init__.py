"""Text: tokenizer, chat template, prompts, stop strings and log probabilities of a model, for the processor."""
