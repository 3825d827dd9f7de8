"""The checksums of PNG files that Pillow wrote, of which each byte is changed in turn."""

from __future__ import annotations

import pytest
from PIL import Image, PngImagePlugin

from lightning_speedkit.data.images.png_checksums import check_png
from tests.data.pictures import encoded, photographs

SMALL = photographs()[0][:20, :30]


@pytest.mark.parametrize("kind", ["color", "palette", "with a text"])
def test_every_change_of_one_byte_is_found(kind: str) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("author", "nobody")
    if kind == "palette":
        data = encoded(Image.fromarray(SMALL).quantize(16), "PNG")
    else:
        data = encoded(SMALL, "PNG", pnginfo=text if kind == "with a text" else None)
    check_png(data)
    check_png(memoryview(data + b"what comes after the end"))
    for place in range(8, len(data)):
        for change in (0xFF, 0x20, 0x01):
            damaged = bytearray(data)
            damaged[place] ^= change
            with pytest.raises(ValueError, match=r"^(the checksum of )?its chunk .*(not match|beyond the end)$"):
                check_png(damaged)


def test_every_cut_is_found() -> None:
    data = encoded(SMALL, "PNG")
    for size in range(8, len(data)):
        with pytest.raises(ValueError, match="goes beyond the end"):
            check_png(data[:size])
