"""Cut layers on two and four gloo processes, against a plain PyTorch loop."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_speedkit.parallel.plan import ModelParallelPlan
from lightning_speedkit.parallel.plan_tensor import check_styles, cut_size, numbers_of, resolve_plan
from tests.parallel.plan_models import (
    EPOCHS,
    Attention,
    Net,
    Words,
    close,
    loader,
    plain,
    plain_words,
    trainer_of,
    weights_of,
    words,
    words_loader,
    words_loss,
)
from tests.two_ranks import on_ranks

NAMED = {"block.up": "column", "block.down": "row", "outlet": "gathered", "embed": "embedding"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "found": (2, {"tensor_parallel": 2}),
    "named": (2, {"tensor_parallel": 2, "tensor_plan": NAMED}),
    "recompute": (2, {"tensor_parallel": 2, "shard_class": ["Block", "Attention"], "checkpoint_activations": True}),
    "both": (4, {"tensor_parallel": 2, "shard_class": ["Block", "Attention"]}),
    "hsdp": (4, {"replicas": 2, "shard_class": ["Block", "Attention"]}),
}


def _runs(world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (ranks, arguments) in LAYOUTS.items():
        if ranks != world:
            continue
        for factor, epochs in EPOCHS.items():
            model, strategy = Words(), ModelParallelPlan(**arguments)
            run = trainer_of(strategy, devices=world, max_epochs=epochs, accumulate_grad_batches=factor)
            tensor = arguments.get("tensor_parallel", 1)
            data = words_loader(run.global_rank // tensor, world // tensor)
            run.fit(model, data)
            found[f"{name} {factor}"] = weights_of(model), model.attend.heads, strategy.distributed_sampler_kwargs
        model, run = Words(), trainer_of(ModelParallelPlan(**arguments), devices=world, gradient_clip_val=0.2)
        run.fit(model, data, data)
        found[f"{name} clip"] = weights_of(model)
        found[f"{name} checked"] = float(run.callback_metrics["checked"])
        found[f"{name} net"] = _net(world, arguments) if name in ("found", "both", "hsdp") else None
    return found


def _net(world: int, arguments: dict[str, Any]) -> list[Tensor]:
    model, tensor = Net(), arguments.get("tensor_parallel", 1)
    run = trainer_of(ModelParallelPlan(tensor_parallel=tensor, replicas=arguments.get("replicas", 1)), devices=world)
    run.fit(model, loader(run.global_rank // tensor, world // tensor))
    return weights_of(model)


@pytest.fixture(scope="module")
def runs() -> Any:
    return {world: on_ranks(world, _runs, world, timeout=60.0) for world in (2, 4)}


@pytest.mark.parametrize("factor", EPOCHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_cut_layers_train_as_whole_ones(runs: Any, name: str, factor: int) -> None:
    world, arguments = LAYOUTS[name]
    tensor = arguments.get("tensor_parallel", 1)
    expected = plain_words(factor=factor)
    for rank, found in enumerate(runs[world]):
        weights, heads, sampler = found[f"{name} {factor}"]
        if world == 4:  # a mean of means is rounded otherwise than one mean: all weights together
            weights, wanted = ([nn.utils.parameters_to_vector(w)] for w in (weights, expected))
            close(weights, wanted)
        else:
            close(weights, expected)
        assert heads == 4
        assert sampler == {"num_replicas": world // tensor, "rank": rank // tensor}


@pytest.mark.parametrize("name", ["found", "both", "hsdp"])
def test_a_regression_trains_the_same(runs: Any, name: str) -> None:
    for found in runs[LAYOUTS[name][0]]:
        close(found[f"{name} net"], plain())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_to_clip_by_is_over_all_parts(runs: Any, name: str) -> None:
    for found in runs[LAYOUTS[name][0]]:
        close(found[f"{name} clip"], plain_words(clip=0.2), 2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logged_values_count_once(runs: Any, name: str) -> None:
    model, (x, y) = Words(), words()
    plain_words(model, clip=0.2)
    for found in runs[LAYOUTS[name][0]]:
        assert found[f"{name} checked"] == pytest.approx(float(words_loss(model(x), y).detach()), rel=1e-4)


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "unknown": ({"attend.quary": "column"}, "'attend.quary', and there is no .* Did you mean 'attend.query'"),
    "kind": ({"norm": "column"}, "names 'norm', and there is no nn.Linear or nn.Embedding of that name"),
    "style": ({"embed": "row"}, "'row' for 'embed', which is a Embedding: nn.Linear takes"),
    "size": ({"outlet": "column"}, "cuts 'outlet' .'column'. of size 12, which 5 ranks do not divide"),
    "two": ({"attend.*": "column", "attend.out": "row"}, "two styles for 'attend.out': 'column' and, by"),
    "number": ({"attend.head": "divide"}, "no whole number of that name. Did you mean 'attend.heads'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_the_model(name: str) -> None:
    plan, message = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=message):
        resolve_plan(Words(), plan, 5 if name == "size" else 2)


def test_tied_weights_are_not_cut() -> None:
    net = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4, bias=False))
    net[1].weight = net[0].weight
    with pytest.raises(MisconfigurationException, match=r"'0.weight', which is tied to \['1.weight'\]"):
        resolve_plan(net, {"0": "embedding"}, 2)


def test_a_number_that_the_ranks_do_not_divide() -> None:
    with pytest.raises(MisconfigurationException, match=r"cuts 'heads' .'divide'. of size 4, which 3 ranks"):
        resolve_plan(Attention(), {"heads": "divide"}, 3)


def test_styles_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor_plan\['x'\]='colum' is unknown. Did you mean 'column'"):
        check_styles({"x": "colum"})


def test_sizes_and_numbers() -> None:
    assert cut_size(nn.LayerNorm(4), "column") == 0
    assert cut_size(nn.Embedding(3, 4), "embedding") == 4
    assert numbers_of(Attention()) == {"heads": 4}
