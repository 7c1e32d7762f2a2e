"""Grammars in the engine's process: the grammar checker, and the walk that times a grammar's steps."""
