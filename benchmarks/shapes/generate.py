"""Write the parameter tables of ``horovod_compress/cli/plan/shapes`` from short definitions of the architectures.

    python -m benchmarks.shapes.generate

Nobody has to trust typed numbers: the CSV files are the output of this script, and a test compares
them with it, and their totals with the published parameter counts.

A row is one parameter tensor: its name and shape as the reference implementation has them, and the
multiply-adds of its layer for one sample (one forward pass). Biases, norms and embeddings count 0.
Work that has no parameters of its own is counted where it ends in backward order: attention's two
products with the projection behind them, GPT-2's tied output layer with the norm before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import NamedTuple

from horovod_compress.cli.plan.models import FOLDER

COLUMNS = ("name", "shape", "macs")

IMAGE = 224  # pixels, both ways
BERT_TOKENS, GPT2_TOKENS = 128, 1024


class Row(NamedTuple):
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    macs: int  # multiply-adds of its layer for one sample

    @property
    def count(self) -> int:  # type: ignore[override]
        return prod(self.shape)


class Source(NamedTuple):
    """Where an architecture comes from, for the head of its table."""

    paper: str
    names: str
    sample: str
    rows: Callable[[], list[Row]]


def conv(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool) -> list[Row]:
    """Return a square convolution whose result is ``size`` x ``size``."""
    weight = (outputs, inputs, kernel, kernel)
    rows = [Row(f"{name}.weight", weight, prod(weight) * size * size)]
    return rows + [Row(f"{name}.bias", (outputs,), 0)] * bias


def norm(name: str, width: int, extra: int = 0) -> list[Row]:
    """Return a batch or layer norm; ``extra`` is work without parameters that comes behind it."""
    return [Row(f"{name}.weight", (width,), extra), Row(f"{name}.bias", (width,), 0)]


def linear(name: str, inputs: int, outputs: int, tokens: int = 1, extra: int = 0) -> list[Row]:
    """Return a dense layer with torch's (outputs, inputs); ``extra`` is work before it."""
    macs = tokens * inputs * outputs + extra
    return [Row(f"{name}.weight", (outputs, inputs), macs), Row(f"{name}.bias", (outputs,), 0)]


def transposed(rows: list[Row]) -> list[Row]:
    """Return a dense layer as GPT-2 stores it: (inputs, outputs)."""
    weight, bias = rows
    return [weight._replace(shape=weight.shape[::-1]), bias]


def attention_products(tokens: int, width: int) -> int:
    """Return the multiply-adds of queries x keys and of weights x values, all heads, no mask used."""
    return 2 * tokens * tokens * width


# ---- ResNet-50 ----


def resnet50() -> list[Row]:
    size = IMAGE // 2
    rows = conv("conv1", 3, 64, 7, size, bias=False) + norm("bn1", 64)
    size, inputs = size // 2, 64  # behind the pooling
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        width = 32 * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            rows += bottleneck(f"layer{stage}.{block}", inputs, width, size, stride)
            size, inputs = size // stride, 4 * width
    return rows + linear("fc", inputs, 1000)


def bottleneck(name: str, inputs: int, width: int, size: int, stride: int) -> list[Row]:
    """Return one block; the stride is in the 3x3 convolution, as torchvision has it."""
    outputs, after = 4 * width, size // stride
    rows = conv(f"{name}.conv1", inputs, width, 1, size, bias=False) + norm(f"{name}.bn1", width)
    rows += conv(f"{name}.conv2", width, width, 3, after, bias=False) + norm(f"{name}.bn2", width)
    rows += conv(f"{name}.conv3", width, outputs, 1, after, bias=False) + norm(f"{name}.bn3", outputs)
    if inputs != outputs or stride > 1:
        rows += conv(f"{name}.downsample.0", inputs, outputs, 1, after, bias=False)
        rows += norm(f"{name}.downsample.1", outputs)
    return rows


# ---- VGG-16 ----


def vgg16() -> list[Row]:
    rows, place, size, inputs = [], 0, IMAGE, 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            rows += conv(f"features.{place}", inputs, width, 3, size, bias=True)
            place, inputs = place + 2, width  # a ReLU stands between
        place, size = place + 1, size // 2  # the pooling
    for place, ends in zip((0, 3, 6), ((inputs * size * size, 4096), (4096, 4096), (4096, 1000)), strict=True):
        rows += linear(f"classifier.{place}", *ends)
    return rows


# ---- BERT-base ----


