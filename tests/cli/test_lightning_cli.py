from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, ModelSummary
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit import presets
from lightning_speedkit.cli import SpeedkitCLI
from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.presets.snippet import yaml_snippet
from lightning_speedkit.registry import Part, Preset, TrainerPatch
from tests.presets.machines import CPU, CPU_BF16, T4, install_extras, stand_on

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
_ACCUMULATION = "lightning_speedkit.optimize.AccumulationScheduler"
_GPU = {
    **dict.fromkeys(("fp16-mixed", "single-gpu", "multi-gpu"), "a GPU"),
    **dict.fromkeys(("tf32", "fp8", "adamw-cpu-offload", "offload-activations"), "a CUDA device"),
}


@pytest.fixture(autouse=True)
def _alone_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    stand_on(monkeypatch, CPU_BF16, cpu=CPU_BF16)


@pytest.fixture
def own() -> None:
    """A preset that sets arguments away from the Trainer's defaults, and a callback."""
    presets.register(
        Preset(
            name="own",
            kind="mine",
            summary="s",
            patch=TrainerPatch(
                arguments={"benchmark": True, "max_epochs": 7, "gradient_clip_val": 0.5, "precision": "64-true"},
                callbacks=(Part(EarlyStopping, {"monitor": "x", "patience": 9}),),
            ),
        )
    )


def _cli(args: list[str] | dict[str, Any] | None, **options: Any) -> SpeedkitCLI:
    """The CLI without a subcommand, quiet and on the CPU unless the test says otherwise."""
    defaults = {**_QUIET, **options.pop("trainer_defaults", {})}
    options.setdefault("save_config_callback", None)
    return SpeedkitCLI(
        BoringModel, run=False, args=args, trainer_defaults=defaults, seed_everything_default=False, **options
    )


def _write(path: str, **config: Any) -> str:
    Path(path).write_text(yaml.safe_dump(config))
    return path


def _described(trainer: Trainer) -> dict[str, Any]:
    """What a preset can change in a Trainer."""
    plugin = trainer.precision_plugin
    return {
        "callbacks": [(type(callback).__name__, getattr(callback, "schedule", None)) for callback in trainer.callbacks],
        "strategy": type(trainer.strategy).__name__,
        "precision": (trainer.precision, type(plugin).__name__, getattr(plugin, "device", None)),
        "numbers": [trainer.max_epochs, trainer.accumulate_grad_batches, trainer.num_devices],
    }


# Ways to select


@pytest.mark.parametrize(
    "args",
    [
        ["--presets", "bf16-mixed,accumulate-4"],
        ["--presets=bf16-mixed, accumulate-4"],
        ["--presets", "[bf16-mixed, accumulate-4]"],
        ["--presets", "bf16-mixed", "--presets+", "accumulate-4"],
        ["--presets+", "bf16-mixed", "--presets+=accumulate-4"],
        ["--presets+=[bf16-mixed, accumulate-4, bf16-mixed]"],
        ["--config", "list.yaml"],
        ["--config", "text.yaml"],
        ["--config", "one.yaml", "--presets+=accumulate-4"],
        ["--config", "other.yaml", "--presets", "bf16-mixed,accumulate-4"],
        {"presets": ["bf16-mixed", "accumulate-4"]},
        {"presets": "bf16-mixed,accumulate-4"},
    ],
)
def test_each_way_to_select_gives_the_same(args: Any) -> None:
    _write("list.yaml", presets=["bf16-mixed", "accumulate-4"])
    _write("text.yaml", presets="bf16-mixed,accumulate-4")
    _write("one.yaml", presets=["bf16-mixed"])
    _write("other.yaml", presets=["fp32"])
    cli = _cli(args)
    expected = Trainer(**presets.trainer_kwargs("bf16-mixed", "accumulate-4", **_QUIET))
    assert cli.config.presets == ["bf16-mixed", "accumulate-4"]
    assert _described(cli.trainer) == _described(expected)


def test_the_words_of_the_command_line_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--presets", "fp32,accumulate-4", "--trainer.max_epochs", "3"])
    cli = _cli(None)
    assert cli.config.presets == ["fp32", "accumulate-4"]
    assert (cli.trainer.precision, cli.trainer.max_epochs) == ("32-true", 3)
    assert _callbacks(cli.trainer) == ["AccumulationScheduler"]


