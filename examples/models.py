"""The networks of the examples: small enough for a laptop, real enough to learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 4


def digits_model(classes: int) -> nn.Module:
    """Return a convolutional network of 38 thousand parameters for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def digits_mlp() -> nn.Module:
    """Return a network of two hidden layers and 85 thousand parameters for 8x8 images."""
    hidden = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


class Block(nn.Module):
    """One transformer layer: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attend(self.norm_attention(x)))
        return x + self.mlp(self.norm_mlp(x))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class CharTransformer(nn.Module):
    """A next-character transformer; of 1.3 million parameters, if nothing else is said.

    There is no dropout: training must be a pure function of the data, so that a
    resumed run can be compared with an uninterrupted one byte for byte.
    """

    def __init__(self, vocabulary: int, context: int, width: int = 160, layers: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(small_weights)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class CharLSTM(nn.Module):
    """A next-character LSTM of two layers and a quarter of a million parameters, most of them in four tensors."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width // 2)
        self.layers = nn.LSTM(width // 2, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.layers(self.characters(characters))
        return self.head(states)


class NextWord(nn.Module):
    """A perceptron over the embeddings of some words, of 800 thousand parameters if there are 4,000 words."""

    def __init__(self, vocabulary: int, context: int, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.words(words).flatten(1))))


def small_weights(module: nn.Module) -> None:
    """Draw the weights of one layer: of a transformer's embeddings and linear ones."""
    # The default embedding scale (1.0) drowns the attention signal for hundreds of steps.
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
