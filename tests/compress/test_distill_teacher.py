"""How a teacher is made, asked and given back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_speedkit.compress.distill_teacher import Teacher, made_teacher
from tests.compress.models import mlp

CPU = torch.device("cpu")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


class _Sized(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)


def test_it_is_made_from_what_names_or_makes_it_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    module = nn.Linear(2, 2)
    torch.set_rng_state(state)
    assert made_teacher(module) is module
    assert isinstance(made_teacher("tests.compress.models:mlp"), nn.Sequential)
    assert isinstance(made_teacher(nn.Identity), nn.Identity)
    torch.testing.assert_close(torch.get_rng_state(), state, **EXACT)


def test_weights_are_found_under_a_prefix_and_hyperparameters_are_taken(tmp_path: Path) -> None:
    net = mlp()
    file = tmp_path / "prefixed.ckpt"
    torch.save({"state_dict": {f"model.net.{k}": v for k, v in net.state_dict().items()} | {"scale": 1}}, file)
    torch.testing.assert_close(made_teacher(mlp, str(file)).state_dict(), net.state_dict(), **EXACT)
    sized = _Sized(5)
    file = tmp_path / "sized.ckpt"
    content = {"state_dict": sized.state_dict(), "hyper_parameters": {"width": 5}}
    torch.save({**content, "pytorch-lightning_version": "2.6.0"}, file)
    made: Any = made_teacher(_Sized, str(file))
    torch.testing.assert_close(made.net.weight, sized.net.weight, **EXACT)


class _Bad:
    def __reduce__(self) -> Any:
        return _executed, ()


def _executed() -> None:
    raise AssertionError("a file was executed")


def _save(file: Path, content: Any) -> str:
    torch.save(content, file)
    return str(file)


def test_a_class_of_lightningmodule_takes_a_plain_state_dict_too(tmp_path: Path) -> None:
    net = mlp()
    plain = _save(tmp_path / "plain.pt", {f"net.{key}": value for key, value in net.state_dict().items()})
    made: Any = made_teacher(_Plain, plain)
    torch.testing.assert_close(made.net.state_dict(), net.state_dict(), **EXACT)
    held = _save(tmp_path / "held.pt", {"state_dict": {f"net.{k}": v for k, v in net.state_dict().items()}})
    made = made_teacher("tests.compress.test_distill_teacher:_Plain", held)
    torch.testing.assert_close(made.net.state_dict(), net.state_dict(), **EXACT)


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


def test_what_cannot_be_a_teacher_says_why() -> None:
    with pytest.raises(ValueError, match=r"names nothing .*package.module:Name"):
        made_teacher("torch.nn:Lineer")
    with pytest.raises(TypeError, match="gave a int"):
        made_teacher(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"teacher='torch.nn:Linear' cannot be made without arguments .*in_features"):
        made_teacher("torch.nn:Linear")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    file = _save(tmp_path / "weights.pt", state)
    told = r"not those of the teacher, a Sequential: it lacks \['1.bias', '1.weight', '3.bias'\], and has \['bias', 'w"
    with pytest.raises(ValueError, match=told):
        made_teacher(mlp, file)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 2\) in the teacher and \(2, 2\) in the file"):
        made_teacher(lambda: nn.Linear(2, 3), file)
    with pytest.raises(ValueError, match="a _Plain: it lacks"):
        made_teacher(_Plain, file)
    with pytest.raises(ValueError, match=r"_Sized.* cannot be made without arguments .*'width'"):
        made_teacher(_Sized, file)  # type: ignore[arg-type]
    of_trainer = {"state_dict": state, "pytorch-lightning_version": "2.6.0"}
    file = _save(tmp_path / "of_trainer.ckpt", of_trainer)
    with pytest.raises(ValueError, match=r"a _Plain: .*Missing key.*1.weight.*Give a teacher of the structure"):
        made_teacher(_Plain, file)
    with pytest.raises(ValueError, match=r"_Sized cannot be made with the hyperparameters in .*'width'"):
        made_teacher(_Sized, file)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [mlp, _Plain])
def test_a_file_without_weights_is_refused_without_advice_to_execute_it(source: Any, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    contents: list[tuple[Any, str]] = [
        ([1, 2], "holds no weights by name"),
        ({"state_dict": 3}, "holds no weights by name"),
        (_Bad(), r"holds more than weights \(tests.compress.test_distill_teacher._executed\), and would execute code"),
    ]
    for content, told in contents:
        with pytest.raises(ValueError, match=rf"{told}.* Give the checkpoint of a Trainer"):
            made_teacher(source, _save(file, content))
    for raw in (b"", b"hello, this is a text", b"PK\x03\x04 cut"):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=r"is no checkpoint, or is damaged\. Give the checkpoint") as caught:
            made_teacher(source, str(file))
        assert "weights_only=False" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        made_teacher(source, str(tmp_path / "none.pt"))


def test_a_class_without_weights_of_its_own_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"a new _Plain whose weights were drawn at random.*checkpoint=\.\.\."):
        made_teacher("tests.compress.test_distill_teacher:_Plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made_teacher(mlp)  # a function may load weights
        made_teacher(_Plain())
        made_teacher(nn.ReLU)
        made_teacher(_Plain, _save(tmp_path / "w.pt", _Plain().state_dict()))


def test_it_answers_in_eval_mode_without_gradients_in_its_own_dtype() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    teacher = Teacher(net, CPU, features=["0"])
    x = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
    answer, kept = teacher([x], {})
    first = x.float() @ net[0].weight.T + net[0].bias  # type: ignore[operator]
    second = first @ net[2].weight.T + net[2].bias  # type: ignore[operator]
    torch.testing.assert_close(answer, second.detach())
    torch.testing.assert_close(kept["0"], first.detach())
    assert not answer.requires_grad
    assert teacher([torch.zeros(1, 2)], {})[1]["0"].shape == (1, 3)  # of this call alone


def test_integers_stay_integers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2)

        def forward(self, *, words: Tensor) -> Tensor:
            return self.table(words)

    net = Words().double()
    answer, _ = Teacher(net, CPU)([], {"words": torch.tensor([3])})
    torch.testing.assert_close(answer, net.table.weight[3:4].detach(), **EXACT)


def test_it_is_given_back_with_the_modes_of_its_parts() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    net[1].eval()  # frozen statistics
    teacher = Teacher(net, CPU, features=["0"])
    assert [module.training for module in net.modules()] == [False] * 4
    teacher.give_back()
    assert [module.training for module in net.modules()] == [True, True, False, True]
    assert not net[0]._forward_hooks
