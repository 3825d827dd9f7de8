"""Which strategy would train this language model on machines that are not here, by arithmetic and with the reasons.

    python examples/plan_for_a_cluster.py            # 1.3 thousand million parameters, on two nodes of eight H100
    python examples/plan_for_a_cluster.py --fast     # a model with fewer layers
    python examples/plan_for_a_cluster.py --hardware my_cluster.json

The model is on the meta device: nothing is computed, and no memory is taken.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_speedkit import suggest_strategy
from lightning_speedkit.errors import HardwareNeedError
from lightning_speedkit.facts import read_cluster

WIDTH, HEADS, WORDS, LENGTH = 2048, 16, 50_304, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norms[0](x)
        parts = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Decoder(LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(depth)), nn.Linear(WIDTH, WORDS))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="a model with few layers")
    parser.add_argument("--hardware", default=Path(__file__).with_name("two_nodes_of_h100.json"), help="a JSON file")
    arguments = parser.parse_args()
    with torch.device("meta"):
        model, batch = Decoder(2 if arguments.fast else 24), torch.zeros(8, LENGTH + 1, dtype=torch.long)
    cluster = read_cluster(arguments.hardware)
    choice = suggest_strategy(model, batch, cluster, precision="bf16-mixed")
    print(choice)
    print("\nTrainer arguments:", choice.trainer_arguments)

    small = replace(cluster, nodes=1, devices_per_node=2, device_memory_bytes=8 * 10**9, name="two small GPUs")
    try:
        print(f"\nOn two GPUs of 8 GB: {suggest_strategy(model, batch, small, precision='bf16-mixed').best.name}")
    except HardwareNeedError as error:
        print(f"\nOn two GPUs of 8 GB: {error}")


if __name__ == "__main__":
    main()
