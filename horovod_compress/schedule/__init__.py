"""Which tensors travel together: the plan, what a step costs under it, and the marks of time in a running step.

Descriptions only belong here, no gradients: names, shapes, seconds. :mod:`.by_name` knows the ways of choosing by the
names that ``schedule=`` takes; what tries buckets in a running job is the engine's.
"""
