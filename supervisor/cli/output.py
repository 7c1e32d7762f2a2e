"""The output of all commands: sentences for an operator's terminal, without control characters of nodes."""

from __future__ import annotations

from rich.console import Console

from supervisor.printable import printable


class CommandConsole(Console):
    """A console that reports a closed output as `BrokenPipeError`."""

    def on_broken_pipe(self) -> None:
        """Raise the error, where the library would exit with 1."""
        raise BrokenPipeError


def print_sentence(console: Console, text: str) -> None:
    """Print a sentence with text from nodes."""
    console.print(printable(text), markup=False, emoji=False, soft_wrap=True)
