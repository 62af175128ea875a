"""Ranks with two samples of one method refuse each other: what decides the bytes is in the handshake."""

from __future__ import annotations

import json

import pytest

from horovod_compress.codecs import registry
from horovod_compress.codecs.by_step import config_of
from horovod_compress.engine.agreement import handshake
from horovod_compress.engine.agreement.handshake import Document
from horovod_compress.engine.methods import single
from horovod_compress.errors import MismatchError
from horovod_compress.options import Options
from tests.battery.cases import EVERY, each_case
from tests.support.local import spec
from tests.support.samples import Sample, samples_of


def _document(case: Sample) -> Document:
    fields = handshake.fields(single(case.codec()), Options(), [spec("a", 3)], "gloo", 2)
    return Document(json.loads(json.dumps(fields)))  # plain data: it travels as text


@each_case(quick=EVERY)
def test_any_two_samples_refuse_each_other(case: Sample) -> None:
    handshake.check([_document(case), _document(case)])  # the control
    others = [other for other in samples_of(case.kind) if other != case]
    for other in others:
        with pytest.raises(MismatchError, match=r"rank 0 = .*rank 1 = "):
            handshake.check([_document(case), _document(other)])


@each_case(quick=EVERY)
def test_options_are_all_shown_and_all_can_be_given(case: Sample) -> None:
    """No option is left out of the handshake or hides one that all methods share."""
    config = config_of(case.codec())
    assert set(config) == set(registry.option_names(case.method)) and set(case.options) <= set(config)
    assert not set(config) & set(Options.names())
    assert registry.create(case.method, **config) == case.codec()