@pytest.mark.parametrize(
    "words", [["--config", "top.yaml"], ["--config", "top.yaml", "fit"], ["fit", "-c", "fit.yaml"]]
)
@pytest.mark.parametrize("printing", [False, True])
def test_the_config_of_a_subcommand_selects_too(
    words: list[str], printing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {**_QUIET, "fast_dev_run": True}
    _write("fit.yaml", presets=["accumulate-4"], trainer=trainer)
    _write("top.yaml", fit={"presets": ["accumulate-4"], "trainer": trainer})
    if printing:
        printed = _printed(capsys, lambda: SpeedkitCLI(BoringModel, args=[*words, "--print_config"]))
        section = printed.get("fit", printed)
        assert [entry["class_path"].rpartition(".")[2] for entry in section["trainer"]["callbacks"]] == [
            "AccumulationScheduler"
        ]
        return
    cli = SpeedkitCLI(BoringModel, args=words)
    assert cli.config.fit.presets == ["accumulate-4"]
    assert _callbacks(cli.trainer) == ["AccumulationScheduler"]


def test_default_config_files_and_the_environment_select_too(monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write("defaults.yaml", presets=["accumulate-4"], trainer={"max_epochs": 3})
    cli = _cli([], parser_kwargs={"default_config_files": [path]})
    assert (cli.config.presets, cli.trainer.max_epochs) == (["accumulate-4"], 3)
    monkeypatch.setenv("PL_PRESETS", "[fp32]")
    cli = _cli([], parser_kwargs={"default_env": True})
    assert (cli.config.presets, cli.trainer.precision) == (["fp32"], "32-true")


@pytest.mark.parametrize("value", [[], None, ""])
def test_no_preset_is_lightning_cli(value: Any) -> None:
    cli = _cli({"presets": value})
    assert cli.config.presets == []
    assert _described(cli.trainer) == _described(Trainer(**_QUIET))


@pytest.mark.parametrize("name", presets.names())
def test_the_yaml_of_every_preset(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_extras(monkeypatch)
    Path("run.yaml").write_text(yaml_snippet([name]))
    if name in _GPU:
        with pytest.raises(SystemExit) as raised:
            _cli(["--config", "run.yaml"], trainer_defaults={"accelerator": "auto"})
        assert raised.value.code == 2
        assert f"'{name}' needs {_GPU[name]}" in capsys.readouterr().err
        return
    cli = _cli(["--config", "run.yaml"])
    assert _described(cli.trainer) == _described(Trainer(**presets.trainer_kwargs(name, **_QUIET)))


# Precedence

_OWN = {"benchmark": True, "max_epochs": 7, "gradient_clip_val": 0.5, "precision": "64-true"}
_DEFAULT = {"benchmark": None, "max_epochs": None, "gradient_clip_val": None, "precision": None}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("how", ["yaml", "command line", "environment", "default file", "dict"])
@pytest.mark.parametrize("given", [*_DEFAULT, None])
def test_what_is_given_wins_also_where_it_is_the_trainers_default(
    how: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {} if given is None else {given: _DEFAULT[given]}
    arguments: Any = ["--presets", "own"]
    options: dict[str, Any] = {}
    if how == "yaml":
        arguments += ["--config", _write("c.yaml", trainer=trainer)]
    elif how == "command line":
        arguments += [f"--trainer.{name}=null" for name in trainer]
    elif how == "environment":
        options = {"parser_kwargs": {"default_env": True}}
        for name in trainer:
            monkeypatch.setenv(f"PL_TRAINER__{name.upper()}", "null")
    elif how == "default file":
        options = {"parser_kwargs": {"default_config_files": [_write("d.yaml", trainer=trainer)]}}
    else:
        arguments = {"presets": ["own"], "trainer": trainer}
    config = _cli(arguments, **options).config.trainer
    assert {name: config[name] for name in _OWN} == _OWN | trainer


@pytest.mark.usefixtures("own")
def test_the_command_line_wins_over_yaml_and_yaml_over_the_preset() -> None:
    path = _write("c.yaml", presets=["own"], trainer={"max_epochs": 3, "gradient_clip_val": 0.25})
    config = _cli(["--config", path, "--trainer.max_epochs", "2"]).config.trainer
    assert (config.max_epochs, config.gradient_clip_val, config.benchmark) == (2, 0.25, True)


@pytest.mark.usefixtures("own")
def test_a_preset_wins_over_the_defaults_of_the_program() -> None:
    config = _cli(["--presets", "own"], trainer_defaults={"max_epochs": 1, "num_nodes": 1}).config.trainer
    assert config.max_epochs == 7


@pytest.mark.parametrize(
    ("trainer", "precision", "plugin"),
    [
        ({}, "bf16-mixed", "SpeedkitMixedPrecision"),
        ({"precision": None}, "32-true", "Precision"),
        ({"precision": "32-true"}, "32-true", "Precision"),
        ({"precision": "64-true"}, "64-true", "DoublePrecision"),
        ({"plugins": {"class_path": "lightning.pytorch.plugins.DoublePrecision"}}, "64-true", "DoublePrecision"),
        ({"plugins": [{"class_path": "lightning.pytorch.plugins.DoublePrecision"}]}, "64-true", "DoublePrecision"),
        (
            {"plugins": [{"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"}]},
            "bf16-mixed",
            "SpeedkitMixedPrecision",
        ),
        (
            {
                "strategy": {
                    "class_path": "lightning.pytorch.strategies.DDPStrategy",
                    "init_args": {"precision_plugin": {"class_path": "lightning.pytorch.plugins.DoublePrecision"}},
                }
            },
            "64-true",
            "DoublePrecision",
        ),
    ],
)
@pytest.mark.parametrize("preset", ["bf16-mixed", "cpu"])
def test_a_configured_precision_takes_the_place_of_the_presets(
    preset: str, trainer: dict[str, Any], precision: str, plugin: str
) -> None:
    made = _cli(["--presets", preset, "--config", _write("c.yaml", trainer=trainer)]).trainer
    assert (made.precision, type(made.precision_plugin).__name__) == (precision, plugin)


def test_a_configured_strategy_that_makes_its_own_precision_gets_the_name() -> None:
    parsed: dict[str, Any] = {}

    class Stop(SpeedkitCLI):
        def instantiate_classes(self) -> None:
            parsed.update(self.config.trainer.as_dict())
            raise InterruptedError

    for strategy in ("fsdp", {"class_path": "lightning.pytorch.strategies.FSDPStrategy"}):
        with pytest.raises(InterruptedError):
            Stop(
                BoringModel,
                run=False,
                args={"presets": ["bf16-mixed"], "trainer": {"strategy": strategy}},
                seed_everything_default=False,
            )
        assert (parsed["precision"], parsed["plugins"]) == ("bf16-mixed", None)


def test_the_precision_follows_the_configured_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, T4, cpu=CPU)
    args = {"presets": ["single-gpu"], "trainer": {"accelerator": "cpu"}}
    assert _cli(args).trainer.precision == "32-true"
    args["trainer"] = {"accelerator": {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}}
    assert _cli(args).trainer.precision == "32-true"


# Callbacks


def _callbacks(trainer: Trainer) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        (None, ["AccumulationScheduler"]),
        ([], ["AccumulationScheduler"]),
        ([{"class_path": "ModelSummary"}], ["AccumulationScheduler", "ModelSummary"]),
        ({"class_path": "ModelSummary"}, ["AccumulationScheduler", "ModelSummary"]),
        ([{"class_path": _ACCUMULATION, "init_args": {"schedule": 2}}], ["AccumulationScheduler"]),
        (
            [{"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 2}}}],
            ["GradientAccumulationScheduler"],
        ),
    ],
)
def test_the_callbacks_of_presets_are_added_and_configured_ones_win(callbacks: Any, expected: list[str]) -> None:
    trainer = _cli(
        ["--presets", "accumulate-4", "--config", _write("c.yaml", trainer={"callbacks": callbacks})]
    ).trainer
    assert _callbacks(trainer) == expected
    if isinstance(callbacks, list) and callbacks and callbacks[0]["class_path"] == _ACCUMULATION:
        assert AccumulationScheduler(2).schedule == trainer.callbacks[0].schedule  # type: ignore[attr-defined]


def test_a_configured_factor_takes_the_place_of_the_callback() -> None:
    for factor in (1, 8):
        trainer = _cli(["--presets", "accumulate-4", f"--trainer.accumulate_grad_batches={factor}"]).trainer
        assert _callbacks(trainer) == []
        assert trainer.accumulate_grad_batches == factor


@pytest.mark.parametrize("as_list", [True, False])
def test_a_callback_that_the_program_always_adds_is_not_doubled(as_list: bool) -> None:
    always = AccumulationScheduler(2)
    trainer = _cli(
        ["--presets", "accumulate-4"], trainer_defaults={"callbacks": [always] if as_list else always}
    ).trainer
    assert trainer.callbacks == [always]


class Outer:
    class Inner(AccumulationScheduler):
        pass


def test_a_callback_whose_class_stands_in_a_class_is_not_doubled() -> None:
    entry = {"class_path": f"{__name__}.Outer.Inner", "init_args": {"schedule": 2}}
    trainer = _cli({"presets": ["accumulate-4"], "trainer": {"callbacks": [entry]}}).trainer
    assert [type(callback) for callback in trainer.callbacks] == [Outer.Inner]


def test_the_accelerator_inside_a_configured_strategy_takes_the_place_of_the_presets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning refuses an accelerator beside a strategy that has one."""
    stand_on(monkeypatch, T4, cpu=CPU)
    inside = {"device": "cpu", "accelerator": {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}}
    strategy = {"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": inside}
    defaults = {name: value for name, value in _QUIET.items() if name != "accelerator"}
    cli = SpeedkitCLI(
        BoringModel,
        run=False,
        args={"presets": ["single-gpu"], "trainer": {"strategy": strategy}},
        trainer_defaults=defaults,
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert isinstance(cli.trainer.accelerator, CPUAccelerator)
    assert cli.trainer.precision == "32-true"  # what this CPU computes best, not the T4


def test_a_callback_under_a_key_of_its_own_is_not_doubled() -> None:
    class Program(SpeedkitCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(AccumulationScheduler, "accumulation")
            parser.set_defaults({"accumulation.schedule": 2})

    trainer = Program(
        BoringModel,
        run=False,
        args=["--presets", "accumulate-4"],
        trainer_defaults=_QUIET,
        save_config_callback=None,
        seed_everything_default=False,
    ).trainer
    assert _callbacks(trainer) == ["AccumulationScheduler"]
    assert trainer.callbacks[0].schedule == AccumulationScheduler(2).schedule  # type: ignore[attr-defined]


# Faults


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--presets", "bf16-mxed"], "Did you mean 'bf16-mixed'"),
        (["--presets", "fp32,bf16-mixed"], "'fp32' and 'bf16-mixed' set precision differently"),
        (["--presets", "cpu,single-gpu"], "set accelerator differently"),
        (["--presets", "fp16-mixed"], "'fp16-mixed' needs a GPU"),
        (["--presets", "{a: 1}"], "presets"),
    ],
)
@pytest.mark.parametrize("printing", [False, True])
def test_a_fault_of_the_presets_is_a_wrong_command_line(
    args: list[str], message: str, printing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        _cli([*args, *(["--print_config"] if printing else [])])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_another_fault_is_told_as_without_presets(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--print_config"]):
        with pytest.raises(SystemExit) as raised:
            _cli(["--presets", "fp32", "--trainer.no_such", "1", *more])
        assert raised.value.code == 2
        assert "--trainer.no_such" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--preset", "fp32"],
        ["--trainer.preset", "fp32"],
        ["--config", {"preset": ["fp32"]}],
        ["--config", {"trainer": {"presets": ["fp32"]}}],
    ],
)
def test_a_misspelt_or_misplaced_presets_is_told(args: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(args[1], dict):
        args = [args[0], _write("a.yaml", **args[1])]
    with pytest.raises(SystemExit) as raised:
        _cli(args)
    assert raised.value.code == 2
    assert "did you mean presets? It stands beside trainer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("how", ["program", "yaml"])
def test_to_repeat_what_a_preset_sets_lifts_no_need(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"presets": ["single-gpu"], "trainer": {"accelerator": "gpu"} if how == "yaml" else {}}
    with pytest.raises(SystemExit):
        _cli(args, trainer_defaults={"accelerator": "gpu"} if how == "program" else {})
    assert "'single-gpu' needs a GPU" in capsys.readouterr().err


def test_a_trainer_without_the_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Small(Trainer):
        def __init__(self, accelerator: str = "cpu", callbacks: Any = None) -> None:
            super().__init__(accelerator=accelerator, callbacks=callbacks)

    with pytest.raises(SystemExit):
        SpeedkitCLI(BoringModel, trainer_class=Small, run=False, args=["--presets", "fp32"])
    assert "set precision, which this command's Trainer does not take" in capsys.readouterr().err


_WITHOUT = """
import sys
import lightning_utilities.core.imports as imports
check = imports.RequirementCache.__bool__
imports.RequirementCache.__bool__ = lambda self: "jsonargparse" not in str(self.requirement) and check(self)
for library in ("jsonargparse", "jinja2"):
    sys.modules[library] = None
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_speedkit.cli import SpeedkitCLI
from lightning_speedkit.cli.main import main
from lightning_speedkit.errors import MissingExtraError
try:
    SpeedkitCLI(BoringModel, run=False, args=[])
except MissingExtraError as error:
    print(error)
sys.exit(main(["presets", "fp32"]))
"""


def test_without_the_extras_the_error_says_what_to_install_and_the_speedkit_command_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    told, *explained = done.stdout.splitlines()
    assert "needs jsonargparse[signatures]" in told
    assert "pip install 'lightning-speedkit[cli]'" in told
    assert "trainer = Trainer(**trainer_kwargs('fp32'))" in explained


# What is printed and saved


class _NeedsWidth(BoringModel):
    def __init__(self, width: int, table: dict[str, int] | None = None) -> None:
        super().__init__()


def _printed(capsys: pytest.CaptureFixture[str], make: Callable[[], Any]) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        make()
    assert not raised.value.code
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("flags", ["", "=skip_default"])
@pytest.mark.parametrize("run", [False, True])
def test_print_config_shows_what_the_presets_set(run: bool, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write("c.yaml", presets=["own"], trainer={"max_epochs": 3, "callbacks": [{"class_path": "ModelSummary"}]})
    words = [*(["fit"] if run else []), "--config", path, "--presets+=accumulate-4", f"--print_config{flags}"]
    printed = _printed(capsys, lambda: SpeedkitCLI(_NeedsWidth, run=run, args=words))
    assert printed["presets"] == ["own", "accumulate-4"]
    shown = printed["trainer"]
    assert (shown["max_epochs"], shown["benchmark"], shown["precision"]) == (3, True, "64-true")
    assert [entry["class_path"].rpartition(".")[2] for entry in shown["callbacks"]] == [
        "AccumulationScheduler",
        "EarlyStopping",
        "ModelSummary",
    ]


def test_print_config_is_a_config_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--presets", "bf16-mixed,accumulate-4", "--trainer.max_epochs", "2"]
    printed = _printed(capsys, lambda: _cli([*words, "--print_config"]))
    again = _cli(["--config", _write("printed.yaml", **printed)])
    assert _described(again.trainer) == _described(_cli(words).trainer)


def test_print_config_without_presets_is_lightning_clis(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--trainer.max_epochs", "2", "--print_config"]
    printed = _printed(capsys, lambda: SpeedkitCLI(_NeedsWidth, args=words))
    assert printed.pop("presets") == []
    assert printed["model"] == {"width": None, "table": None}
    assert printed["trainer"]["max_epochs"] == 2


_PROGRAM = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_speedkit.cli import SpeedkitCLI
from tests.cli.test_lightning_cli import _described

class Program(SpeedkitCLI):
    def after_fit(self):
        print(json.dumps(_described(self.trainer)))

if __name__ == "__main__":
    Program(BoringModel)
"""


def test_the_saved_config_runs_again_as_the_same_trainer_in_a_fresh_process() -> None:
    trainer = {
        **_QUIET,
        "default_root_dir": "runs",
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
        "max_epochs": 2,
        "limit_train_batches": 4,
        "limit_val_batches": 0,
        "callbacks": [{"class_path": "ModelSummary", "init_args": {"max_depth": 2}}],
    }
    args = {"fit": {"presets": ["bf16-mixed", "accumulate-4"], "trainer": trainer}, "subcommand": "fit"}
    first = SpeedkitCLI(BoringModel, args=args, seed_everything_default=1)
    (saved,) = Path("runs").rglob("config.yaml")
    Path("train.py").write_text(_PROGRAM)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "train.py", "fit", "--config", str(saved)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout.splitlines()[-1])
    assert again == json.loads(json.dumps(_described(first.trainer)))
    assert [name for name, _ in again["callbacks"]] == [
        *("AccumulationScheduler", "ModelSummary", "SaveConfigCallback")
    ]
    second = yaml.safe_load(sorted(Path("runs").rglob("config.yaml"))[1].read_text())
    assert second == yaml.safe_load(saved.read_text())


def test_a_second_selection_on_a_saved_config_changes_what_was_not_given() -> None:
    cli = _cli(["--presets", "accumulate-4"])
    saved = yaml.safe_load(cli.parser.dump(cli.config))
    again = _cli(["--config", _write("saved.yaml", **saved), "--presets+=checkpoint-activations"])
    assert _callbacks(again.trainer) == ["ActivationCheckpointing", "AccumulationScheduler"]


def test_the_parsers_defaults_are_as_before() -> None:
    cli = _cli(["--presets", "fp32"])
    assert cli.parser.get_default("trainer.precision") is None
    assert isinstance(cli.trainer, Trainer)
    assert not any(isinstance(callback, ModelSummary) for callback in cli.trainer.callbacks)
