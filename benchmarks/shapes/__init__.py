"""The script that writes the tables of models in ``horovod_compress/planner/shapes``."""

from horovod_compress.planner.shapes import FOLDER, Layer, Table, Tensor, load, models

__all__ = ["FOLDER", "Layer", "Table", "Tensor", "load", "models"]
