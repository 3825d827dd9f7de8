"""Muon for the hidden weight matrices of a module and AdamW for all else, as one optimizer.

What it does: Muon makes each update of a matrix orthogonal, so that no direction of it dominates. Lightning's automatic
optimization takes one optimizer, a scheduler knows one, and so does a gradient scaler; ``torch.optim.Muon`` takes
matrices only. Here both are one.

When it helps: transformers and other nets whose work is done in matrices of hidden layers. What it costs: five products
of matrices per weight and step, in bfloat16: little on a GPU, a lot on a CPU without bfloat16 units
(``python -m benchmarks.optimizer_step`` measures it). One momentum is kept instead of AdamW's two.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon/, who say to leave embeddings and the last layer out.
The learning rate is adjusted so that one rate serves both halves (Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from typing_extensions import override

__all__ = ["MuonWithAdamW", "hidden_matrices"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def hidden_matrices(module: nn.Module) -> list[str]:
    """The names of the parameters that Muon is for: those of two dimensions, without embeddings and the last one.

    The last one that is trained, in order of registration, is taken for the output layer. A weight that an embedding
    shares is an embedding, and the output layer if another layer has it too.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> hidden_matrices(net)
    ['1.weight', '2.weight']
    """
    embeddings = {id(p) for m in module.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    matrices = [
        (name, p) for name, p in module.named_parameters() if p.ndim == 2 and "bias" not in name.rpartition(".")[2]
    ]
    tied = bool(matrices) and _shares_its_head(module, embeddings)
    found = [name for name, p in matrices if id(p) not in embeddings and p.requires_grad]
    return found if tied else found[:-1]


def _shares_its_head(module: nn.Module, embeddings: set[int]) -> bool:
    """Whether a layer that is no embedding has the weight of one: the output layer then has no matrix of its own."""
    others = (m for m in module.modules() if not isinstance(m, _EMBEDDINGS))
    return any(id(p) in embeddings for m in others for p in m.parameters(recurse=False))


class MuonWithAdamW(Optimizer):
    """``torch.optim.Muon`` on the groups with ``"muon": True`` and ``torch.optim.AdamW`` on the others.

    Each step is bit for bit the step of the two separate optimizers. Groups, their rates and the state are shared with
    them, so a scheduler, a gradient scaler and a checkpoint see one optimizer.

    Args:
        params: Groups with a key ``"muon"``; where it is true, all parameters have two dimensions.
        lr: The learning rate of both.
        weight_decay: The decoupled weight decay of both.
        momentum: Of Muon.
        nesterov: Whether Muon's momentum is Nesterov's.
        ns_steps: The Newton-Schulz iterations of Muon.
        adjust_lr_fn: How Muon's rate follows the shape: ``"match_rms_adamw"`` takes rates that are right for AdamW,
            ``"original"`` larger ones, about 0.02.
        betas: Of AdamW.
        eps: Of AdamW.
        fused: Of AdamW.

    Raises:
        ValueError: A group has no ``"muon"``, or one of torch's optimizers refuses a value.

    >>> weight, bias = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
    >>> optimizer = MuonWithAdamW([{"params": [weight], "muon": True}, {"params": [bias], "muon": False}], lr=0.1)
    >>> (weight.sum() + bias.sum()).backward()
    >>> optimizer.step()
    >>> bias.data
    tensor([-0.1000, -0.1000])
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps!r} must be a whole number of iterations from 1 to 99, and often 5.")
        self._of_muon: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._of_adamw: dict[str, Any] = {"betas": betas, "eps": eps, "fused": fused}
        self._parts: list[Optimizer] = []
        super().__init__([dict(group) for group in params], {"lr": lr, "weight_decay": weight_decay})
        self._link()  # now, so that a value that is refused is refused here

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "muon" not in param_group:
            raise ValueError('A group of MuonWithAdamW needs the key "muon": True for Muon, False for AdamW.')
        super().add_param_group({**(self._of_muon if param_group["muon"] else self._of_adamw), **param_group})
        self._parts = []

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_of_muon": self._of_muon, "_of_adamw": self._of_adamw}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also called by load_state_dict, with new groups and a new state
        self._parts = []

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts or self._link():
            part.step()
        return loss

    def _link(self) -> list[Optimizer]:
        """Make the two parts over the groups and the state of this optimizer; the dicts themselves are shared."""
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self._parts = []
        if matrices:
            self._parts.append(Muon(matrices, **self._of_muon))  # which checks these; the groups have their own
        if others:
            self._parts.append(AdamW(others, **self._of_adamw))
        for part in self._parts:
            part.state = self.state
        return self._parts
