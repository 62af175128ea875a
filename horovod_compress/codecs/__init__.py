"""The mathematics of each method: numbers to bytes and back. One file per method.

Every module of this package is imported by :mod:`.registry`, so a new codec is a new file.
"""
