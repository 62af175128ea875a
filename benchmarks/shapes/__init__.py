"""The script that writes the tables of models in ``horovod_compress/shapes``."""

from horovod_compress.shapes import FOLDER, Layer, Table, Tensor, load, models

__all__ = ["FOLDER", "Layer", "Table", "Tensor", "load", "models"]
