"""Data: stores of samples in one file, loaders that use memory again, and DataModules that serve them."""

from lightning_speedkit.data.datamodule import SpeedkitDataModule
from lightning_speedkit.data.device.batch_random import training_seed
from lightning_speedkit.data.device.device_augment import RandomCrop, RandomErase, RandomFlip
from lightning_speedkit.data.device.device_mix import CutMix, MixUp
from lightning_speedkit.data.device.device_normalize import Normalize
from lightning_speedkit.data.device.device_operation import ImageOperation, LabelOperation
from lightning_speedkit.data.device.device_prefetch import DevicePrefetcher
from lightning_speedkit.data.device.device_transform import DeviceTransform
from lightning_speedkit.data.images.image_field import ImageField
from lightning_speedkit.data.lmdb_datamodule import LMDBDataModule
from lightning_speedkit.data.loading.collate import collate_samples
from lightning_speedkit.data.loading.loader import RingLoader
from lightning_speedkit.data.settings.loader_auto import LoaderSettingsSearch, suggest_for
from lightning_speedkit.data.settings.loader_settings import LoaderSettings
from lightning_speedkit.data.settings.suggest_loader import suggest_loader
from lightning_speedkit.data.sources import find_splits, open_source, read_classes
from lightning_speedkit.data.sources.parallel_pack import PackReport, write_parallel, write_splits
from lightning_speedkit.data.staging.local_cache import release_staged, stage_to_local
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.data.store.lmdb_pack import write_lmdb
from lightning_speedkit.data.store.lmdb_verify import StoreReport, verify_lmdb
from lightning_speedkit.data.store.lmdb_writer import LMDBWriter

__all__ = [
    "CutMix",
    "DevicePrefetcher",
    "DeviceTransform",
    "ImageField",
    "ImageOperation",
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBWriter",
    "LabelOperation",
    "LoaderSettings",
    "LoaderSettingsSearch",
    "MixUp",
    "Normalize",
    "PackReport",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "RingLoader",
    "SpeedkitDataModule",
    "StoreReport",
    "collate_samples",
    "find_splits",
    "open_source",
    "read_classes",
    "release_staged",
    "stage_to_local",
    "suggest_for",
    "suggest_loader",
    "training_seed",
    "verify_lmdb",
    "write_lmdb",
    "write_parallel",
    "write_splits",
]
