"""Which tensors travel together: the plan, what a step costs under it, and the marks of time in a running step.

Descriptions only belong here, no gradients: names, shapes, seconds. The ways of choosing are in :mod:`.policies`; what
tries them in a running job is the engine's.
"""
