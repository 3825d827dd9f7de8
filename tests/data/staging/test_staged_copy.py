"""Making one copy: full disks, damage, versions, and the bar that shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_speedkit.data.staging import resumable_copy, staged_copy
from lightning_speedkit.data.staging.remote_source import find_remote
from lightning_speedkit.data.staging.staged_copy import copied_bytes, fault_of, make_copy, progress_bar
from lightning_speedkit.data.staging.staged_entries import lock_entry
from lightning_speedkit.data.staging.staged_record import CopiedFile, Record, read_record, write_record
from lightning_speedkit.data.staging.staging_source import Source, find_local
from lightning_speedkit.data.store.lmdb_pack import write_lmdb
from lightning_speedkit.errors import StagingError
from tests.data.http_server import Served, http_server

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_copy, "_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(resumable_copy, "_SAVE_BYTES", 1 << 18)
    monkeypatch.setattr(resumable_copy, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_lmdb([(os.urandom(5000), i) for i in range(200)], tmp_path / "far" / "train.lmdb", block_bytes=1 << 16)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, in memory."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs to be allowed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _made(root: Path, source: Source, again: Source | None = None, *, max_bytes: int | None = None) -> Path | None:
    root.mkdir(exist_ok=True)
    looked_at = again or source
    made = make_copy([root], source, look_again=lambda: looked_at, max_bytes=max_bytes, progress=False)
    if made is None:
        return None
    os.close(made[2])
    return made[0]


def _broken_off(root: Path, source: Source, content: bytes, crc32: int) -> Path:
    part = root / f"{source.key}.part"
    part.mkdir(parents=True)
    name = source.files[0].name
    (part / name).write_bytes(content)
    state = CopiedFile(name, source.bytes, len(content), crc32)
    write_record(part, Record(source.shown, source.source_id, source.identity, False, [state]))
    (part / ".in-use").touch()
    return part


def test_a_copy_has_the_bytes_the_record_and_a_lock(tmp_path: Path, store: Path) -> None:
    source = find_local(str(store))
    root = tmp_path / "near"
    root.mkdir()
    made = make_copy([root], source, look_again=lambda: source, max_bytes=None, progress=False)
    assert made is not None
    folder, record, file = made
    assert folder == root / source.key
    assert (folder / "train.lmdb").read_bytes() == store.read_bytes()
    assert read_record(folder) == record
    assert fault_of(folder, record, read=True) is None
    assert lock_entry(folder, alone=True) is None
    shared = lock_entry(folder, alone=False)
    assert shared is not None
    os.close(shared)
    os.close(file)
    assert sorted(path.name for path in root.iterdir()) == [source.key]


def test_a_full_disk_is_told_with_both_sizes_before_anything_is_copied(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * MIB))
    with pytest.raises(StagingError, match=r"4,194,304 bytes \(4\.19 MB\) are needed, .* are free"):
        _made(small_disk, find_local(str(tmp_path / "large")))
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_emptied_again(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(3 * MIB))
    monkeypatch.setattr(staged_copy, "make_room", lambda *arguments, **settings: None)
    with pytest.raises(StagingError, match=r"is full: 3,145,728 bytes .* are needed, .* were written, .*removed again"):
        _made(small_disk, find_local(str(tmp_path / "large")))
    assert list(small_disk.iterdir()) == []


def test_the_first_disk_with_room_is_taken(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(3 * MIB))
    source = find_local(str(tmp_path / "large"))
    other = tmp_path / "other disk"
    made = make_copy([small_disk, other], source, look_again=lambda: source, max_bytes=None, progress=False)
    assert made is not None
    os.close(made[2])
    assert made[0].parent == other
    assert list(small_disk.iterdir()) == []


def test_a_copy_that_broke_off_is_gone_on_with_where_it_lies(tmp_path: Path, store: Path) -> None:
    source, content = find_local(str(store)), store.read_bytes()
    part = _broken_off(tmp_path / "second", source, content[: 1 << 18], zlib.crc32(content[: 1 << 18]))
    made = make_copy(
        [tmp_path / "first", tmp_path / "second"], source, look_again=lambda: source, max_bytes=None, progress=False
    )
    assert made is not None
    os.close(made[2])
    assert made[0] == tmp_path / "second" / source.key
    assert (made[0] / "train.lmdb").read_bytes() == content
    assert not part.exists()


@pytest.mark.parametrize("sealed", [True, False])
def test_what_broke_off_and_was_changed_since_begins_anew(tmp_path: Path, store: Path, sealed: bool) -> None:
    path = store
    if not sealed:
        path = tmp_path / "plain.bin"
        path.write_bytes(os.urandom(MIB))
    source, content, root = find_local(str(path)), path.read_bytes(), tmp_path / "near"
    start = bytearray(content[: 1 << 18])
    crc = zlib.crc32(start)
    start[200_000] ^= 1
    _broken_off(root, source, bytes(start), crc)
    with pytest.warns(UserWarning, match=r"begins anew: .*checksum"):
        assert _made(root, source) is None
    assert list(root.iterdir()) == []
    made = _made(root, source)
    assert made is not None
    assert (made / path.name).read_bytes() == content


def test_a_store_that_is_damaged_at_its_source_is_refused(tmp_path: Path, store: Path) -> None:
    content = bytearray(store.read_bytes())
    content[len(content) // 2] ^= 1
    store.write_bytes(content)
    with pytest.raises(
        StagingError, match=r"train\.lmdb is damaged, and so is the source, it seems: .*checksum of block"
    ):
        _made(tmp_path / "near", find_local(str(store)))
    assert list((tmp_path / "near").iterdir()) == []


def test_a_source_that_changed_meanwhile_is_not_published(tmp_path: Path, store: Path) -> None:
    source = find_local(str(store))
    os.utime(store, ns=(1, 1))
    with pytest.warns(UserWarning, match="it changed while it was copied"):
        assert _made(tmp_path / "near", source, find_local(str(store))) is None
    assert list((tmp_path / "near").iterdir()) == []


def test_older_versions_of_the_source_go_and_other_sources_stay(tmp_path: Path) -> None:
    root = tmp_path / "near"
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1" * 1000)
        _made(root, find_local(str(tmp_path / name)))
    first = find_local(str(tmp_path / "a"))
    (tmp_path / "a").write_bytes(b"2" * 1000)
    second = find_local(str(tmp_path / "a"))
    _broken_off(root, first, b"1" * 500, 0)
    made = _made(root, second)
    assert made is not None
    assert (made / "a").read_bytes() == b"2" * 1000
    assert {path.name for path in root.iterdir()} == {second.key, find_local(str(tmp_path / "b")).key}


def test_a_file_of_unknown_size_is_held_to_the_limit_when_it_is_known(tmp_path: Path) -> None:
    with http_server(Served(b"x" * 5000, tells_size=False)) as served:
        source = find_remote(f"{served.address}/a.bin", {})
        with pytest.raises(StagingError, match="5,000 bytes are needed, max_bytes=4999 allows 4,999 bytes"):
            _made(tmp_path / "near", source, max_bytes=4999)
        made = _made(tmp_path / "near", source, max_bytes=5000)
    assert made is not None
    assert (made / "a.bin").read_bytes() == b"x" * 5000


def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path: Path, store: Path) -> None:
    source, root = find_local(str(store)), tmp_path / "near"
    (root / source.key).mkdir(parents=True)
    (root / source.key / "train.lmdb").write_bytes(b"of the user")
    with pytest.raises(StagingError, match="is in the way, as it is no staged copy"):
        _made(root, source)
    assert (root / source.key / "train.lmdb").read_bytes() == b"of the user"
    (root / source.key / "train.lmdb").unlink()
    assert _made(root, source) is not None


def test_a_part_that_another_process_holds_is_not_touched(tmp_path: Path, store: Path) -> None:
    source = find_local(str(store))
    part = _broken_off(tmp_path / "near", source, b"", 0)
    file = lock_entry(part, alone=True)
    assert file is not None
    with pytest.raises(StagingError, match="in use by another process"):
        _made(tmp_path / "near", source)
    os.close(file)


def test_a_disk_that_fails_is_told(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def fail(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("train.lmdb"):  # noqa: PTH115
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StagingError, match=r"could not be written .*Input/output error"):
        _made(tmp_path / "near", find_local(str(store)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_record_that_cannot_be_written_leaves_nothing_held(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, record: Record) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = find_local(str(store))
    monkeypatch.setattr(staged_copy, "write_record", full)
    with pytest.raises(StagingError, match=r"near cannot be written \(No space left on device\)"):
        _made(tmp_path / "near", source)
    file = lock_entry(tmp_path / "near" / f"{source.key}.part", alone=True)
    assert file is not None
    os.close(file)


def test_what_is_wrong_with_a_copy_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    state = CopiedFile("a.bin", 3, 3, 0x352441C2, path.stat().st_mtime_ns)  # CRC-32 of "abc", as published
    record = Record("", "", "", False, [state])
    assert fault_of(tmp_path, record, read=True) is None
    path.write_bytes(b"abd")
    os.utime(path, ns=(state.mtime_ns, state.mtime_ns))
    assert fault_of(tmp_path, record, read=False) is None
    assert fault_of(tmp_path, record, read=True) == "the checksum of a.bin does not match"
    os.utime(path, ns=(1, 1))
    assert fault_of(tmp_path, record, read=False) == "a.bin was changed after it was staged"
    path.unlink()
    assert fault_of(tmp_path, record, read=False) == "a.bin cannot be read (No such file or directory)"
    assert copied_bytes([tmp_path, tmp_path / "none"], find_local(__file__)) == 0


def test_the_bar_goes_to_the_error_stream_and_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with contextlib.suppress(KeyError), progress_bar(shown, "staging a.lmdb", 2_000_000) as show:
            show(1_000_000)
            raise KeyError
        told = capsys.readouterr()
        assert told.out == ""
        assert ("staging a.lmdb" in told.err and "1.0/2.0 MB" in told.err) == shown
        assert bool(told.err) == shown
