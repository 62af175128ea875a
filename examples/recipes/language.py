"""Four language models: a GPT, one with experts, one that is fine-tuned by low-rank adapters, and an LSTM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from files import write_whole
from models import small_weights
from recipes.base import Recipe, Result, classified
from recipes.bpe import encoded
from tasks import library_source, reference_text

CONTEXT, WINDOWS = 64, 96
MERGES = 512
HEADS = 4
BASES = Path(__file__).resolve().parents[2] / "build" / "recipes"  # of models that were trained before


class Text:
    """A text in tokens, its last tenth held out."""

    merges = MERGES

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        text, learnt_from = self.texts()
        if quick:
            text, learnt_from = text[:40_000], learnt_from[:20_000]
        codes, self.vocabulary = encoded(text, learnt_from, 16 if quick and self.merges else self.merges)
        tokens = torch.from_numpy(codes)
        cut = len(tokens) * 9 // 10
        self.train, self.validation = tokens[:cut], tokens[cut:]

    def texts(self) -> tuple[str, str]:
        """Return the text, and the part of it that merges are learnt from."""
        text = reference_text()
        return text, text[: len(text) * 9 // 10]

    def loss(self, model: Any, size: int) -> Tensor:
        inputs, targets = windows(self.train, torch.randint(len(self.train) - CONTEXT, (size,)))
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def held_out(self, model: Any) -> Result:
        return classified(model, self._held_out())

    def _held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        last = len(self.validation) - CONTEXT - 1
        for starts in torch.linspace(0, last, 8 if self.quick else WINDOWS).long().split(16):
            yield windows(self.validation, starts)


class Code(Text):
    """The modules of Python's own library."""

    def texts(self) -> tuple[str, str]:
        text = library_source()[:1_500_000]
        return text, text[: len(text) * 9 // 10]


def windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    rows = starts[:, None] + torch.arange(CONTEXT + 1)
    return tokens[rows[:, :-1]], tokens[rows[:, 1:]]


# ---- GPT --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention, then a perceptron or what is given instead, with dropout."""

    def __init__(self, width: int, dropout: float, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Next tokens; the embedding of tokens is also the last layer."""

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, dropout, self._mlp(width)) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.apply(small_weights)

    def _mlp(self, width: int) -> nn.Module | None:
        return None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class GPTText(Text):
    def model(self) -> nn.Module:
        return GPT(self.vocabulary)


# ---- mixture of experts -----------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to one of four perceptrons (Switch Transformer, Fedus et al. 2021)."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        chances = self.router(tokens).softmax(dim=1)
        chance, chosen = chances.max(dim=1)
        count = len(self.experts)
        self.imbalance = count * (F.one_hot(chosen, count).float().mean(dim=0) * chances.mean(dim=0)).sum()
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).flatten()  # may be none: its gradients are zeros then
            result = result.index_add(0, mine, expert(tokens[mine]))
        return (result * chance[:, None]).view_as(x)


class ExpertGPT(GPT):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary, layers=2)

    def _mlp(self, width: int) -> nn.Module:
        return Experts(width)


class ExpertCode(Code):
    def model(self) -> nn.Module:
        return ExpertGPT(self.vocabulary)

    def loss(self, model: Any, size: int) -> Tensor:
        wrong = super().loss(model, size)
        return wrong + 0.01 * sum(layer.mlp.imbalance for layer in model.layers)


# ---- low-rank adapters ------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a product of two thin matrices beside it (LoRA, Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.linear, self.scale, self.dropout = linear, alpha / rank, nn.Dropout(dropout)
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * F.linear(F.linear(self.dropout(x), self.down), self.up)


def adapt(model: GPT, rank: int = 16) -> GPT:
    """Freeze a model and give its linear layers adapters."""
    model.requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, Layer) and isinstance(layer.mlp, nn.Sequential)
        layer.query_key_value = Adapted(layer.query_key_value, rank, 2.0 * rank, 0.05)  # type: ignore[assignment]
        layer.project = Adapted(layer.project, rank, 2.0 * rank, 0.05)  # type: ignore[assignment]
        for place in (0, 2):
            linear = layer.mlp[place]
            assert isinstance(linear, nn.Linear)
            layer.mlp[place] = Adapted(linear, rank, 2.0 * rank, 0.05)
    return model


class AdaptedCode(Code):
    """Fine-tune a model of Python's documentation to its source; tokens are those of the documentation."""

    def texts(self) -> tuple[str, str]:
        return super().texts()[0], Text.texts(self)[1]

    def model(self) -> nn.Module:
        model = GPT(self.vocabulary, dropout=0.0)
        model.load_state_dict(self._base())
        return adapt(model)

    def _base(self) -> dict[str, Tensor]:
        """Return the weights of the model that was trained before; the first time, train it."""
        steps = 2 if self.quick else 500
        path = BASES / f"gpt-{steps}-{self.vocabulary}-torch-{torch.__version__}.pt"
        if not path.exists():
            write_base(path, GPTText(self.quick), steps)
        return torch.load(path, weights_only=True)


def write_base(path: Path, text: GPTText, steps: int) -> None:
    """Train a GPT on a text without any exchange, and keep its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(text.vocabulary, dropout=0.0)
        optimizer = GPTRECIPE.make_optimizer(model, 2e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * GPTRECIPE.share(step, steps)
            optimizer.zero_grad()
            text.loss(model, 16).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: torch.save(model.state_dict(), temporary))


# ---- LSTM -------------------------------------------------------------------------------------


class LSTM(nn.Module):
    """Next characters, by two layers with dropout before, between and after them."""

    def __init__(self, vocabulary: int, width: int = 96, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, 48), nn.Dropout(dropout)
        self.layers = nn.LSTM(48, width, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.layers(self.dropout(self.tokens(tokens)))
        return self.head(self.dropout(states))


class LSTMText(Text):
    merges = 0

    def model(self) -> nn.Module:
        return LSTM(self.vocabulary)


GPTRECIPE = Recipe(
    "Python's documentation in 512 learnt byte pairs; GPT with 3 layers of width 64 and tied embeddings; AdamW (0.9, "
    "0.95), decay 0.1, warm-up, cosine, dropout 0.1, clipped at 1",
    GPTText, "loss", steps=450, batch=4, lr=4e-3, betas=(0.9, 0.95), decay=0.1, max_norm=1.0,
)  # fmt: skip
MOE = Recipe(
    "Python's library in 512 learnt byte pairs; GPT with 2 layers of 4 experts, one for each token, and a penalty for "
    "imbalance; AdamW (0.9, 0.95), decay 0.1, warm-up, cosine, dropout 0.1, clipped at 1",
    ExpertCode, "loss", steps=300, batch=4, lr=3e-3, betas=(0.9, 0.95), decay=0.1, max_norm=1.0,
)  # fmt: skip
LORA = Recipe(
    "a GPT of Python's documentation, frozen, learns Python's library by adapters of rank 16; AdamW without decay, "
    "warm-up, cosine, dropout 0.05, clipped at 1",
    AdaptedCode, "loss", steps=350, batch=4, lr=6e-3, decay=0.0, max_norm=1.0,
)  # fmt: skip
LSTM_TEXT = Recipe(
    "Python's documentation in characters; LSTM of 2 layers; AdamW, decay 0.01, warm-up, cosine, dropout 0.2, clipped "
    "at 0.25",
    LSTMText, "loss", steps=500, batch=4, lr=8e-3, max_norm=0.25,
)  # fmt: skip
