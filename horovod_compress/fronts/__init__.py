"""The seams with the frameworks that users call. Only in the room of a framework is it imported.

A front knows when a gradient is there and who waits for the result. What both have in common is here: how a
compression starts, what begins a step, what is saved and reported. It asks a :class:`~horovod_compress.engine.job.Job`
for what depends on the framework. All else is the engine's, the same under every front.
"""
