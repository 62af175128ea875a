"""Train a small network on 8x8 digits with Lightning, on two ranks: python FILE."""

import sys
from typing import cast

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horovod_compress.ddp as hvc


class Compress(lightning.Callback):  # type: ignore[misc]  # of a package that may be missing
    """Compresses the gradients of any module."""

    def __init__(self, method: hvc.MethodName = "marsit") -> None:
        self.method = method

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # Not earlier: Lightning creates the process group and wraps the module when training begins.
        self.compression = hvc.Compression.create(self.method, module.named_parameters())
        self.compression.register(trainer.strategy.model, trainer.optimizers)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.compression.close()


class Digits(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(callbacks: list[lightning.Callback], epochs: int = 4) -> Digits:
    lightning.seed_everything(0)
    torch.set_num_threads(1)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Digits()
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True, drop_last=True))
    with torch.no_grad():
        hits = module.net(data.tensors[0]).argmax(dim=1) == data.tensors[1]
    print(f"rank {trainer.global_rank}: accuracy {hits.float().mean():.3f}", flush=True)
    return module


if __name__ == "__main__":
    train([Compress(*cast(list[hvc.MethodName], sys.argv[1:]))])
