"""The prefix cache of SGLang's scheduler: its events, their watchers, and the flush."""
