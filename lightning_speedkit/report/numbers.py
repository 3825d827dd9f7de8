"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = ["format_number", "ratio_text"]


def format_number(value: float, unit: str = "") -> str:
    """Three significant digits, a whole number in full, with a thin space between thousands, and the unit.

    >>> format_number(0.012345, "ms"), format_number(7.0), format_number(7), format_number(1797) == "1\u202f797"
    ('0.0123 ms', '7.00', '7', True)
    """
    if not math.isfinite(value):
        text = "n/a"
    elif isinstance(value, int):
        text = f"{value:,}".replace(",", "\u202f")
    elif value == 0:
        text = "0"
    else:
        exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 9.999 is 10.0, not 10.00
        text = f"{value:,.{max(0, 2 - exponent)}f}".replace(",", "\u202f")
    return f"{text} {unit}".rstrip()


def ratio_text(ratio: float, gain: str, loss: str) -> tuple[str, str]:
    """A ratio to the baseline, where more than 1 is a gain, as a factor and its word. A loss is told as one.

    >>> ratio_text(2.13, "faster", "slower"), ratio_text(0.5, "faster", "slower"), ratio_text(1.001, "up", "down")
    (('2.13×', 'faster'), ('2.00×', 'slower'), ('1.00×', 'the same'))
    """
    factor, word = (ratio, gain) if ratio >= 1 else (1 / ratio if ratio else math.inf, loss)
    if not math.isfinite(factor):
        return "–", ""
    text = f"{factor:.2f}" if factor < 9.995 else f"{factor:.1f}"
    return f"{text}×", "the same" if text == "1.00" else word
