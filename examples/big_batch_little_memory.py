"""The step of a batch of 4,096 characters, on a device whose memory holds less than a quarter of it.

    python examples/big_batch_little_memory.py            # a source file of Python's standard library
    python examples/big_batch_little_memory.py --fast     # the first lines of it

Lines differ in length, so batches do too, and the loss of each is a mean over its characters. A window collects batches
until it has enough of them. A batch that does not fit is computed in pieces. Neither changes the step.
"""

import argparse
import inspect

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_speedkit import AccumulationScheduler, AutoMicroBatch

IGNORED = -100  # the label of padding, which the loss leaves out


def padded(lines: list[str]) -> dict[str, torch.Tensor]:
    codes = [torch.tensor(list(line.encode()), dtype=torch.long) for line in lines]
    return {
        "characters": pad_sequence([line[:-1] for line in codes], batch_first=True),
        "labels": pad_sequence([line[1:] for line in codes], batch_first=True, padding_value=IGNORED),
    }


class NextCharacter(LightningModule):
    """``memory`` is made up: how many characters, padding included, fit on the device."""

    def __init__(self, memory: float) -> None:
        super().__init__()
        self.memory, self.most = memory, 0
        self.embedding, self.reader = nn.Embedding(256, 32), nn.GRU(32, 96, batch_first=True)
        self.scores = nn.Linear(96, 256)

    def training_step(self, batch, batch_idx):
        size = batch["characters"].numel()
        if size > self.memory:
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {size} characters.")
        self.most = max(self.most, size)
        scores = self.scores(self.reader(self.embedding(batch["characters"]))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer lines")
    lines = [line for line in inspect.getsource(argparse).splitlines(keepends=True) if len(line) > 1]
    lines = lines[:300] if parser.parse_args().fast else lines
    trained = []
    for memory in (float("inf"), 1000):
        seed_everything(0, verbose=False)
        pieces = AutoMicroBatch(count="labels")
        callbacks = [AccumulationScheduler(target_batch=4096, count="labels"), pieces]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = Trainer(max_epochs=1, callbacks=callbacks, enable_progress_bar=False, accelerator="cpu", **quiet)
        model = NextCharacter(memory)
        trainer.fit(model, DataLoader(lines, batch_size=32, collate_fn=padded, shuffle=True))
        trained.append(nn.utils.parameters_to_vector(model.parameters()))
        print(
            f"Room for {memory:g} characters: {trainer.num_training_batches} batches, {trainer.global_step} steps, at "
            f"most {model.most} characters at once; lines at once: {pieces.micro_batch_size or 'as they come'}"
        )
    print(f"The weights differ by at most {(trained[0] - trained[1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
