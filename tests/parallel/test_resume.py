"""The newest checkpoint that is whole, and how a new one takes the place of an old one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_speedkit.parallel.resume import newest_checkpoint, publish_checkpoint


def write(path: Path, seconds: int, value: int = 0) -> Path:
    torch.save({"value": value}, path)
    os.utime(path, (seconds, seconds))
    return path


def test_the_newest_counts_whoever_wrote_it(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path / "a.ckpt", 300)
    write(tmp_path / "b.ckpt", 400)
    write(tmp_path / "c.ckpt", 200)
    write(tmp_path / "other.pt", 500)
    write(tmp_path / ".interrupted.ckpt", 500)
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "b.ckpt")


def test_one_that_is_torn_is_passed_over(tmp_path: Path) -> None:
    whole, torn = write(tmp_path / "whole.ckpt", 100), write(tmp_path / "torn.ckpt", 200)
    torn.write_bytes(torn.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"torn.ckpt is not a complete checkpoint"):
        assert newest_checkpoint(tmp_path) == str(whole)


def test_a_folder_of_one_file_per_rank(tmp_path: Path) -> None:
    (tmp_path / "shards.ckpt").mkdir()
    with pytest.warns(UserWarning, match="shards.ckpt"):
        assert newest_checkpoint(tmp_path) is None
    (tmp_path / "shards.ckpt" / ".metadata").touch()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "shards.ckpt")


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "gone.ckpt")
    with pytest.warns(UserWarning, match="last.ckpt"):
        assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("before", ["nothing", "file", "folder"])
@pytest.mark.parametrize("now", ["file", "folder"])
def test_a_checkpoint_gets_its_name(tmp_path: Path, before: str, now: str) -> None:
    part, name = tmp_path / ".x.part", tmp_path / "x.ckpt"
    for path, kind, text in ((name, before, "old"), (part, now, "new")):
        if kind == "file":
            path.write_text(text)
        elif kind == "folder":
            path.mkdir()
            (path / text).touch()
    publish_checkpoint(part, name)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    assert name.read_text() == "new" if now == "file" else [path.name for path in name.iterdir()] == ["new"]


def test_what_an_interrupted_change_left_is_no_obstacle(tmp_path: Path) -> None:
    part, name, left = tmp_path / ".x.part", tmp_path / "x.ckpt", tmp_path / ".x.ckpt.before"
    for folder in (part, name, left):
        folder.mkdir()
        (folder / folder.name).touch()
    publish_checkpoint(part, name)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
