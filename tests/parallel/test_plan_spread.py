"""What a plan does to a module and says of it, and the runs that it refuses, on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_speedkit import ActivationCheckpointing, AverageWeights, Pruning
from lightning_speedkit.parallel import plan as plan_module
from lightning_speedkit.parallel.plan import ModelParallelPlan
from lightning_speedkit.parallel.plan_spread import Spread
from tests.parallel.plan_models import Block, Net, Words, close, loader, plain, trainer_of, weights_of, words_loader
from tests.two_ranks import on_two_ranks


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Search(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Joined(Words):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=True)


class Apart(Net):
    """Takes the weights of a block without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.sum() * self.blocks[0].up.weight.sum())  # type: ignore[union-attr, operator]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.BatchNorm1d(6))])


class Empty(Net):
    def __init__(self) -> None:
        super().__init__()
        for name in ("inlet", "blocks", "scale", "outlet", "head"):
            delattr(self, name)


class Own(Net):
    """Shards itself, as Lightning's strategy asks for."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            for part in (self.blocks[0], self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class Late(Net):
    """Has its layers in configure_model only."""

    def __init__(self) -> None:
        super().__init__()
        del self.outlet

    def configure_model(self) -> None:
        if not hasattr(self, "outlet"):
            torch.manual_seed(8)
            self.outlet = nn.Linear(6, 5)


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "class": (Net, {"shard_class": ["Blocks"]}, {}, "Did you mean 'Block'"),
    "scalar": (Scalar, {}, {}, r"\['factor'\] have no dimension"),
    "empty": (Empty, {}, {}, "Empty has no parameters"),
    "manual": (Manual, {}, {}, "manual optimization"),
    "search": (Search, {}, {}, "LBFGS"),
    "joined": (Joined, {"tensor_parallel": 2}, {}, r"SGD\(foreach=True or fused=True\)"),
    "apart": (Apart, {"shard_class": ["Block"]}, {}, "outside of the forward of its own module"),
    "recompute": (Net, {"checkpoint_activations": True}, {}, "checkpoint_activations=True finds no block"),
    "norm": (Normed, {"checkpoint_activations": True, "shard_class": ["Sequential"]}, {}, "finds no block"),
    "world": (Net, {"data_parallel": 3}, {}, "make 3 processes, and there are 2"),
    "copies": (Net, {"replicas": 3}, {}, "replicas=3 does not divide the 2"),
    "nothing to shard": (Net, {"tensor_parallel": 2, "cpu_offload": True}, {}, "nothing is sharded"),
    "precision": (Net, {"gather_precision": "bf16"}, {}, r"Set Trainer\(precision='bf16-mixed'\)"),
    "own": (
        Own,
        {"shard_class": ["Block"], "cpu_offload": True},
        {},
        "so shard_class, cpu_offload would have no effect",
    ),
    "average": (Net, {}, {"callbacks": [AverageWeights]}, "AverageWeights does not work with ModelParallelPlan"),
    "pruning": (Net, {}, {"callbacks": [lambda: Pruning(0.5)]}, "Pruning does not work with ModelParallelPlan"),
    "activations": (Net, {}, {"callbacks": [ActivationCheckpointing]}, "use checkpoint_activations=True"),
    "swa": (Net, {}, {"callbacks": [lambda: StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging copies"),
}


def _refusals() -> dict[str, str]:
    found = {}
    for name, (kind, arguments, options, _) in REFUSED.items():
        made = {key: [make() for make in value] for key, value in options.items()}
        try:
            run = trainer_of(ModelParallelPlan(**arguments), max_epochs=1, **made)
            run.fit(kind(), words_loader() if kind is Joined else loader(run.global_rank, 2))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def refusals() -> Any:
    return on_two_ranks(_refusals, timeout=60.0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused_on_all_ranks(refusals: Any, name: str) -> None:
    for rank in refusals:
        assert rank[name].startswith("MisconfigurationException")
        assert re.search(REFUSED[name][3], rank[name]), rank[name]


class Fails(Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        raise OSError("disk")


def _runs() -> dict[str, Any]:
    told: list[str] = []
    vars(plan_module)["rank_zero_info"] = told.append
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "own": (Own, {}, {}),
        "late": (Late, {"shard_class": ["Block"]}, {}),
        "bf16": (Net, {"shard_class": ["Block"], "gather_precision": "bf16"}, {"precision": "bf16-mixed"}),
        "autocast": (Net, {"shard_class": ["Block"]}, {"precision": "bf16-mixed"}),
    }
    for name, (kind, arguments, options) in cases.items():
        model, run = kind(), trainer_of(ModelParallelPlan(**arguments), **options)
        run.fit(model, loader(run.global_rank, 2), loader(run.global_rank, 2))
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        found[name] = [value.detach() for value in values], [n for n, _ in model.named_parameters()]
    model = Net()
    try:
        trainer_of(ModelParallelPlan(shard_class=["Block"]), callbacks=[Fails()]).fit(model, loader())
    except OSError:
        found["failed"] = weights_of(model)
    told.clear()
    trainer_of(ModelParallelPlan(tensor_parallel=2), max_epochs=1).fit(Words(), words_loader())
    trainer_of(ModelParallelPlan(shard_class=["Block"], checkpoint_activations=True), max_epochs=1).fit(Net(), loader())
    found["told"] = told
    return found


@pytest.fixture(scope="module")
def runs() -> Any:
    return on_two_ranks(_runs, timeout=60.0)


def test_a_module_that_shards_itself_is_taken_as_it_is(runs: Any) -> None:
    for rank in runs:
        close(rank["own"][0], plain())


def test_layers_made_in_configure_model_are_sharded(runs: Any) -> None:
    model = Late()
    model.configure_model()
    plain(model)
    expected = dict(model.named_parameters())
    for rank in runs:
        values, names = rank["late"]
        close(values, [expected[name].detach() for name in names])


@pytest.mark.parametrize("name", ["bf16", "autocast"])
def test_mixed_precision_trains_close_to_float32(runs: Any, name: str) -> None:
    for rank in runs:
        assert all(value.dtype == torch.float32 for value in rank[name][0])
        found, expected = (nn.utils.parameters_to_vector(w) for w in (rank[name][0], plain()))
        close([found], [expected], 0.02)
        assert not torch.equal(found, expected)


def test_after_a_failure_what_the_other_ranks_hold_is_unknown(runs: Any) -> None:
    for rank in runs:
        assert [tuple(w.shape) for w in rank["failed"]] == [tuple(p.shape) for p in Net().parameters()]
        assert all(bool(w.isnan().all()) for w in rank["failed"])


def test_it_says_what_it_did(runs: Any) -> None:
    cut, sharded = runs[0]["told"]
    assert "cut across 2 ranks: embed (embedding), attend.query (column), attend.key (column)" in cut
    assert "attend.heads (divide)" in cut
    assert "sharded over 2 ranks: units blocks.0, blocks.1, and the rest as one" in sharded
    assert "activations computed again: blocks.0, blocks.1" in sharded


def test_arguments_without_effect_are_named() -> None:
    Spread(None, 1, None, None, offload=False, recompute=False).check_left_alone()
    with pytest.raises(Exception, match="so checkpoint_activations would have no effect"):
        Spread(None, 1, None, None, offload=False, recompute=True).check_left_alone()
