"""Two towers that embed images and texts on the same sphere.

For SigLIP (https://arxiv.org/abs/2303.15343), LiT (2111.07991) and CLIP
(2103.00020). Parameters are named as in the released SigLIP and LiT files.

Axes: B batch, E embedding.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.config.modules import find_module
from bigtrain.models import text_transformer, vit
from bigtrain.models.layers import options as model_options
from bigtrain.models.layers import pooling
from bigtrain.models.published import (
  bert_families,
  conversions,
  families,
  layouts,
  two_tower_families,
  vit_families,
)

# Keys of the towers' options.
_KEYS = {"img": "config.model.image", "txt": "config.model.text"}
# {part of the parameters: (its module, the method that makes its model)}, for
# config.model_init.parts.
PARTS = {"img": (vit, "image_tower"), "txt": (text_transformer, "text_tower")}
# Of the towers that published files have.
_DIMS = {
  **dims.under("img/", vit.DIMS),
  **dims.under("txt/", text_transformer.DIMS),
}


class Model(nn.Module):
  """Image tower, text tower, temperature and bias."""

  image: Mapping[str, Any] | None = None  # Options of the image tower's Model.
  text: Mapping[str, Any] | None = None  # Options of the text tower's Model.
  image_model: str = "vit"  # Module in bigtrain.models, or a dotted path.
  # The same; its Model is called with (text [B, L], train=). None for one tower
  # that embeds pictures of texts too (CLIPPO, arXiv 2212.08045).
  text_model: str | None = "text_transformer"
  # E, or (image head, text head), each None for pooled features.
  out_dim: int | Sequence[int | None] = 128
  temperature_init: float = 10.0  # Scale of the logits; its log is learned.
  bias_init: float | None = -10.0  # Of the logits; None for no bias.

  def __post_init__(self) -> None:
    key = "config.model.temperature_init"
    check_number(key, self.temperature_init, above=0)
    self._towers()  # Checks their options.
    super().__post_init__()

  def setup(self) -> None:
    for name, (model, options) in self._towers().items():
      with model_options.naming(_KEYS[name]):
        setattr(self, name, model(**options))
    init = nn.initializers.constant(math.log(self.temperature_init))
    self.t_1 = self.param("t", init, (1,))
    if self.bias_init is not None:
      init = nn.initializers.constant(self.bias_init)
      self.b_1 = self.param("b", init, (1,))

  def __call__(
    self,
    image: jax.Array | None = None,
    text: jax.Array | None = None,
    *,
    shapes: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array | None, jax.Array | None, dict[str, jax.Array]]:
    """Embeds images (B, height, width, channels), texts (B, L), or both.

    Images may be given as ready-made patches, with `shapes` (B, 2): see
    models.vit.

    Returns:
      (image_BE, text_BE, out): float32 embeddings of length 1, or None without
      that input; a dict of the towers' results as "img/..." and "txt/...", the
      temperature "t" and the bias "b".
    """
    embedded: dict[str, jax.Array | None] = {"img": None, "txt": None}
    out: dict[str, jax.Array] = {}
    for name, x in (("img", image), ("txt", text)):
      if x is not None:
        others = {}
        if name == "img" and shapes is not None:
          others["shapes"] = shapes
        z_BE, tower_out = self.run_tower(name, x, train=train, **others)
        out.update({f"{name}/{key}": value for key, value in tower_out.items()})
        embedded[name] = pooling.normalise(z_BE)
    out["t"] = jnp.exp(self.t_1)
    if self.bias_init is not None:
      out["b"] = self.b_1
    return embedded["img"], embedded["txt"], out

  def run_tower(self, name: str, x: jax.Array, **kwargs: Any) -> Any:
    """Calls a tower, or the only one: its embeddings and its dict."""
    tower = name if name == "img" or self.text_model else "img"
    with model_options.naming(_KEYS[tower]):
      return getattr(self, tower)(x, **kwargs)

  @property
  def vocab_size(self) -> int | None:
    if self.text_model is None:
      return None
    model, options = self._towers()["txt"]
    return getattr(model(**options, parent=None), "vocab_size", None)

  def _towers(self) -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """The classes of the towers, and their options."""
    out_dims = self.out_dim
    if isinstance(out_dims, int):
      out_dims = (out_dims, out_dims)
    out_dims = tuple(out_dims)
    if len(out_dims) != 2:
      raise ConfigError(
        f"config.model.out_dim: expected one number or two, got {out_dims!r}."
      )
    towers = {"img": _tower("image", self.image_model, self.image, out_dims[0])}
    if self.text_model is not None:
      towers["txt"] = _tower("text", self.text_model, self.text, out_dims[1])
    return towers

  def image_tower(self) -> Any:
    cls, given = self._towers()["img"]
    return cls(**given, parent=None)

  def text_tower(self) -> Any:
    cls, given = self._towers()["txt"]
    return cls(**given, parent=None)


def _tower(
  kind: str, name: str, options: Mapping[str, Any] | None, out_dim: int | None
) -> tuple[type[nn.Module], dict[str, Any]]:
  key = f"config.model.{kind}"
  module = find_module("models", name, f"{key}_model")
  options = {"num_classes": out_dim, **(options or {})}
  fields = {field.name for field in dataclasses.fields(module.Model)}
  if "head_zeroinit" in fields:
    # An embedding of zeros has no direction.
    options.setdefault("head_zeroinit", False)
  check_kwargs(module.Model, options, key)
  with model_options.naming(key):
    module.Model(**options, parent=None)
  return module.Model, options


def from_published(
  flat: Mapping[str, np.ndarray],
  like: Mapping[str, jax.ShapeDtypeStruct],
  *,
  posemb_align: str = "centers",
) -> dict[str, np.ndarray]:
  flat = conversions.normalise(flat)
  converted = two_tower_families.load(flat, like, _DIMS)
  if converted is not None:
    return converted
  result: dict[str, np.ndarray] = {}
  for name, value in flat.items():
    if not name.startswith(("img/", "txt/")):
      # The temperature and bias of some releases are plain scalars.
      fits = name in like and value.size == math.prod(like[name].shape)
      result[name] = value.reshape(like[name].shape) if fits else value
  image = vit.from_published(
    conversions.below("img/", flat),
    conversions.below("img/", like),
    posemb_align=posemb_align,
  )
  text = text_transformer.from_published(
    conversions.below("txt/", flat), conversions.below("txt/", like)
  )
  result.update({f"img/{name}": value for name, value in image.items()})
  result.update({f"txt/{name}": value for name, value in text.items()})
  return result


def param_dims(model: Model) -> dims.Table:
  module_names = {"img": model.image_model, "txt": model.text_model or ""}
  table: dict[str, str] = {}
  for tower, (cls, options) in model._towers().items():
    module = find_module("models", module_names[tower], _KEYS[tower])
    if hasattr(module, "param_dims"):
      tower_dims = module.param_dims(cls(**options, parent=None))
      table |= dims.under(f"{tower}/", tower_dims)
  return table


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """The fields in a canonical form: equal for models that compute the same."""
  out_dim = values.get("out_dim")
  pair = (out_dim,) * 2 if isinstance(out_dim, int) else tuple(out_dim or ())
  result = {
    **values,
    "out_dim": pair,
    # The initial value says nothing of a trained model.
    "bias_init": None if values.get("bias_init") is None else -10.0,
  }
  towers = ("image", vit.Model), ("text", text_transformer.Model)
  for name, cls in towers:
    options = values.get(name) or {}
    tower = cls(**options, parent=None)
    fields = {
      field: getattr(tower, field) for field in cls.__dataclass_fields__
    }
    result[name] = {
      field: value
      for field, value in vit_families.canonical(fields).items()
      if field not in layouts.NOT_COMPUTED
    }
  return result


_PUBLISHED = layouts.Layouts(two_tower_families.FAMILIES, _canonical)
to_published = functools.partial(_PUBLISHED.export, _DIMS)


def published_fields(
  path: str, allow_unread: Collection[str] = ()
) -> layouts.Fields | None:
  _, values = families.read_json(path)
  if values and values["model_type"] in bert_families.FAMILIES:
    return None  # The weights of a text tower.
  return _PUBLISHED.fields(path, allow_unread)
