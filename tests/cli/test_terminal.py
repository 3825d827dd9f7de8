"""Tables and texts, to a terminal and to another program."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from lightning_speedkit.cli.terminal import print_block, print_pairs, print_table, print_title

_MARKUP = "[bold]a[/bold] :smile: {x} https://a.b/c"
_LONG = " ".join(f"word{number}" for number in range(60))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """A terminal of 40 columns with colours, where the output goes from here on."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = _Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


def test_a_piped_table_is_aligned_and_has_no_space_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "what"), [("a", "first"), ("longer", "second"), ("", "")])
    assert capsys.readouterr().out == "name    what\na       first\nlonger  second\n\n"


def test_piped_pairs_keep_the_lines_of_a_value_in_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_pairs([("one", "1"), ("three", "first\nsecond")], title="Title")
    assert capsys.readouterr().out == "Title\n  one     1\n  three   first\n          second\n"


def test_a_block_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"  indented\n{_LONG}\n{_MARKUP}"
    print_block("Title:", text)
    assert capsys.readouterr().out == f"\nTitle:\n\n{text}\n"


_PRINTS: tuple[Callable[[str], None], ...] = (
    print_title,
    lambda text: print_block("t", text),
    lambda text: print_table(("c",), [(text,)]),
    lambda text: print_pairs([("n", text)], title="t"),
    lambda text: print_pairs([(text, "v")], title="t"),
    lambda text: print_pairs([], title=text),
)


@pytest.mark.parametrize("force", ["", "1"])
@pytest.mark.parametrize("show", _PRINTS)
@pytest.mark.parametrize("text", [_MARKUP, _LONG])
def test_piped_text_is_whole_on_one_line_without_colour(
    show: Callable[[str], None],
    text: str,
    force: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    if force:
        monkeypatch.setenv("FORCE_COLOR", force)
    show(text)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert any(text in line for line in out.splitlines())


def test_a_terminal_has_bold_headings_and_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_a_terminal(monkeypatch)
    print_table(("name", "what"), [("a", _LONG)])
    shown = terminal.getvalue()
    assert "\x1b[1m" in shown
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in shown.splitlines()]
    assert max(map(len, lines)) == 40
    assert " ".join(" ".join(lines).split()) == f"name what a {_LONG}"  # folded between words, nothing cut


def test_a_terminal_shows_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_a_terminal(monkeypatch)
    print_title(_LONG)
    print_pairs([("n", "[bold]a[/bold] :smile:")], title="t")
    print_block("t", _LONG)
    shown = terminal.getvalue()
    assert "[bold]a[/bold] :smile:" in shown
    assert [line for line in shown.splitlines() if _LONG in line][1:] == [_LONG]  # the block, without any colour
    assert (
        len([line for line in shown.splitlines() if _LONG in line]) == 2
    )  # the title is left for the terminal to fold


def test_a_terminal_without_colour_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    print_table(("name",), [("a",)])
    assert "\x1b" not in terminal.getvalue()


def test_a_reader_that_has_gone_is_an_error_that_the_caller_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich by itself would end the process with exit code 1."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    for show in _PRINTS:
        with pytest.raises(BrokenPipeError):
            show("text")
