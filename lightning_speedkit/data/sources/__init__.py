"""Sources of samples: the formats that datasets come in, each as an iterable of samples with a length."""

from lightning_speedkit.data.sources.class_names import read_classes
from lightning_speedkit.data.sources.image_recode import ImageRecode
from lightning_speedkit.data.sources.opening import find_splits, open_source
from lightning_speedkit.data.sources.source import Item, Source

__all__ = ["ImageRecode", "Item", "Source", "find_splits", "open_source", "read_classes"]
