"""Variants of one model, one of which each step draws: config.flexi.

config.flexi = dict(seqhw=dict(values=(8, 16), weights=(1, 2))) draws a field of
the model for each step, as FlexiViT does (https://arxiv.org/abs/2212.08013).
All variants share one set of parameters.
"""

from typing import Any, NamedTuple

from bigtrain.config import flexi
from bigtrain.config.settings import Config


class Variant(NamedTuple):
  """A model that a step may draw, with a probability of `share`."""

  name: str  # Such as "seqhw=8"; "" for the only one.
  model: Any
  share: float = 1.0


def from_config(config: Config, model: Any) -> list[Variant]:
  """The models that steps draw from; by default only `model`."""
  if not config.get("flexi"):
    return [Variant("", model)]
  variants = []
  names = model.__dataclass_fields__.keys() - {"name", "parent"}
  for fields, share in flexi.draws(config, names):
    name = "_".join(f"{field}={value}" for field, value in fields.items())
    variants.append(Variant(name, model.clone(**fields), share))
  return variants
