"""Methods by pattern and by step: each tensor really gets its own, and nothing is lost in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod_compress.ddp as hvc
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.by_step import ByStep, by_step, method
from horovod_compress.codecs.dense import FullPrecision
from horovod_compress.codecs.masked import masked
from horovod_compress.engine.methods import Methods, numbered, parse, per_layer
from horovod_compress.errors import ConfigError, CorruptFrameError, HorovodCompressError
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import Plan
from tests.support.local import Fleet, all_same, random_grads, spec

TENSORS = [spec("head.weight", 40, 70), spec("head.bias", 40), spec("embed.weight", 100, 20)]
MIXED = {"embed*": method("topk", density=0.1), "*.bias": "none", "*": method("signsgd")}


def _step(methods: Any, tensors: list[Any] = TENSORS, **options: Any) -> dict[str, torch.Tensor]:
    with Fleet(2, tensors, methods, **options) as fleet:  # of two numbers the order of adding does not matter
        results = fleet.step(random_grads(2, tensors, seed=5))
        assert all_same(results)
        return results[0]


@pytest.mark.parametrize("schedule", ["single", "layerwise", "size:4KB"])
def test_each_tensor_gets_its_own_method_and_no_other(schedule: str) -> None:
    mixed = _step(per_layer(MIXED), schedule=schedule)
    alone = {name: _step(codec) for name, codec in (("embed", MIXED["embed*"]), ("head", MIXED["*"]), ("bias", "none"))}
    for name, tensor in mixed.items():
        kind = "bias" if name.endswith("bias") else name.split(".")[0]
        for other, results in alone.items():
            assert torch.equal(tensor, results[name]) == (other == kind)


def test_buckets_have_one_method_and_go_by_their_last_gradient() -> None:
    tensors = [spec("a.w", 10), spec("a.b", 10), spec("c.w", 10), spec("c.b", 10)]
    methods = per_layer({"*.b": "fp16", "*": "marsit"})
    plan = make_plan("single", tensors, 0, methods.number)
    assert [[t.name for t in b.tensors] for b in plan.buckets] == [["a.w", "c.w"], ["a.b", "c.b"]]
    assert [methods.codecs[b.method].name for b in plan.buckets] == ["marsit", "fp16"]
    assert Plan.from_document(plan.document()) == plan
    own = Plan.of([(tensors[::2], True), (tensors[1::2], True)])
    assert numbered(own, methods) == plan
    small = make_plan("single", tensors, 11, methods.number)
    assert [b.compressed for b in small.buckets] == [False] and numbered(small, methods) == small
    with pytest.raises(ConfigError, match=r"bucket 0 of the plan holds parameters of different methods: a.w, a.b"):
        numbered(Plan.of([(tensors, True)]), methods)


def test_patterns_are_compared_in_order() -> None:
    methods = per_layer({"a.*": "fp16", "*.b": "bf16", "*": "fp16"})
    names = [methods.codecs[methods.number(name)].name for name in ("a.b", "c.b", "c.w")]
    assert names == ["fp16", "bf16", "fp16"] and len(methods.codecs) == 3  # none, fp16, bf16
    with pytest.raises(ConfigError, match=r'no pattern matches the parameter c.w; end with "\*"'):
        per_layer({"a.*": "fp16"}).number("c.w")
    with pytest.raises(ConfigError, match=r"no parameter takes its method from the pattern 'embd\*'.*head.weight"):
        per_layer({"embd*": "fp16", "*": "none"}).check_used(TENSORS)
    per_layer({"head*": "fp16", "embed*": "none", "*": "none"}).check_used(TENSORS)


@pytest.mark.parametrize("given", [None, {}, {1: "none"}, {"*": 3}, {"*": ("topk", {})}, "marsit"])
def test_what_are_no_methods_by_pattern_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"per_layer takes methods by pattern|should be a name or hvc.method"):
        per_layer(given)


def test_the_handshake_and_checkpoints_see_every_option() -> None:
    configs = [
        parse(methods, {})[0].config()
        for methods in (
            per_layer(MIXED),
            per_layer(MIXED | {"embed*": method("topk", density=0.2)}),
            per_layer(MIXED | {"*.bias": "fp16"}),
            per_layer(dict(reversed(MIXED.items()))),
            by_step({0: "none", 5: "topk"}),
            by_step({0: "none", 6: "topk"}),
            by_step({0: "fp16", 5: "topk"}),
        )
    ]
    assert all(a != b for index, a in enumerate(configs) for b in configs[:index])
    with pytest.raises(
        ConfigError, match=r"'density' is not an option of all methods; a method takes its own in hvc.method"
    ):
        parse(per_layer(MIXED), {"density": 0.1})


# ---- by step ----


def _plain(step: int) -> str:
    return "late" if step >= 2 else "early"


@pytest.mark.parametrize(
    "changing",
    [
        by_step({0: "none", 2: method("topk", density=0.1)}),
        by_step(_plain, {"early": "none", "late": method("topk", density=0.1)}),
    ],
)
def test_another_method_from_a_step_on(changing: ByStep) -> None:
    grads = [random_grads(2, TENSORS, seed=number) for number in range(4)]
    with Fleet(2, TENSORS, changing) as fleet, Fleet(2, TENSORS, "none") as plain:
        found = [fleet.step(mine)[0]["head.weight"] for mine in grads]
        means = [plain.step(mine)[0]["head.weight"] for mine in grads]
    assert [torch.equal(a, b) for a, b in zip(found, means, strict=True)] == [True, True, False, False]
    with Fleet(2, TENSORS, "topk", density=0.1, warmup_steps=2) as fleet:
        assert all(torch.equal(fleet.step(mine)[0]["head.weight"], was) for mine, was in zip(grads, found, strict=True))


@pytest.mark.parametrize("later", ["none", "ef_signsgd", "topk"])
def test_what_was_not_sent_is_handed_on(later: str) -> None:
    stages = {0: method("topk", density=0.05), 3: later}
    with Fleet(2, TENSORS, by_step(stages), verify_every=1) as fleet:
        sent, given = torch.zeros(40, 70, dtype=torch.float64), torch.zeros(40, 70, dtype=torch.float64)
        for number in range(5):
            grads = random_grads(2, TENSORS, seed=number)
            given += sum(mine["head.weight"].double() for mine in grads) / 2
            sent += fleet.step(grads)[0]["head.weight"]
        waiting = sum(r.kept.residuals()["head.weight"].double() for r in fleet.reducers).view(40, 70) / 2
        assert bool((waiting != 0).any()) == (later != "none")
        assert torch.allclose(sent + waiting, given, atol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("before", ["topk", "ef_signsgd", "dgc", "powersgd", "marsit"])
@pytest.mark.parametrize(
    "after",
    ["signsgd", "signum", "qsgd", "global_qsgd", "natural", "terngrad", "powersgd", "randomk", "onebit_adam", "spardl",
     method("marsit", compensation="none", full_precision_every=0), method("randomk", scaled=True)],
    ids=lambda after: after if isinstance(after, str) else after.name + " without residual",
)  # fmt: skip
def test_nothing_waits_for_a_method_that_would_never_send_it(before: str, after: Any) -> None:
    """The first method sends little; what waits has to be in the results soon after the second one began."""
    first = method(before, density=0.05, momentum=0.0) if before == "dgc" else method(before)
    changing = by_step({0: first, 2: after})
    with Fleet(2, TENSORS, changing, verify_every=1) as fleet:
        for number in range(4):
            results = fleet.step(random_grads(2, TENSORS, seed=number))
            assert all_same(results) and all(bool(t.isfinite().all()) for t in results[0].values())
            waits = float(sum(t.abs().sum() for r in fleet.reducers for t in r.kept.residuals().values()))
            assert waits > 0 or number > 1 or before == "marsit"
        if not _drains(fleet.methods.codecs[1].stages[1][1]) and after != "powersgd":
            assert waits == 0


def _drains(codec: Codec) -> bool:
    """Return whether a method sends what any other has left."""
    found = codec.properties()
    return found.feedback != "none" and codec.drains_residual


def test_what_only_one_method_would_send_must_stay_with_it() -> None:
    by_step({0: "none", 5: "onebit_adam"})
    in_sketch = method("sketch_fusion", cells=0.5, error_feedback="sketch")
    for wrong in ({0: "onebit_adam", 5: "none"}, {0: "onebit_adam", 5: "topk"}, {0: in_sketch, 5: "none"}):
        with pytest.raises(ConfigError, match="make it the last stage"):
            by_step(wrong)
    with pytest.raises(ConfigError, match="make it the last stage"):
        by_step(_plain, {"early": "none", "late": "onebit_adam"})


def test_stages_of_one_name_differ_in_their_frames() -> None:
    """A function of the step that differs between ranks must not mix payloads of another density."""
    stages = {"a": method("topk", density=0.1), "b": method("topk", density=0.2)}

    def another(step: int) -> str:
        return "a"

    with Fleet(2, TENSORS, by_step(another, stages), timeout=5.0) as fleet:
        fleet.step(random_grads(2, TENSORS))  # the control
        for state in fleet.reducers[1].buckets:
            state.rounds._codec = by_step(lambda step: "b", stages)
        grads = random_grads(2, TENSORS)
        step = fleet.offer(grads)
        for reducer in fleet.reducers:
            with pytest.raises(HorovodCompressError) as caught:
                reducer.result(0, step)
            assert isinstance(caught.value, CorruptFrameError) or "stopped" in str(caught.value)


def test_a_resume_goes_on_in_the_right_stage() -> None:
    from horovod_compress.engine.saved import checkpoint

    changing = by_step({0: "none", 2: method("topk", density=0.05), 4: "ef_signsgd"})
    grads = [random_grads(2, TENSORS, seed=number) for number in range(6)]
    with Fleet(2, TENSORS, changing) as whole:
        wanted = [whole.step(mine) for mine in grads]
    with Fleet(2, TENSORS, changing) as first:
        for mine in grads[:3]:
            first.step(mine)
        saved = [checkpoint.save(reducer, first.methods) for reducer in first.reducers]
    with Fleet(2, TENSORS, changing) as second:
        second.load(saved)
        for mine, want in zip(grads[3:], wanted[3:], strict=True):
            assert all_same([*second.step(mine), want[0]])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (({7: "topk", 5: "none"},), r"needs a method for step 0, .*, got \[5, 7\]"),
        (({-1: "topk"},), "a whole number of 0 or more"),
        (({0: "none", "5": "topk"},), "a whole number of 0 or more|not supported"),
        (({0: "none", 5: 3},), "should be a name or hvc.method"),
        ((_plain,), "also needs the methods by label"),
        ((_plain, ["none"]), r"also needs the methods by label: .*, got \['none'\]"),
        ((_plain, "none"), "also needs the methods by label"),
        ((None,), "or a function of the step and methods by label, got None"),
        (("topk",), "by_step takes methods"),
        (({0: "none"}, {"a": "none"}), "by_step takes methods"),
    ],
)
def test_what_are_no_stages_is_refused(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        by_step(*given)


def test_a_label_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="returned 'late' for step 2; methods has 'early'"):
        by_step(_plain, {"early": "none"}).for_step(2)


def test_a_function_that_fails_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the function given to by_step raised ZeroDivisionError for step 2"):
        by_step(lambda step: 1 // (step - 2), {-1: "none"}).for_step(2)


@pytest.mark.parametrize("given", [None, 3, ["marsit"], {"*": "topk"}, by_step, method])
def test_what_is_no_method_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"a method should be a name or hvc.method"):
        parse(given, {})
    with pytest.raises(ConfigError, match="unknown method"):
        method(given)


def test_update_mode_takes_the_settings_of_the_last_stage() -> None:
    warmed = parse("marsit", {"full_precision_every": 7, "warmup_steps": 3})[0]
    assert warmed.full_precision_every() == 7
    assert parse("sparse_binary", {"preset": 2, "warmup_steps": 3})[0].communication_delay() == 10
    differing = Methods((("a", method("marsit", full_precision_every=7)), ("*", FullPrecision())))
    with pytest.raises(ConfigError, match="one full_precision_every for all parameters"):
        differing.full_precision_every()


def test_what_was_probably_meant_is_asked_in_brackets() -> None:
    with pytest.raises(ConfigError, match=r"^unknown method 'marsitt' \(did you mean 'marsit'\?\); choose one of: "):
        registry.codec_class("marsitt")
    with pytest.raises(
        ConfigError, match=r"^topk has no option 'densty' \(did you mean 'density'\?\); its own options"
    ):
        registry.create("topk", densty=0.1)


@pytest.mark.parametrize(
    ("given", "asked"),
    [("warmpu", "warmup_steps"), ("warmpu_steps", "warmup_steps"), ("zer", "zeros"), ("density", ""), ("timeout", "")],
)
def test_an_option_is_asked_for_by_its_beginning_too(given: str, asked: str) -> None:
    question = f" (did you mean {asked!r}?)" if asked else ""
    with pytest.raises(ConfigError) as refused:
        registry.create("marsit", **{given: 1})
    assert str(refused.value).startswith(f"marsit has no option {given!r}{question}; its own options")


def test_masked_is_known_by_pattern_and_compared() -> None:
    methods = per_layer({"embed*": masked("signsgd"), "*.bias": "none", "*": masked(MIXED["*"])})
    assert [methods.is_masked(t.name) for t in TENSORS] == [True, False, True]
    plain = per_layer({"embed*": "signsgd", "*.bias": "none", "*": MIXED["*"]})
    assert not any(plain.is_masked(t.name) for t in TENSORS)
    assert methods.codecs == plain.codecs and methods.config() != plain.config()
    (one, _), (other, _) = parse(masked("marsit"), {}), parse("marsit", {})
    assert one.is_masked("any") and one.config() == other.config() | {"masked": True} and one.name == "marsit"


@pytest.mark.parametrize("given", [3, None, "mars", masked("marsit")])
def test_masked_takes_a_method(given: Any) -> None:
    with pytest.raises(ConfigError):
        masked(given)


def test_masked_goes_around_by_step() -> None:
    assert parse(masked(by_step({0: "none", 5: "topk"})), {})[0].is_masked("any")
    with pytest.raises(ConfigError, match="goes around"):
        by_step({0: "none", 5: masked("topk")})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["by_step", "masked", "per_layer"])
def test_what_puts_methods_together_is_no_name_of_one(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^'{name}' is no method, but is made of some; write hvc\.(Compression\.)?{name}\("
    ):
        parse(name, {})
    assert hasattr(hvc, name) or hasattr(hvc.Compression, name)
