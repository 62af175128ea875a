"""Three networks for the digits of scikit-learn: a ViT, a ResNet with batch normalisation, and a diffusion model."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.base import Recipe, Result, classified
from tasks import stratified_split

SIDE = 16  # of the images that are classified: digits have 8


class Digits:
    """The 1,797 handwritten digits, a fifth of them held out."""

    def __init__(self, quick: bool = False) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images.astype(np.float32) / 8.0 - 1.0).unsqueeze(1)
        labels = torch.from_numpy(digits.target.astype(np.int64))
        train, test = (torch.from_numpy(part) for part in stratified_split(digits.target, test_share=0.2))
        test = test[:: 8 if quick else 1]
        self.train, self.test = (images[train], labels[train]), (images[test], labels[test])

    def drawn(self, size: int) -> tuple[Tensor, Tensor]:
        images, labels = self.train
        chosen = torch.randint(len(labels), (size,))
        return images[chosen], labels[chosen]


class Classified(Digits):
    """Digits at 16x16, moved by up to two pixels each way; the labels may be smoothed."""

    smoothing = 0.0

    def __init__(self, quick: bool = False) -> None:
        super().__init__(quick)
        self.train, self.test = ((upsampled(images), labels) for images, labels in (self.train, self.test))

    def loss(self, model: nn.Module, size: int) -> Tensor:
        images, labels = self.drawn(size)
        return F.cross_entropy(model(shifted(images, 2)), labels, label_smoothing=self.smoothing)

    def held_out(self, model: nn.Module) -> Result:
        return classified(model, iter([self.test]))


def upsampled(images: Tensor) -> Tensor:
    return F.interpolate(images, size=SIDE, mode="bilinear", align_corners=False)


def shifted(images: Tensor, most: int) -> Tensor:
    """Return each image moved by its own whole number of pixels, with background where nothing was."""
    side = images.shape[-1]
    wide = F.pad(images, (most, most, most, most), value=-1.0)
    down, right = torch.randint(2 * most + 1, (2, len(images), 1))
    rows, columns = down + torch.arange(side), right + torch.arange(side)
    return wide[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


# ---- ViT --------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """One layer of a transformer that sees everything, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4))
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class ViT(nn.Module):
    """A vision transformer: patches of 4x4, a class token, learnt positions."""

    def __init__(self, width: int = 48, layers: int = 3, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // 4) ** 2 + 1, width))
        self.layers = nn.Sequential(*(Encoder(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.layers(self.dropout(x)))[:, 0])


class ViTDigits(Classified):
    smoothing = 0.1

    def model(self) -> nn.Module:
        return ViT()


# ---- ResNet -----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        around = [nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)]
        self.around = nn.Sequential(*around) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.around(x))


class ResNetDigits(Classified):
    """The ResNet of He et al. for small images, with one block in each of three stages."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Residual(16, 16, 1),
            Residual(16, 32, 2),
            Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


# ---- diffusion --------------------------------------------------------------------------------

TIMES = 200
#: How much of the image is left at each time: the cosine of Nichol and Dhariwal (2021).
LEFT = torch.cos((torch.arange(TIMES) + 1) / (TIMES + 8) * math.pi / 2) ** 2


class Denoiser(nn.Module):
    """Predicts the noise in an 8x8 image: convolutions, in which the time scales and shifts channels."""

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 2 * width * blocks))
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(blocks))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.mixes = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-math.log(1000.0) * torch.arange(16) / 16)
        scales = self.times(torch.cat([angles.sin(), angles.cos()], dim=1))[:, :, None, None].chunk(
            2 * len(self.norms), dim=1
        )
        x = self.enter(images)
        for number, (norm, convolve, mix) in enumerate(zip(self.norms, self.convolutions, self.mixes, strict=True)):
            inner = convolve(F.silu(norm(x) * (1 + scales[2 * number]) + scales[2 * number + 1]))
            x = x + mix(F.silu(inner))
        return self.leave(F.silu(x))


class DiffusedDigits(Digits):
    """Denoise digits: the loss is the squared error of the noise, at times and with noise that are always the same."""

    def model(self) -> nn.Module:
        return Denoiser()

    def loss(self, model: nn.Module, size: int) -> Tensor:
        images, _ = self.drawn(size)
        return _error(model, shifted(images, 1))

    def held_out(self, model: nn.Module) -> Result:
        torch.manual_seed(0)
        images = self.test[0].repeat(4, 1, 1, 1)
        return float(_error(model, images)), None


def _error(model: nn.Module, images: Tensor) -> Tensor:
    times, noise = torch.randint(TIMES, (len(images),)), torch.randn_like(images)
    left = LEFT[times][:, None, None, None]
    return F.mse_loss(model(left.sqrt() * images + (1 - left).sqrt() * noise, times), noise)


VIT = Recipe(
    "digits at 16x16, moved by up to 2 pixels; vision transformer with 3 layers of width 48; AdamW, decay 0.05, "
    "warm-up, cosine, dropout 0.1, smoothed labels, clipped at 1",
    ViTDigits, "accuracy", steps=500, batch=16, lr=2e-3, decay=0.05, max_norm=1.0,
)  # fmt: skip
RESNET = Recipe(
    "digits at 16x16, moved by up to 2 pixels; ResNet of 3 blocks with batch normalisation; SGD with momentum 0.9, "
    "decay 0.0005, warm-up, cosine",
    ResNetDigits, "accuracy", steps=400, batch=16, lr=0.1, optimizer="sgd", decay=5e-4,
)  # fmt: skip
DIFFUSION = Recipe(
    "digits, moved by up to 1 pixel; convolutional denoiser with times; AdamW, warm-up, then a constant rate, running "
    "mean of the weights (0.99), clipped at 1",
    DiffusedDigits, "loss", steps=250, batch=24, lr=2e-3, decay=0.01, max_norm=1.0, schedule="constant", average=0.99,
)  # fmt: skip
