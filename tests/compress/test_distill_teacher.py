"""How a teacher is made, asked and given back."""

from __future__ import annotations

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
        return pytest.fail, ("a file was executed",)


def test_what_cannot_be_a_teacher_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names nothing .*package.module:Name"):
        made_teacher("torch.nn:Lineer")
    with pytest.raises(TypeError, match="gave a int"):
        made_teacher(lambda: 3)  # type: ignore[arg-type, return-value]
    file = tmp_path / "weights.pt"
    torch.save(nn.Linear(2, 2).state_dict(), file)
    with pytest.raises(ValueError, match=r"it lacks \['1.bias', '1.weight', '3.bias'\], and has \['bias', 'weight'\]"):
        made_teacher(mlp, str(file))
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="holds no weights by name"):
        made_teacher(mlp, str(file))
    torch.save(_Bad(), file)
    with pytest.raises(ValueError, match=r"no file of weights alone .UnpicklingError.* would execute code"):
        made_teacher(mlp, str(file))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no file of weights alone .EOFError.*, is damaged"):
        made_teacher(mlp, str(file))


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
