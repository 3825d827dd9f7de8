"""The libraries that decode pictures, the fastest installed one first, all to the same pixels.

What it does: one function for JPEG, PNG and WebP over simplejpeg, OpenCV, torchvision and Pillow. Whichever it is: RGB
or grey, eight bits (of sixteen the upper eight), alpha dropped, CMYK converted, palettes resolved, an orientation in
EXIF not applied, a JPEG reduced in its DCT (with torchvision, after it).
When it helps: JPEG, where simplejpeg and OpenCV are well ahead of Pillow; PNG and WebP differ little.
What it costs: nothing is imported before the first picture of a format.

Source: simplejpeg and OpenCV over libjpeg-turbo, OpenCV over libpng and libwebp.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_speedkit.data.images.image_header import ImageHeader
from lightning_speedkit.data.images.png_checksums import check_png
from lightning_speedkit.errors import ImageError, MissingExtraError

__all__ = ["DECODERS", "Decoder", "check_decoder", "decode_picture", "decoder_for"]

Pixels = npt.NDArray[np.uint8]
Decode = Callable[[memoryview, ImageHeader, int, int], Any]
"""Of all bytes, their header, the channels (1 or 3) and the reduction (1, 2, 4 or 8): pixels as (H, W, C) or (H, W)."""

_log = logging.getLogger(__name__)


class Decoder(NamedTuple):
    """A library that decodes pictures: its distribution, its module, the extra that installs it, and what it reads."""

    distribution: str
    module: str
    extra: str
    formats: tuple[str, ...]
    load: Callable[[], Decode]


def check_decoder(name: str) -> None:
    """:class:`MissingExtraError` if that decoder, or for ``"auto"`` every decoder, is not installed."""
    if name == "auto":
        if not any(_is_installed(decoder) for decoder in DECODERS.values()):
            raise MissingExtraError("Decoding pictures", extra="images", library="simplejpeg, OpenCV or Pillow")
    elif not _is_installed(DECODERS[name]):
        raise MissingExtraError(f"decoder={name!r}", extra=DECODERS[name].extra, library=DECODERS[name].distribution)


def decoder_for(format_: str, name: str = "auto") -> tuple[Decoder, Decode]:
    """The decoder of that name, or the fastest installed one for the format; told once per process at level INFO.

    Raises:
        ImageError: the decoder that was asked for does not read this format.
        MissingExtraError: it is not installed; for ``"auto"``, none that reads this format is.
    """
    found = _LOADED.get((format_, name))
    if found is None:
        loaded = _load(format_, name)
        found = _LOADED.setdefault((format_, name), loaded)
        if found is loaded:
            module = importlib.import_module(loaded[0].module.partition(".")[0])
            version = getattr(module, "__version__", "of an unknown version")
            _log.info("%s pictures are decoded by %s %s.", format_, loaded[0].distribution, version)
    return found


def decode_picture(
    data: memoryview, header: ImageHeader, channels: int, reduction: int = 1, name: str = "auto"
) -> Pixels:
    """The pixels as (height, width, channels), each side divided by ``reduction`` and rounded up.

    With ``"auto"``, what the fastest library cannot decode is given to OpenCV and Pillow: simplejpeg, for one, does not
    read a JPEG with an unusual subsampling.

    Raises:
        ImageError: no library that was asked could decode it, or one found another size than the header says.
    """
    decoder = decoder_for(header.format, name)
    try:
        return _decoded(data, header, channels, reduction, *decoder)
    except ImageError:
        if name != "auto":
            raise
        for other in _FALLBACKS:
            if DECODERS[other] is not decoder[0] and _is_installed(DECODERS[other]):
                with contextlib.suppress(ImageError, ImportError):
                    return _decoded(data, header, channels, reduction, *decoder_for(header.format, other))
        raise


def _decoded(
    data: memoryview, header: ImageHeader, channels: int, reduction: int, decoder: Decoder, decode: Decode
) -> Pixels:
    try:
        picture = decode(data, header, channels, reduction)
    except MemoryError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ImageError(
            f"{decoder.distribution} cannot decode this {header}: {error}. Its bytes are damaged, or of a kind that "
            f"it does not read: pack it again from a copy that opens, or try another decoder."
        ) from error
    if picture.ndim == 2:
        picture = picture[:, :, None]
    shape: tuple[int, ...] = picture.shape
    if shape != (-(-header.height // reduction), -(-header.width // reduction), channels):
        raise ImageError(
            f"A {header} in which {decoder.distribution} found {' x '.join(map(str, shape))} values: its header is "
            f"damaged. Pack it again from a copy that opens, or leave it out."
        )
    pixels: Pixels = picture
    return pixels


def _is_installed(decoder: Decoder) -> bool:
    return importlib.util.find_spec(decoder.module.partition(".")[0]) is not None


def _load(format_: str, name: str) -> tuple[Decoder, Decode]:
    if name != "auto":
        check_decoder(name)
        decoder = DECODERS[name]
        if format_ not in decoder.formats:
            raise ImageError(
                f"decoder={name!r} reads {' and '.join(decoder.formats)}, and this is a {format_}. Use decoder='auto', "
                f"which takes for each format what is installed."
            )
        return decoder, decoder.load()
    for decoder in DECODERS.values():
        if format_ in decoder.formats and _is_installed(decoder):
            try:
                return decoder, decoder.load()
            except Exception as error:  # a torchvision that does not fit the torch beside it raises a RuntimeError
                _log.warning("%s is passed over as it cannot be imported: %s", decoder.distribution, error)
    raise MissingExtraError(f"Decoding a {format_}", extra="images", library="OpenCV or Pillow")


def _simplejpeg() -> Decode:
    decode_jpeg = importlib.import_module("simplejpeg").decode_jpeg

    def decode(data: memoryview, header: ImageHeader, channels: int, reduction: int) -> Any:
        colors = "GRAY" if channels == 1 else "RGB"
        if reduction == 1:
            return decode_jpeg(data, colors, strict=False)
        # the smallest scale that gives at least this size is the wanted one
        height, width = -(-header.height // reduction), -(-header.width // reduction)
        return decode_jpeg(
            data, colors, min_height=height, min_width=width, min_factor=float(reduction), strict=False
        )  # strict would refuse the stray bytes that the other libraries pass over

    return decode


def _opencv() -> Decode:
    cv2: Any = importlib.import_module("cv2")
    reverse = not hasattr(cv2, "IMREAD_COLOR_RGB")  # before 4.11
    color = cv2.IMREAD_COLOR if reverse else cv2.IMREAD_COLOR_RGB
    flags = {(1, 1): cv2.IMREAD_GRAYSCALE, (3, 1): color}
    for reduction in (2, 4, 8):
        flags[1, reduction] = getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{reduction}")
        flags[3, reduction] = getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}") - cv2.IMREAD_COLOR + color
    flags = {key: flag | cv2.IMREAD_IGNORE_ORIENTATION for key, flag in flags.items()}

    def decode(data: memoryview, _header: ImageHeader, channels: int, reduction: int) -> Any:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), flags[channels, reduction])
        if picture is None:
            raise ValueError("it gives no reason")
        return cv2.cvtColor(picture, cv2.COLOR_BGR2RGB) if reverse and channels == 3 else picture

    return decode


def _torchvision() -> Decode:
    torch, images = importlib.import_module("torch"), importlib.import_module("torchvision.io")

    def decode(data: memoryview, header: ImageHeader, channels: int, reduction: int) -> Any:
        grey = channels == 1 and header.format == "JPEG"  # for WebP it has no grey
        mode = images.ImageReadMode.GRAY if grey else images.ImageReadMode.RGB
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # it warns of memory that is read-only
        pixels = images.decode_image(encoded, mode).permute(1, 2, 0).contiguous().numpy()
        if reduction > 1:  # in the DCT it cannot; the mean of each square is close to that
            pixels = _mean_of_squares(pixels, reduction)
        return pixels if grey or channels == 3 else _grey(pixels)

    return decode


def _pillow() -> Decode:
    open_image = importlib.import_module("PIL.Image").open

    def decode(data: memoryview, header: ImageHeader, channels: int, reduction: int) -> Any:
        mode = "L" if channels == 1 else "RGB"
        if header.format == "PNG":
            check_png(data)  # Pillow does not compare the checksums of the pixels
        with open_image(io.BytesIO(data), formats=(header.format.upper(),)) as image:
            if header.format == "JPEG":
                image.draft(mode, (header.width // reduction, header.height // reduction))
            image.load()
            if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
                grey = (np.asarray(image) >> 8).astype(np.uint8)
                return grey if channels == 1 else np.repeat(grey[:, :, None], 3, axis=2)
            image.info.pop("transparency", None)  # convert() would warn of it
            return np.array(image if image.mode == mode else image.convert(mode))  # np.asarray() would be read-only

    return decode


def _mean_of_squares(picture: Pixels, side: int) -> Pixels:
    height, width, channels = picture.shape
    if height % side or width % side:
        picture = np.pad(picture, ((0, -height % side), (0, -width % side), (0, 0)), mode="edge")
    rows = picture.reshape(picture.shape[0] // side, side, -1).sum(1, dtype=np.uint16)
    rows = rows.reshape(len(rows), -1, channels)
    squares: Any = sum(rows[:, column::side] for column in range(side))
    means: Pixels = ((squares + side * side // 2) // (side * side)).astype(np.uint8)
    return means


def _grey(picture: Pixels) -> Pixels:
    """Luma of ITU-R BT.601, in the rounding of Pillow."""
    red, green, blue = (picture[:, :, channel].astype(np.uint32) for channel in range(3))
    grey: Pixels = ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).astype(np.uint8)
    return grey


DECODERS: dict[str, Decoder] = {  # the fastest first
    "simplejpeg": Decoder("simplejpeg", "simplejpeg", "images", ("JPEG",), _simplejpeg),
    "opencv": Decoder("opencv-python-headless", "cv2", "images", ("JPEG", "PNG", "WebP"), _opencv),
    # without PNG: what torchvision (0.29) does with a damaged one is end the process
    "torchvision": Decoder("torchvision", "torchvision.io", "vision", ("JPEG", "WebP"), _torchvision),
    "pillow": Decoder("pillow", "PIL", "images", ("JPEG", "PNG", "WebP"), _pillow),
}
_FALLBACKS = ("opencv", "pillow")
_LOADED: dict[tuple[str, str], tuple[Decoder, Decode]] = {}
