"""The seams with the frameworks that users call, a room for each: only there is the framework imported.

A front knows when a gradient is there and who waits for the result. All else is the engine's, the same under every
front.
"""
