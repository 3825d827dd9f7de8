"""A document in the terminal: all text as it is, bars and lines to scale."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_speedkit.report import (
    Bar,
    BarChart,
    Block,
    Definitions,
    Document,
    Highlight,
    Highlights,
    Line,
    LineChart,
    Section,
    Table,
    Text,
)
from lightning_speedkit.report.terminal import render_block, render_terminal
from tests.report.pages import HOSTILE, everything


def test_the_terminal_shows_all_text_as_it_is() -> None:
    stream = io.StringIO()
    everything(HOSTILE).print(Console(file=stream, width=400))
    shown = stream.getvalue()
    assert shown.count(HOSTILE) >= 12
    assert "\x1b" not in shown  # not a terminal: no colours


def test_the_terminal_draws_bars_to_scale_and_tells_losses() -> None:
    stream = io.StringIO()
    bars = [Bar("old", 4.0), Bar("new", 8.0)]
    chart = BarChart("Speed", bars, unit="ms", baseline="old")
    Document("t", [Section("s", [chart])]).print(Console(file=stream, width=100))
    old, new = (line for line in stream.getvalue().splitlines() if "ms" in line)
    assert (old.count("█"), new.count("█")) == (14, 28)
    assert new.rstrip().endswith("8.00 ms  2.00× slower")


def _shown(block: Block, *, width: int = 100, colour: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(render_block(block))
    return stream.getvalue()


def test_the_parts_of_a_document_stand_in_their_order_with_a_line_between() -> None:
    stream = io.StringIO()
    sections = [Section("One", [Text("1"), Text("2")]), Section("Two", [Text("3")])]
    document = Document("Title", sections, "Lead", [Text("0")], "End")
    render_terminal(document, Console(file=stream, width=20))
    told = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert told == ["", "Title", "Lead", "", "0", "", "One", "1", "", "2", "", "Two", "3", "", "End"]


@pytest.mark.parametrize(("tone", "mark"), [("plain", ""), ("note", "Note: "), ("warning", "Beware: ")])
def test_the_tone_of_a_text_is_in_words_too(tone: str, mark: str) -> None:
    assert _shown(Text("so", tone=tone)) == f"{mark}so\n"  # type: ignore[arg-type]


def test_a_table_sets_numbers_to_the_right_and_texts_to_the_left() -> None:
    table = Table(["run", "ms", "what"], [["a", 1.5, "x"], ["longer", 1234, "yy"]], caption="Time")
    title, *lines = [line for line in _shown(table).splitlines() if line.strip(" ─━")]
    assert title.strip() == "Time"
    assert [line.split() for line in lines] == [["run", "ms", "what"], ["a", "1.50", "x"], ["longer", "1", "234", "yy"]]
    assert len({line.index(word) for line, word in zip(lines, ("run", "a", "longer"), strict=True)}) == 1
    assert len({line.index(word) + len(word) for line, word in zip(lines, ("ms", "1.50", "234"), strict=True)}) == 1
    assert len({line.rindex(word) for line, word in zip(lines, ("what", "x", "yy"), strict=True)}) == 1
    assert "Time" not in _shown(Table(["run"], [["a"]]))


def test_terms_and_headline_numbers_are_pairs() -> None:
    assert _shown(Definitions({"GPU": "none", "torch": "2"})).split() == ["GPU", "none", "torch", "2"]
    told = _shown(Highlights([Highlight("2×", "faster", "than before"), Highlight("3", "files")]))
    assert [line.split() for line in told.splitlines()] == [["2×", "faster", "than", "before"], ["3", "files"]]


def test_the_parts_of_a_bar_add_up_to_its_length_and_are_named() -> None:
    bars = [Bar("a", [1, 1, 2]), Bar("b", [0, 1, 0])]
    title, first, second, legend = _shown(BarChart("Time", bars, parts=["x", "y", "z"])).splitlines()
    assert title.strip() == "Time"
    assert [first.count(sign) for sign in "█▓▒"] == [7, 7, 14]  # of 28 cells for the longest
    assert [second.count(sign) for sign in "█▓▒"] == [0, 7, 0]
    assert legend.split() == ["█", "x", "▓", "y", "▒", "z"]


def test_no_cell_is_lost_where_parts_are_rounded() -> None:
    (_, line, _) = _shown(BarChart("t", [Bar("a", [1 / 3] * 3)], parts=["x", "y", "z"])).splitlines()
    assert sum(line.count(sign) for sign in "█▓▒") == 28


def test_bars_of_nothing_are_empty() -> None:
    told = _shown(BarChart("t", [Bar("a", 0.0), Bar("b", 0.0)], baseline="a"))
    assert "█" not in told
    assert [line.split() for line in told.splitlines()[1:]] == [["a", "0", "baseline"], ["b", "0", "–"]]


def test_a_loss_is_red_and_a_gain_is_not() -> None:
    chart = BarChart("t", [Bar("old", 4.0), Bar("new", 8.0), Bar("odd", 1.0)], baseline="old")
    old, new, odd = _shown(chart, colour=True).splitlines()[1:]
    assert "\x1b[31m2.00× slower" in new
    assert "31m" not in old + odd
    assert "\x1b[1;36m4.00× faster" in odd


def test_lines_are_drawn_between_the_lowest_and_the_highest_of_all() -> None:
    lines = [Line("a", [0, 1, 2], [0.0, 7.0, 3.0]), Line("b", [0, 1], [7.0, 0.0])]
    title, first, second = _shown(LineChart("Loss", lines)).splitlines()
    assert title.strip() == "Loss"
    assert first.split() == ["a", "▁█▄", "0", "→", "3.00"]
    assert second.split() == ["b", "█▁", "7.00", "→", "0"]


@pytest.mark.parametrize("y", [[2.0], [2.0, 2.0, 2.0]])
def test_a_line_that_does_not_change_is_flat(y: list[float]) -> None:
    assert _shown(LineChart("t", [Line("a", range(len(y)), y)])).splitlines()[1].split()[1] == "▁" * len(y)


@pytest.mark.parametrize("count", [39, 40, 41, 79, 80, 81, 1000])
def test_a_long_line_is_thinned_out_and_keeps_its_ends(count: int) -> None:
    y = [1.0, *[0.0] * (count - 2), 2.0]
    drawn = _shown(LineChart("t", [Line("a", range(count), y)])).splitlines()[1].split()[1]
    assert len(drawn) == min(count, 40)
    assert (drawn[0], drawn[-1]) == ("▅", "█")  # 1 of 2: the step 3.5 of 7, rounded to an even one
    assert set(drawn[1:-1]) == {"▁"}
