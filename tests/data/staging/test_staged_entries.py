"""Staged copies in a folder: records, locks, and what is removed to make room."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_speedkit.data.staging import staged_entries
from lightning_speedkit.data.staging.staged_entries import entries_in, lock_entry, make_room, remove_entry
from lightning_speedkit.data.staging.staged_record import CopiedFile, Record, write_record
from lightning_speedkit.errors import StagingError
from tests.data.forked import end_of_fork

MIB = 1 << 20


def _entry(root: Path, name: str, size: int = MIB, *, used: float = 1e9, end: str = "", written: int = -1) -> Path:
    folder = root / f"{name}-{'0' * 16}{end}"
    folder.mkdir(parents=True)
    (folder / f"{name}.lmdb").write_bytes(bytes(size if written < 0 else written))
    write_record(folder, Record("s3://b/x", f"id of {name}", "v", False, [CopiedFile(f"{name}.lmdb", size, size)]))
    (folder / ".in-use").touch()
    os.utime(folder / ".in-use", (used, used))
    return folder


def _names(root: Path) -> list[str]:
    return sorted(path.name.removesuffix(f"-{'0' * 16}") for path in root.iterdir())


def _has_free(monkeypatch: pytest.MonkeyPatch, root: Path, capacity: int) -> None:
    """A disk of ``capacity`` bytes on which only the files below ``root`` lie."""
    space = namedtuple("space", "f_bavail f_frsize")

    def statvfs(path: object) -> object:
        return space(capacity - sum(p.stat().st_size for p in root.rglob("*.lmdb")), 1)

    monkeypatch.setattr(os, "statvfs", statvfs)


def _is_locked_elsewhere(folder: Path) -> bool:
    """Whether another process could not remove it."""

    def attempt() -> None:
        if lock_entry(folder, alone=True) is None:
            raise BlockingIOError

    return end_of_fork(attempt) == "raised"


def test_users_share_a_copy_and_who_removes_it_must_be_alone(tmp_path: Path) -> None:
    folder = _entry(tmp_path, "a")
    first, second = lock_entry(folder, alone=False), lock_entry(folder, alone=False)
    assert first is not None
    assert second is not None
    assert lock_entry(folder, alone=True) is None
    assert _is_locked_elsewhere(folder)
    os.close(first)
    assert not remove_entry(folder)
    os.close(second)
    assert not _is_locked_elsewhere(folder)
    assert remove_entry(folder)
    assert list(tmp_path.iterdir()) == []
    assert lock_entry(folder, alone=False) is None
    assert lock_entry(folder, alone=True) is None


def test_a_forked_child_keeps_the_copy_of_its_parent(tmp_path: Path) -> None:
    folder = _entry(tmp_path, "a")
    held, told = os.pipe()
    waits, lets_go = os.pipe()
    file = lock_entry(folder, alone=False)
    assert file is not None
    child = os.fork()
    if child == 0:
        os.close(lets_go)
        os.write(told, b"x")
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    os.read(held, 1)
    os.close(file)
    assert not remove_entry(folder)
    os.close(lets_go)
    os.waitpid(child, 0)
    assert remove_entry(folder)


def test_use_is_noted_and_orders_the_copies(tmp_path: Path) -> None:
    first, second, third = (_entry(tmp_path, name, used=used) for name, used in (("a", 10), ("b", 30), ("c", 20)))
    assert [entry.folder for entry in entries_in(tmp_path)] == [first, third, second]
    file = lock_entry(first, alone=False)
    assert file is not None
    os.close(file)
    assert [entry.folder for entry in entries_in(tmp_path)] == [third, second, first]
    gone = _entry(tmp_path, "d", used=99, end=".gone")
    assert next(iter(entries_in(tmp_path))).folder == gone
    assert [entry.is_whole for entry in entries_in(tmp_path)] == [False, True, True, True]


def test_a_copy_in_use_is_removed_by_force_only_and_stays_readable_where_it_is_open(tmp_path: Path) -> None:
    folder = _entry(tmp_path, "a")
    file = lock_entry(folder, alone=False)
    assert file is not None
    with (folder / "a.lmdb").open("rb") as stream:
        assert remove_entry(folder, force=True)
        assert list(tmp_path.iterdir()) == []
        assert stream.read() == bytes(MIB)
    os.close(file)


def test_files_of_others_are_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither beside a copy nor in it, nor a folder that only looks like one."""
    mine = _entry(tmp_path, "mine")
    (mine / "notes.txt").write_text("of the user")
    (tmp_path / "file.lmdb").write_bytes(bytes(100))
    looks_like = tmp_path / f"other-{'0' * 16}"
    looks_like.mkdir()
    (looks_like / "other.lmdb").write_bytes(bytes(100))
    outside = _entry(tmp_path / "elsewhere", "linked")
    (tmp_path / f"link-{'0' * 16}").symlink_to(outside)
    named_otherwise = _entry(tmp_path, "x").rename(tmp_path / "renamed")

    _has_free(monkeypatch, tmp_path, 5 * MIB)
    with pytest.raises(StagingError, match="lacks the space"):
        make_room(tmp_path, tmp_path / "new", whole_bytes=10 * MIB, new_bytes=10 * MIB, max_bytes=None)
    make_room(tmp_path, tmp_path / "new", whole_bytes=MIB, new_bytes=MIB, max_bytes=MIB)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(
        [
            f"mine-{'0' * 16}.gone/notes.txt",
            "file.lmdb",
            f"other-{'0' * 16}/other.lmdb",
            *(f"elsewhere/{outside.name}/{name}" for name in (".in-use", ".staged.json", "linked.lmdb")),
            *(f"{named_otherwise.name}/{name}" for name in (".in-use", ".staged.json", "x.lmdb")),
        ]
    )


