"""Dimensions of the parameters of this package's models and their layers."""

import os

from bigtrain.arrays import dims
from bigtrain.config import settings
from bigtrain.models.layers.moe import Options

_TABLES = settings.read_table(os.path.dirname(__file__), "dims.toml")
LAYERS: dict[str, str] = _TABLES["layers"]
PROJECTION_NORMS: dict[str, str] = _TABLES["projection_norms"]


def of_module(name: str) -> dict[str, str]:
  return {**_TABLES[name], **LAYERS}


def with_experts(table: dims.Table, options: Options | None) -> dims.Table:
  if options is None or options.axis is None:
    return table
  split = f"E:{options.axis};"
  return {name: text.replace("E;", split) for name, text in table.items()}
