"""The script that writes the tables of models in ``horovod_compress/cli/plan/shapes``."""

from horovod_compress.cli.plan.models import FOLDER, Layer, Table, TensorShape, load, models

__all__ = ["FOLDER", "Layer", "Table", "TensorShape", "load", "models"]
