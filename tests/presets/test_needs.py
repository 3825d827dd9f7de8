from __future__ import annotations

import importlib.metadata
from email.message import Message

import pytest

from lightning_speedkit.facts import Hardware
from lightning_speedkit.presets import needs
from lightning_speedkit.presets.needs import missing_needs
from tests.presets.machines import CPU, CPU_BF16, H100, T4, TWO_H100

MPS = Hardware(accelerator="mps", device_name="Apple arm64", native_bf16=True)
MI250 = Hardware(accelerator="cuda", device_name="MI250", capability=(9, 0), is_rocm=True, native_bf16=True)


@pytest.mark.parametrize(
    ("need", "met_on", "not_on"),
    [
        ("cuda", (T4, H100, MI250), (CPU, MPS)),
        ("gpu", (T4, H100, MPS, MI250), (CPU,)),
        ("capability>=8.0", (H100, CPU, MPS, MI250), (T4,)),
        ("capability>=7.5", (T4, H100), ()),
        ("capability>=10.0", (CPU,), (T4, H100)),
        ("native-bf16", (CPU_BF16, T4, H100, MPS, MI250), (CPU,)),
        ("devices>=2", (TWO_H100, CPU), (H100, T4, MPS)),
        ("devices>=3", (CPU,), (TWO_H100,)),
    ],
)
def test_each_need_on_each_machine(need: str, met_on: tuple[Hardware, ...], not_on: tuple[Hardware, ...]) -> None:
    assert all(missing_needs([need], machine) == () for machine in met_on)
    assert all(len(missing_needs([need], machine)) == 1 for machine in not_on)


def test_machines_add_up_to_devices() -> None:
    assert missing_needs(["devices>=2"], H100, num_nodes=2) == ()
    assert missing_needs(["devices>=4"], TWO_H100, num_nodes=1) == ("4 devices or more",)
    assert missing_needs(["devices>=4"], TWO_H100, num_nodes=2) == ()


def test_a_need_that_nobody_knows_is_no_silent_yes() -> None:
    with pytest.raises(ValueError, match=r"'capability>8'.*known are"):
        missing_needs(["capability>8"], H100)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed libraries, by name; the kit requires what ``requires`` lists."""
    installed: dict[str, str] = {"there": "2.1", "old": "1.0"}
    requires = [
        "plain>=1",
        'there>=2; extra == "fine"',
        'old>=2; extra == "mixed"',
        'absent; extra == "mixed"',
        'there; extra == "mixed"',
        'elsewhere; extra == "fine" and sys_platform == "no-such"',
        'lightning-speedkit[mixed]; extra == "outer"',
        'absent; extra == "everywhere" or python_version >= "3"',
    ]

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(needs.importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(needs.importlib.metadata, "version", version)
    metadata = Message()
    for extra in ("fine", "mixed", "outer", "everywhere", "with-hyphen"):
        metadata["Provides-Extra"] = extra
    monkeypatch.setattr(needs.importlib.metadata, "metadata", lambda name: metadata)
    return installed


def test_an_extra_is_there_when_each_of_its_libraries_is_new_enough(libraries: dict[str, str]) -> None:
    assert missing_needs(["extra:fine"], CPU) == ()
    assert missing_needs(["extra:mixed"], CPU) == ("old, absent (pip install 'lightning-speedkit[mixed]')",)
    assert missing_needs(["extra:outer"], CPU) == ("old, absent (pip install 'lightning-speedkit[outer]')",)
    libraries |= {"old": "2.0", "absent": "0.1"}
    assert missing_needs(["extra:mixed", "extra:outer"], CPU) == ()


def test_what_is_required_without_the_extra_is_not_the_extras_lack(libraries: dict[str, str]) -> None:
    assert missing_needs(["extra:everywhere"], CPU) == ()


def test_an_extra_that_the_installed_package_does_not_know_is_missing(libraries: dict[str, str]) -> None:
    (text,) = missing_needs(["extra:new"], CPU)
    assert text.startswith("the extra 'new', which lightning-speedkit as it is installed does not know (reinstall it: ")
    assert "pip install -e '.[new]'" in text
    assert missing_needs(["extra:with_hyphen"], CPU) == ()


def test_from_a_source_tree_nobody_knows_what_an_extra_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(needs.importlib.metadata, "requires", none)
    monkeypatch.setattr(needs.importlib.metadata, "metadata", none)
    assert missing_needs(["extra:quant"], CPU) == ()
