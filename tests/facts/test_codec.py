"""Facts survive JSON unchanged; what is newer or damaged is refused; a failed write leaves the old file."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_speedkit.errors import FactsError
from lightning_speedkit.facts import Hardware, RunFacts, StepTiming, codec, read_run, run_from_json, run_to_json
from lightning_speedkit.facts import write_run as write

SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
COUNT = st.integers(min_value=0)
TEXT = st.text(alphabet=st.characters(codec="utf-8"))


def _all_of(cls: Any, **special: Any) -> Any:
    """Every field from its type, so that a new field is covered without editing this test."""
    kinds = {"int": COUNT, "float": SECONDS, "str": TEXT, "bool": st.booleans()}
    drawn = {f.name: special[f.name] if f.name in special else kinds[f.type] for f in dataclasses.fields(cls)}
    return st.builds(cls, **drawn)


RUNS = _all_of(
    RunFacts,
    hardware=_all_of(Hardware, capability=st.none() | st.tuples(COUNT, COUNT)),
    train=_all_of(StepTiming),
    versions=st.dictionaries(TEXT, TEXT),
)
RUN = RunFacts(hardware=Hardware(accelerator="cpu", device_name="a CPU"), train=StepTiming(steps=3))


@given(RUNS)
def test_round_trip(run: RunFacts) -> None:
    assert run_from_json(run_to_json(run)) == run


def test_a_newer_version_is_refused_with_both_versions() -> None:
    content = {**json.loads(run_to_json(RUN)), "schema_version": 7}
    with pytest.raises(FactsError, match=r"schema version 7; .* reads up to 1"):
        run_from_json(json.dumps(content))


def test_an_older_file_that_lacks_fields_gets_their_defaults() -> None:
    content = json.loads(run_to_json(RUN))
    for name in ("versions", "seconds_warmup", "outcome"):
        del content[name]
    assert run_from_json(json.dumps(content)) == RUN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[1]", "schema"),
        ('{"schema": "benchmark", "schema_version": 1}', "schema"),
        ('{"schema": "run"}', "schema_version None"),
        ('{"schema": "run", "schema_version": "1"}', "schema_version '1'"),
        ('{"schema": "run", "schema_version": 1}', "hardware"),
        ('{"schema": "run", "schema_version": 1, "hardware": 5, "train": {}}', "damaged"),
        ('{"schema": "run", "schema_version": 1, "hardware": {"nonsense": 1}, "train": {}}', "nonsense"),
    ],
)
def test_damage_is_told(text: str, told: str) -> None:
    with pytest.raises(FactsError, match=told):
        run_from_json(text)


def test_what_json_cannot_say_is_refused_and_not_written(tmp_path: Path) -> None:
    bad = dataclasses.replace(RUN, seconds_fit=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write(bad, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_complete_readable_and_alone(tmp_path: Path) -> None:
    path = write(RUN, tmp_path / "deep" / "run.json")
    assert read_run(path) == RUN
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(RUN, tmp_path / "run.json")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codec.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(dataclasses.replace(RUN, epochs=9), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
