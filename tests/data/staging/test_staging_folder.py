"""Which folder is chosen, on machines whose disks are made up, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_speedkit.data.staging import staging_folder
from lightning_speedkit.data.staging.staging_folder import folders_for_staging, make_folder
from lightning_speedkit.errors import StagingError
from lightning_speedkit.facts.storage import FileSystem

OWN = f"speedkit-{os.getuid()}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of which each lies on the kind of file system that its name says."""
    for name in (
        "job disk",
        "job network",
        "local1 turning",
        "local2 disk",
        "scratch network",
        "tmp memory",
        "cache disk",
    ):
        (tmp_path / name).mkdir()

    def read(path: str | os.PathLike[str]) -> FileSystem:
        kind = Path(path).name.split()[-1]
        turns = True if kind == "turning" else None
        return FileSystem(kind="disk" if kind == "turning" else kind, type="some", rotational=turns)

    monkeypatch.setattr(staging_folder, "read_file_system", read)
    patterns = tuple(f"{tmp_path}/{pattern}" for pattern in ("local*", "none*", "scratch*", "tmp*"))
    monkeypatch.setattr(staging_folder, "_OF_THE_NODE", patterns)
    for name in (*staging_folder._OF_THE_JOB, staging_folder.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache disk"))
    return tmp_path


def test_the_disk_of_the_job_comes_first_and_one_that_turns_last(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(machine / "job network"))
    monkeypatch.setenv("SLURM_TMPDIR", str(machine / "job disk"))
    found = folders_for_staging()
    assert [path.parent.name for path in found] == ["job disk", "local2 disk", "cache disk", "local1 turning"]
    assert {path.name for path in found} == {OWN}
    assert not any(path.exists() for path in found)  # made when needed


def test_a_folder_under_two_names_is_taken_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "link disk").symlink_to(machine / "local2 disk")
    monkeypatch.setenv("TMPDIR", str(machine / "link disk"))
    assert [path.parent.name for path in folders_for_staging()] == ["local2 disk", "cache disk", "local1 turning"]


def test_without_any_local_disk_every_refusal_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_folder, "_OF_THE_NODE", (f"{machine}/scratch*", f"{machine}/tmp*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "none"))
    monkeypatch.setenv("TMPDIR", str(machine / "cache disk"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = (
        "cache disk cannot be written.*scratch network is .*over the network.*tmp memory is .*in memory.*SPEEDKIT_CACHE"
    )
    with pytest.raises(StagingError, match=told):
        folders_for_staging()
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(staging_folder, "_OF_THE_NODE", ())
    with pytest.raises(StagingError, match="no candidate exists"):
        folders_for_staging()


def test_a_named_folder_is_taken_as_it_is(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDKIT_CACHE", str(machine / "new" / "memory"))
    assert folders_for_staging() == [machine / "new" / "memory"]
    assert (machine / "new" / "memory").is_dir()
    assert folders_for_staging(machine / "scratch network") == [machine / "scratch network"]
    monkeypatch.setenv("SPEEDKIT_CACHE", "")
    assert len(folders_for_staging()) == 3


def test_a_named_folder_that_will_not_do_says_who_named_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").write_bytes(b"x")
    with pytest.raises(StagingError, match="file/x, named by folder, cannot be made"):
        folders_for_staging(machine / "file" / "x")
    monkeypatch.setenv("SPEEDKIT_CACHE", str(machine / "file"))
    with pytest.raises(StagingError, match="named by the environment variable SPEEDKIT_CACHE, cannot be made"):
        folders_for_staging()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StagingError, match="cannot be written by this user"):
        folders_for_staging(machine / "job disk")


def test_the_folder_is_private_to_the_user(machine: Path) -> None:
    (folder, *_) = folders_for_staging()
    make_folder(folder)
    make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder in folders_for_staging()


@pytest.mark.parametrize("prepared", ["link", "open to others", "of another user", "file"])
def test_a_folder_that_somebody_else_prepared_is_not_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, prepared: str
) -> None:
    trap = machine / "local2 disk" / OWN
    if prepared == "link":
        trap.symlink_to(machine / "cache disk")
    elif prepared == "file":
        trap.write_bytes(b"x")
    else:
        trap.mkdir()
        trap.chmod(0o777 if prepared == "open to others" else 0o700)
    if prepared == "of another user":
        user = os.getuid()
        monkeypatch.setattr(staging_folder, "_own_name", lambda: OWN)
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(StagingError, match=r"belongs to another user|cannot be made"):
        make_folder(trap)
    if prepared != "of another user":
        assert [path.parent.name for path in folders_for_staging()] == ["cache disk", "local1 turning"]


def test_where_no_file_system_is_known_every_folder_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_folder, "read_file_system", lambda path: FileSystem(kind="unknown"))
    assert len(folders_for_staging()) == 5
    monkeypatch.setattr(staging_folder, "read_file_system", lambda path: FileSystem(kind="unknown", type="newfs"))
    with pytest.raises(StagingError, match="newfs, of unknown kind"):
        folders_for_staging()
