"""Stores: samples of one structure in one LMDB file with checksums, written, checked and read."""
