"""Other libraries for loading, each as its own documentation uses it, with a format written by its own writer.

Raw samples are stored as arrays without compression; pictures are stored as JPEG files and resized to 224 when they are
read, with what the library's documentation resizes with. Each shuffles in its own way: LitData and MDS whole chunks and
within them, WebDataset the shards and a buffer of 1,000, the others all samples.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data.datasets import SIZE, Data
from benchmarks.data.measuring import Batches
from benchmarks.data.naive import epochs_of

__all__ = ["ffcv", "hugging_face", "litdata", "mds", "webdataset"]


@contextmanager
def litdata(data: Data, workers: int) -> Iterator[Batches]:
    """LitData: ``optimize`` in chunks of 64 MB, ``StreamingDataset``, ``StreamingDataLoader``."""
    from litdata import StreamingDataLoader, StreamingDataset

    path = data.made("litdata", _write_litdata)
    dataset = StreamingDataset(str(path), shuffle=True, transform=_litdata_picture if data.encoded else None)
    loader = StreamingDataLoader(dataset, batch_size=data.batch, num_workers=workers)
    yield lambda _number: _named(loader)


def _litdata_picture(sample: Any) -> Any:
    from torchvision.transforms.v2.functional import resize

    return {**sample, "x": resize(sample["x"], [SIZE, SIZE], antialias=True)}


def _write_litdata(data: Data, folder: Path) -> None:
    from litdata import optimize

    every = range(data.samples)
    optimize(_LitDataSample(data), list(every), str(folder), chunk_bytes="64MB", num_workers=2, verbose=False)


class _LitDataSample:
    def __init__(self, data: Data) -> None:
        self.data = data
        self._rows: Any = None

    def __call__(self, number: int) -> dict[str, Any]:
        import litdata

        if self._rows is None:
            self._rows = self.data.jpegs() if self.data.encoded else self.data.rows()
        row = self._rows[number]
        x = litdata.Image(bytes=row) if self.data.encoded else torch.from_numpy(np.array(row))
        return {"x": x, "y": self.data.label(number)}


@contextmanager
def webdataset(data: Data, workers: int) -> Iterator[Batches]:
    """WebDataset: tar shards of ``.npy`` or ``.jpg`` members, batched in the workers, ``WebLoader``."""
    import webdataset as wds

    shards = sorted(str(path) for path in data.made("webdataset", _write_webdataset).glob("*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000)
    if data.encoded:
        dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(_pil_picture)
    else:
        dataset = dataset.decode().to_tuple("npy", "cls").map_tuple(torch.from_numpy)
    dataset = dataset.batched(data.batch)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    yield lambda _number: loader


def _pil_picture(image: Any) -> torch.Tensor:
    from PIL import Image

    array = np.array(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _write_webdataset(data: Data, folder: Path) -> None:
    import webdataset as wds

    folder.mkdir()
    ending = "jpg" if data.encoded else "npy"
    samples = -(-data.samples // 16)  # an even number of shards, so that two workers have as many each
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=samples, verbose=0) as writer:
        for number, (x, y) in enumerate(data.pairs()):
            writer.write({"__key__": f"{number:08d}", ending: x, "cls": y})


@contextmanager
def mds(data: Data, workers: int) -> Iterator[Batches]:
    """mosaicml-streaming: ``MDSWriter`` without compression, ``StreamingDataset``, torch's DataLoader."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # of a process that was killed
    path = data.made("mds", _write_mds)
    cls = _mds_pictures(StreamingDataset) if data.encoded else StreamingDataset
    dataset = cls(local=str(path), shuffle=True, batch_size=data.batch)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=data.batch, num_workers=workers, persistent_workers=workers > 0
    )
    yield lambda _number: _named(loader)


def _mds_pictures(streaming_dataset: Any) -> Any:
    class Pictures(streaming_dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return {"x": _pil_picture(sample["x"].convert("RGB")), "y": sample["y"]}

    return Pictures


def _write_mds(data: Data, folder: Path) -> None:
    from PIL import Image
    from streaming import MDSWriter

    kind = "jpeg" if data.encoded else f"ndarray:{data.dtype}:{','.join(map(str, data.shape))}"
    with MDSWriter(columns={"x": kind, "y": "int"}, out=str(folder), compression=None) as writer:
        for x, y in data.pairs():
            writer.write({"x": Image.open(io.BytesIO(x)) if data.encoded else x, "y": y})


@contextmanager
def hugging_face(data: Data, workers: int) -> Iterator[Batches]:
    """Hugging Face datasets: arrays of a fixed shape or encoded images in Arrow, format numpy, torch's DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.load_from_disk(str(data.made("hugging_face", _write_hugging_face)))
    if data.encoded:
        dataset.set_transform(_hugging_face_pictures)
    else:
        # asked for by dtype: as it is, the format makes every integer an int64
        dataset = dataset.with_format("numpy", columns=["x"], output_all_columns=True, dtype=np.dtype(data.dtype))
    epoch = epochs_of(dataset, data, workers)
    yield lambda _number: _named(epoch(_number))


def _hugging_face_pictures(batch: Any) -> Any:
    return {"x": [_pil_picture(image.convert("RGB")) for image in batch["x"]], "y": batch["y"]}


def _write_hugging_face(data: Data, folder: Path) -> None:
    import datasets

    def samples() -> Iterator[dict[str, Any]]:
        for x, y in data.pairs():
            yield {"x": {"bytes": x, "path": None} if data.encoded else x, "y": y}

    x = datasets.Image() if data.encoded else datasets.Array3D(data.shape, data.dtype)
    features = datasets.Features({"x": x, "y": datasets.Value("int64")})
    cache = folder.with_name("cache")
    datasets.Dataset.from_generator(samples, features=features, cache_dir=str(cache)).save_to_disk(str(folder))


@contextmanager
def ffcv(data: Data, workers: int) -> Iterator[Batches]:
    """FFCV: random order, the file in the system's cache. It resizes the centre square of a picture, not the whole."""
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, NDArrayDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor, ToTorchImage

    decode = (
        [CenterCropRGBImageDecoder((SIZE, SIZE), ratio=1), ToTensor(), ToTorchImage()]
        if data.encoded
        else [NDArrayDecoder(), ToTensor()]
    )
    loader = Loader(
        str(data.made("ffcv.beton", _write_ffcv)),
        batch_size=data.batch,
        num_workers=max(workers, 1),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"x": decode, "y": [IntDecoder(), ToTensor()]},
    )
    yield lambda _number: loader


def _write_ffcv(data: Data, path: Path) -> None:
    from ffcv.fields import IntField, NDArrayField, RGBImageField
    from ffcv.writer import DatasetWriter

    x = (
        RGBImageField(write_mode="jpg", jpeg_quality=90)
        if data.encoded
        else NDArrayField(np.dtype(data.dtype), data.shape)
    )
    DatasetWriter(str(path), {"x": x, "y": IntField()}, num_workers=2).from_indexed_dataset(_FfcvSamples(data))


class _FfcvSamples:
    def __init__(self, data: Data) -> None:
        self.data = data
        self._rows: Any = None

    def __len__(self) -> int:
        return self.data.samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if self._rows is None:
            self._rows = self.data.jpegs() if self.data.encoded else self.data.rows()
        if self.data.encoded:
            from PIL import Image

            return Image.open(io.BytesIO(self._rows[number])).convert("RGB"), number
        return np.array(self._rows[number]), self.data.label(number)


def _named(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    return ((batch["x"], batch["y"]) for batch in batches)
