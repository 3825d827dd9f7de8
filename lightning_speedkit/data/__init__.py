"""Data: stores of samples in one LMDB file, and DataModules that serve them."""

from lightning_speedkit.data.collate import collate_samples
from lightning_speedkit.data.datamodule import SpeedkitDataModule
from lightning_speedkit.data.lmdb_datamodule import LMDBDataModule
from lightning_speedkit.data.lmdb_dataset import LMDBDataset
from lightning_speedkit.data.lmdb_pack import write_lmdb
from lightning_speedkit.data.lmdb_verify import StoreReport, verify_lmdb
from lightning_speedkit.data.lmdb_writer import LMDBWriter
from lightning_speedkit.data.loader import RingLoader

__all__ = [
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBWriter",
    "RingLoader",
    "SpeedkitDataModule",
    "StoreReport",
    "collate_samples",
    "verify_lmdb",
    "write_lmdb",
]
