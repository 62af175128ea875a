"""A method whose options choose among several classes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ...schedule.plan import Bucket
from ..base import Codec, Properties
from ..layout import Layout


class ByForm(Codec):
    """Checks options, and leaves all rounds to the class that they choose."""

    @cached_property
    def form(self) -> Codec:
        """The codec of every round."""
        raise NotImplementedError

    def properties(self) -> Properties:
        form = self.form
        return replace(form.properties(), variants=(form,))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return self.form.layout(bucket, world)

    def for_step(self, step: int, *, compressed: bool = False) -> Codec:
        return self.form