def test_the_longest_unused_go_first_and_no_more_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size, used in (("a", 2, 40), ("b", 1, 10), ("c", 3, 30), ("d", 2, 20)):
        _entry(tmp_path, name, size * MIB, used=used)
    # 8 of 10 MiB are taken; 3 + 1 (for the folder) are needed: b and d go, oldest first, and that is enough
    _has_free(monkeypatch, tmp_path, 10 * MIB)
    make_room(tmp_path, tmp_path / "new", whole_bytes=3 * MIB, new_bytes=3 * MIB, max_bytes=None)
    assert _names(tmp_path) == ["a", "c"]


def test_the_limit_counts_all_copies_together(tmp_path: Path) -> None:
    for name, used in (("a", 40), ("b", 10), ("c", 30)):
        _entry(tmp_path, name, MIB, used=used)
    make_room(tmp_path, tmp_path / "new", whole_bytes=MIB, new_bytes=MIB, max_bytes=4 * MIB)
    assert _names(tmp_path) == ["a", "b", "c"]
    make_room(tmp_path, tmp_path / "new", whole_bytes=MIB, new_bytes=MIB, max_bytes=3 * MIB)
    assert _names(tmp_path) == ["a", "c"]


def test_nothing_is_removed_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _entry(tmp_path, "a", MIB)
    busy = _entry(tmp_path, "b", 3 * MIB)
    file = lock_entry(busy, alone=False)
    assert file is not None
    _has_free(monkeypatch, tmp_path, 5 * MIB)
    told = (
        rf"{5 * MIB:,} bytes .* are needed, {MIB:,} bytes .* are free, even if .*In use: {busy.name}\. Free some space"
    )
    with pytest.raises(StagingError, match=told):
        make_room(tmp_path, tmp_path / "new", whole_bytes=4 * MIB, new_bytes=4 * MIB, max_bytes=None)
    with pytest.raises(StagingError, match=rf"{4 * MIB:,} bytes .*, max_bytes={5 * MIB} allows {MIB:,} bytes .* even"):
        make_room(tmp_path, tmp_path / "new", whole_bytes=4 * MIB, new_bytes=0, max_bytes=5 * MIB)
    assert _names(tmp_path) == ["a", "b"]
    os.close(file)


def test_a_copy_under_way_elsewhere_keeps_the_space_that_it_still_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = _entry(tmp_path, "a", 4 * MIB, written=MIB, end=".part")
    _has_free(monkeypatch, tmp_path, 6 * MIB)  # 5 free, of which 3 are for the other copy
    file = lock_entry(under_way, alone=True)
    assert file is not None
    with pytest.raises(
        StagingError, match=rf"{5 * MIB:,} bytes .* are free, .* under way still need {3 * MIB:,} bytes"
    ):
        make_room(tmp_path, tmp_path / "new", whole_bytes=2 * MIB, new_bytes=2 * MIB, max_bytes=None)
    make_room(tmp_path, tmp_path / "new", whole_bytes=MIB, new_bytes=MIB, max_bytes=None)
    os.close(file)  # it broke off: what it awaited is free, and it may go as well
    make_room(tmp_path, tmp_path / "new", whole_bytes=4 * MIB, new_bytes=4 * MIB, max_bytes=None)
    assert under_way.exists()
    make_room(tmp_path, tmp_path / "new", whole_bytes=5 * MIB, new_bytes=5 * MIB, max_bytes=None)
    assert _names(tmp_path) == []


def test_the_copy_in_the_making_is_not_removed_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = _entry(tmp_path, "a", 8 * MIB, written=MIB, end=".part")
    _has_free(monkeypatch, tmp_path, 5 * MIB)
    with pytest.raises(StagingError, match="lacks the space"):
        make_room(tmp_path, part, whole_bytes=8 * MIB, new_bytes=7 * MIB, max_bytes=None)
    assert part.exists()


def test_a_removal_that_was_killed_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _entry(tmp_path, "a")

    def kill(folder: Path, record: Record | None) -> None:
        os.kill(os.getpid(), 9)

    def killed() -> None:
        monkeypatch.setattr(staged_entries, "_delete", kill)
        remove_entry(folder)

    assert end_of_fork(killed) == "SIGKILL"
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == [f"{folder.name}.gone"]
    make_room(tmp_path, tmp_path / "new", whole_bytes=0, new_bytes=0, max_bytes=None)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_may_not_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _entry(tmp_path, "a")

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(staged_entries, "_delete", refuse)
    assert not remove_entry(folder)
    with pytest.raises(PermissionError):
        remove_entry(folder.with_name(f"{folder.name}.gone"), force=True)
