"""Tables for a terminal, and the same as plain text where the output goes to a file or another program."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_block", "print_pairs", "print_table", "print_title"]

_WIDE = 10_000  # no line of plain text is folded or cut


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich ends the process with exit code 1; here a reader that goes away is for the command to judge."""
        raise  # the BrokenPipeError that rich is handling


def _console() -> Console:
    return _Console() if sys.stdout.isatty() else _Console(width=_WIDE, color_system=None, force_terminal=False)


def print_title(title: str) -> None:
    """One line, set off by a blank line below a table."""
    _console().print(Text(title, style="bold"), soft_wrap=True)


def print_block(title: str, text: str) -> None:
    """A title and, between blank lines, text to copy: not indented, folded or coloured."""
    print()
    print_title(title)
    print(f"\n{text}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows of text under headings. Text is shown as it is: brackets are no markup here."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(Text, row))
    _print_trimmed(table)


def print_pairs(pairs: Iterable[tuple[str, str]], title: str) -> None:
    """A title, and below it a name and a value per row; a value may have several lines."""
    print_title(title)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2), pad_edge=True)
    for name, value in pairs:
        table.add_row(Text(name, style="dim"), Text(value))
    _print_trimmed(table)


def _print_trimmed(table: Table) -> None:
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
