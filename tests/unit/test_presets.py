"""Names that stand for a method with options are known wherever a method's name is, and are nothing beyond that."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

pytest.importorskip("torch")

import horovod_compress.ddp as hvc
from horovod_compress import cli
from horovod_compress.codecs import registry
from horovod_compress.engine.methods import parse
from horovod_compress.errors import ConfigError
from horovod_compress.options import PRESETS, check_known

each_preset = pytest.mark.parametrize("name", PRESETS)
#: Choices one of which a preset can bear, if its method has options.
CHANGES = {"density": 0.25, "full_precision_every": 7, "beta": 0.5}
#: Options that make sense together only, and which one is named where another has its usual value.
TOGETHER = {
    "loco": {"rounding": "rounding", "feedback": "feedback"},
    "sparse_dithering": {"norm": "norm", "coding": "coding", "rounding": "rounding", "error": "rounding"},
}


def changed(name: str) -> dict[str, Any]:
    if name == "sparse_dithering":  # a bound of the error goes with no option of feedback
        return {"error": 0.25}
    known = registry.option_names(name)
    return next(({option: value} for option, value in CHANGES.items() if option in known), {})


@each_preset
def test_a_preset_is_its_method_with_options(name: str) -> None:
    method, options, _ = PRESETS[name]
    assert hvc.method(name) == registry.create(method, **options)  # type: ignore[arg-type]
    assert parse(name, {})[0] == parse(method, options)[0]
    assert name in hvc.available() and name not in registry.methods() and method in registry.built_in()


@each_preset
def test_options_given_come_first(name: str) -> None:
    method, options, _ = PRESETS[name]
    found = parse(name, changed(name))[0]
    assert found == parse(method, {**options, **changed(name)})[0]
    assert (found == parse(name, {})[0]) is not bool(changed(name))
    for option in options:
        usual = inspect.signature(registry.codec_class(method)).parameters[option].default
        if named := TOGETHER.get(name, {}).get(option):
            with pytest.raises(ConfigError, match=named):
                hvc.method(name, **{option: usual})  # type: ignore[arg-type]
            continue
        assert getattr(hvc.method(name, **{option: usual}), option) == usual  # type: ignore[arg-type]
    check_known(name, changed(name))


@each_preset
def test_help_shows_the_options_of_the_preset(name: str) -> None:
    make: Any = getattr(hvc.Compression, name)
    method, options, _ = PRESETS[name]
    assert (make.__doc__ or "").startswith(f"A preset: {method}")
    parameters = inspect.signature(make).parameters
    for option, value in options.items():
        assert parameters[option].default == value and f"{option}: " in make.__doc__


def test_mistakes_are_told_with_the_names_of_presets() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sbc'"):
        registry.create("sbcc")
    for attempt in (lambda: check_known("sbc", {"densty": 1}), lambda: registry.create("sbc", densty=1)):
        with pytest.raises(ConfigError, match=r"sbc has no option 'densty' \(did you mean 'density'\?\)"):
            attempt()


def test_the_list_and_the_plan_know_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["presets"]
    kinds = ("method", "options", "updates")
    assert shown == {name: dict(zip(kinds, preset, strict=True)) for name, preset in PRESETS.items()}
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in PRESETS)
