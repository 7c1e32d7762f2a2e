"""Formats of a model's answers: where its text is reasoning, a call of a function, or the answer itself."""