def bert_base() -> list[Row]:
    width = 768
    rows = [
        Row("embeddings.word_embeddings.weight", (30522, width), 0),
        Row("embeddings.position_embeddings.weight", (512, width), 0),
        Row("embeddings.token_type_embeddings.weight", (2, width), 0),
        *norm("embeddings.LayerNorm", width),
    ]
    for layer in range(12):
        rows += bert_layer(f"encoder.layer.{layer}", width, BERT_TOKENS)
    return rows + linear("pooler.dense", width, width)  # of the first token alone


def bert_layer(name: str, width: int, tokens: int) -> list[Row]:
    rows = []
    for part in ("query", "key", "value"):
        rows += linear(f"{name}.attention.self.{part}", width, width, tokens)
    products = attention_products(tokens, width)
    rows += linear(f"{name}.attention.output.dense", width, width, tokens, extra=products)
    rows += norm(f"{name}.attention.output.LayerNorm", width)
    rows += linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
    rows += linear(f"{name}.output.dense", 4 * width, width, tokens)
    return rows + norm(f"{name}.output.LayerNorm", width)


# ---- GPT-2 ----


def gpt2() -> list[Row]:
    width, vocabulary = 768, 50257
    rows = [Row("transformer.wte.weight", (vocabulary, width), 0), Row("transformer.wpe.weight", (1024, width), 0)]
    for layer in range(12):
        rows += gpt2_layer(f"transformer.h.{layer}", width, GPT2_TOKENS)
    # The output layer shares wte's weight, whose gradient is complete at the end of backward only.
    return rows + norm("transformer.ln_f", width, extra=GPT2_TOKENS * width * vocabulary)


def gpt2_layer(name: str, width: int, tokens: int) -> list[Row]:
    products = attention_products(tokens, width)
    rows = norm(f"{name}.ln_1", width)
    rows += transposed(linear(f"{name}.attn.c_attn", width, 3 * width, tokens))
    rows += transposed(linear(f"{name}.attn.c_proj", width, width, tokens, extra=products))
    rows += norm(f"{name}.ln_2", width)
    rows += transposed(linear(f"{name}.mlp.c_fc", width, 4 * width, tokens))
    return rows + transposed(linear(f"{name}.mlp.c_proj", 4 * width, width, tokens))


# ---- a net of dense layers ----


def mlp() -> list[Row]:
    widths = (1024, 2048, 2048, 2048, 10)
    layers = [linear(str(2 * place), *ends) for place, ends in enumerate(pairwise(widths))]
    return [row for layer in layers for row in layer]  # ReLUs stand between


# ---- the files ----

SOURCES = {
    "resnet50": Source(
        "ResNet-50: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385",
        "torchvision.models.resnet50 (stride in the 3x3 convolutions)",
        f"an image of {IMAGE}x{IMAGE}",
        resnet50,
    ),
    "vgg16": Source(
        "VGG-16 (configuration D): Simonyan and Zisserman, arXiv:1409.1556",
        "torchvision.models.vgg16",
        f"an image of {IMAGE}x{IMAGE}",
        vgg16,
    ),
    "bert_base": Source(
        "BERT-base, uncased, with pooler, without a task's head: Devlin et al., arXiv:1810.04805",
        "transformers.BertModel",
        f"{BERT_TOKENS} tokens",
        bert_base,
    ),
    "gpt2": Source(
        "GPT-2 small: Radford et al., Language Models are Unsupervised Multitask Learners, 2019",
        "transformers.GPT2LMHeadModel (the output layer shares transformer.wte.weight)",
        f"{GPT2_TOKENS} tokens",
        gpt2,
    ),
    "mlp": Source(
        "Dense layers 1024-2048-2048-2048-10 with ReLU: small, and made of few large tensors",
        "torch.nn.Sequential",
        "one sample",
        mlp,
    ),
}


def text(model: str) -> str:
    """Return the CSV file of a model."""
    source = SOURCES[model]
    rows = source.rows()
    total = sum(row.count for row in rows)
    file = io.StringIO()
    file.write(f"# {source.paper}\n")
    file.write(f"# Named and ordered as in {source.names}\n")
    file.write(f"# {total:,} parameters in {len(rows)} tensors; {sum(row.macs for row in rows):,} ")
    file.write(f"multiply-adds for {source.sample}; written by generate.py\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((row.name, "x".join(map(str, row.shape)), row.macs) for row in rows)
    return file.getvalue()


def main() -> None:
    for model in SOURCES:
        (FOLDER / f"{model}.csv").write_text(text(model))


if __name__ == "__main__":
    main()
