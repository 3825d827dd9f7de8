"""Trees of pictures: order, classes, what is left out, and broken files."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.data.sources.image_folder import ImageFolder, class_folders
from lightning_speedkit.errors import SourceError
from tests.data.sources.pictures import encoded, make_tree, picture


def test_samples_are_the_bytes_and_the_number_of_the_folder() -> None:
    files = make_tree(Path("tree"), {"dog": 3, "cat": 2, "ape/young": 1})
    source = ImageFolder(Path("tree"))
    assert source.classes == ("ape", "cat", "dog")
    expected = [(files[name], source.classes.index(name.split("/")[0])) for name in sorted(files)]
    assert list(source) == expected
    assert len(source) == 6
    assert [item.place for item in source.items()][:2] == ["tree/ape/young/000.png", "tree/cat/000.png"]


def test_a_limit_takes_from_every_class() -> None:
    make_tree(Path("tree"), dict.fromkeys("abcd", 10))
    source = ImageFolder(Path("tree"))
    assert Counter(item.read()[1] for item in source.limited(8)) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert [item.place for item in source.limited(99)] == [item.place for item in source.items()]
    assert len({item.place for item in source.limited(39)}) == 39


def test_other_files_are_left_out_and_told() -> None:
    make_tree(Path("tree"), {"a": 1})
    Path("tree/a/notes.txt").write_text("x")
    Path("tree/a/.hidden.jpg").write_text("x")
    Path("tree/.git").mkdir()
    Path("tree/labels.csv").write_text("x")
    Path("tree/b").mkdir()
    source = ImageFolder(Path("tree"))
    assert len(source) == 1
    assert source.notes() == ("files that are no pictures were left out: 1 .txt", "classes without a picture: b")


def test_links_are_followed_and_a_loop_ends() -> None:
    make_tree(Path("elsewhere"), {"cat": 2})
    Path("tree").mkdir()
    Path("tree/cat").symlink_to(Path("elsewhere/cat").absolute())
    Path("elsewhere/cat/again").symlink_to(Path("elsewhere/cat").absolute())
    assert len(ImageFolder(Path("tree"))) == 2


def test_classes_of_other_folders_can_be_given() -> None:
    make_tree(Path("val"), {"b": 1})
    source = ImageFolder(Path("val"), classes=("a", "b", "c"))
    assert [label for _, label in source] == [1]
    assert source.notes() == ("classes without a picture: a, c",)


def test_a_broken_file_is_named_when_it_is_read() -> None:
    files = make_tree(Path("tree"), {"a": 4})
    Path("tree/a/002.png").write_bytes(files["a/002.png"][:-20])
    Path("tree/a/003.jpg").unlink()
    Path("tree/a/003.jpg").symlink_to("nowhere")
    first, second, third, fourth = ImageFolder(Path("tree")).items()
    assert (first.read()[1], second.read()[1]) == (0, 0)
    with pytest.raises(SourceError, match=r"^tree/a/002\.png: A truncated PNG of 10 x 12 pixels: its \d+ bytes lack"):
        third.read()
    with pytest.raises(SourceError, match=r"^tree/a/003\.jpg: cannot be read: No such file"):
        fourth.read()


def test_folders_that_are_not_such_a_tree_are_refused() -> None:
    Path("flat").mkdir()
    Path("flat/a.jpg").write_bytes(encoded(picture(0)))
    with pytest.raises(SourceError, match="but there is none"):
        ImageFolder(Path("flat"))
    Path("flat/cat").mkdir()
    with pytest.raises(SourceError, match=r"the picture a\.jpg lies beside them"):
        ImageFolder(Path("flat"))
    Path("empty/cat").mkdir(parents=True)
    with pytest.raises(SourceError, match="holds no picture"):
        ImageFolder(Path("empty"))
    with pytest.raises(SourceError, match="cannot be listed"):
        class_folders(Path("nowhere"))


def test_a_folder_that_cannot_be_listed_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(Path("tree"), {"a": 1, "a/closed": 2})
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"^tree/a/closed cannot be listed: Permission denied\.$"):
        ImageFolder(Path("tree"))
