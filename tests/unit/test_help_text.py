"""help() of a method shows every option with its default, what it means, and the paper."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("torch")

from horovod_compress.codecs import registry
from horovod_compress.fronts import factories
from horovod_compress.options import Options

each_method = pytest.mark.parametrize("name", registry.methods())


@each_method
def test_every_option_is_explained_with_its_default(name: str) -> None:
    kind = registry.codec_class(name)
    text = " ".join(factories.of_method(kind).split()).partition(" Args: ")[2]
    for field in (*dataclasses.fields(kind), *dataclasses.fields(Options)):
        said = f" {text}".partition(f" {field.name}: ")[2].partition("Default: ")
        assert len(said[0]) > 5 and said[2].startswith(f"{factories.shown(field.default)}.")


@each_method
def test_the_signature_takes_every_option(name: str) -> None:
    kind = registry.codec_class(name)
    shown = inspect.signature(kind).parameters
    given = factories.signature(kind, "all").parameters
    assert list(given) == ["named_parameters", *shown, *Options.names(), "process_set"]
    assert all(given[option].default == shown[option].default for option in shown)


def test_methods_from_papers_name_them_and_their_page() -> None:
    for name in sorted(set(registry.methods()) - {"none", "fp16", "bf16"}):
        kind = registry.codec_class(name)
        assert f"Source: {kind.source}." in factories.of_method(kind) and kind.source and kind.page
