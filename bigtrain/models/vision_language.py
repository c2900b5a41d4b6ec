"""A decoder that reads pictures: PaliGemma, Gemma 3, LLaVA, Idefics 3, SmolVLM.

An image tower makes features of patches, a projector makes embeddings of them,
and these stand in the decoder in place of image tokens: the first image token
of a text gets the first embedding of its first picture, and so on. Options of
the tower are in models/vit.py, options of the decoder in models/decoder.py.
Parameters are named img/..., projector/... and llm/...

Axes: B batch, N pictures of an example, P patches, T image tokens of a picture,
L length, D width of the decoder.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import dims
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
)
from bigtrain.config.modules import find_module
from bigtrain.models import decoder, vit
from bigtrain.models.layers import kv_cache, mlp, options, rms_norm
from bigtrain.models.published import (
  decoder_families,
  vision_language_families,
  vit_families,
)

# Which tokens see later ones: none; the tokens of a prompt, as in PaliGemma; or
# the tokens of the same picture, as in Gemma 3.
MASKS = ("causal", "prefix", "image")
ACTIVATIONS = ("gelu", "gelu_erf", "gelu_quick", "relu")

# Fields that both parts get unless their own options have them.
_SHARED = ("attention", "dtype", "remat_policy", "scan")
# {part of the parameters: (its module, the method that makes its model)}, for
# config.model_init.parts.
PARTS = {"img": (vit, "image_tower"), "llm": (decoder, "text_decoder")}


class ProjectorOptions(NamedTuple):
  """config.model.projector. Without options, it is one linear layer."""

  # Side of the squares of patches that are averaged, as in Gemma 3.
  pool: int = 1
  # Side of the squares of patches whose features are joined, as in Idefics 3.
  merge: int = 1
  norm_eps: float | None = None  # Of an RMS norm, with Gemma's offset.
  # Activation between two linear layers, as in LLaVA; None for one layer.
  mlp: str | None = None
  use_bias: bool = True


class Model(nn.Module):
  """Tower, projector and decoder."""

  head_name: ClassVar[str] = "llm/head"  # Its parameters, for adapters.

  image: Mapping[str, Any] | None = None  # Options of the tower's Model.
  text: Mapping[str, Any] | None = None  # Options of the decoder's Model.
  image_model: str = "vit"  # Module in bigtrain.models, or a dotted path.
  text_model: str = "decoder"  # The same.
  projector: Any = None  # Options of ProjectorOptions.
  image_token: int = options.DERIVED  # Id of the tokens that pictures replace.
  mask: str = "causal"  # A name in MASKS.
  class_token: bool = False  # Whether the tower's class token is used as well.
  # Height and width of pictures in pixels; only for an initialization by texts.
  image_size: Any = None
  # Published layout of an export, where several compute the same.
  published_as: str | None = None
  # These four are of both parts; None for their own defaults.
  attention: str | None = None
  dtype: str | None = None  # Of the computation.
  remat_policy: str | None = None  # What is kept for the backward pass.
  scan: bool | None = None  # Whether blocks are a loop.

  def __post_init__(self) -> None:
    projector = options.read_tuple(
      ProjectorOptions,
      self.projector or {},
      "config.model.projector",
      pool=dict(least=1, whole=True),
      merge=dict(least=1, whole=True),
      norm_eps=dict(above=0),
    )
    options.set_fields(self, {"projector": projector})
    key = "config.model.image_token"
    check_number(key, self.image_token, least=0, whole=True)
    check_choice("config.model.mask", self.mask, MASKS)
    self._check_projector()
    with options.naming("config.model.image"):
      tower = self.image_tower()
    if self.class_token and getattr(tower, "feature_layer", None) is None:
      raise ConfigError(
        "config.model.class_token: expected image=dict(feature_layer=...), of "
        "a tower with a class token."
      )
    with options.naming("config.model.text"):
      dtype = self.text_decoder().dtype
    options.set_fields(self, {"dtype": dtype})
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    image: jax.Array | None = None,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    real: jax.Array | None = None,
    prefix: jax.Array | None = None,
    cache: kv_cache.Caches | None = None,
    start: jax.Array | int = 0,
    head: bool = True,
    train: bool = False,
  ) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Predicts the next token at each position, as models.decoder does.

    Args:
      tokens: int (B, L), with T image tokens for each picture.
      image: float (B, height, width, 3), or (B, N, height, width, 3); examples
        with fewer pictures have any others after their own. With B / K pictures
        or sets of them, K texts in a row have the same ones. None for texts,
        and for tokens after a prompt whose keys are in the cache.
      prefix: int (B,), number of leading tokens that see each other, with
        mask="prefix"; bool (B, L) for packed texts.
    """
    if prefix is not None and self.mask != "prefix":
      raise ConfigError(
        f"config.model.mask={self.mask!r}: expected 'prefix' for data with the "
        "feature 'prefix'."
      )
    is_image_BL = tokens == self.image_token
    inserted = None
    if image is not None or self.is_initializing():
      image = self._example_image(tokens) if image is None else image
      embedded_BMD = self._embed(image, train)
      if len(embedded_BMD) < len(tokens):
        # Several answers to a prompt. The tower reads its pictures once.
        answers = len(tokens) // len(embedded_BMD)
        embedded_BMD = jnp.repeat(embedded_BMD, answers, axis=0)
      inserted = _in_text(embedded_BMD, is_image_BL), is_image_BL
    groups = None
    if self.mask == "image" and (tokens.shape[1] > 1 or cache is None):
      groups = (_numbered(is_image_BL),) * 2
    elif prefix is not None:
      groups = _in_prefix(prefix, tokens.shape[1], cache, start)
    given = dict(segments=segments, positions=positions, real=real)
    return self._decoder_in_call()(
      tokens,
      inserted=inserted,
      groups=groups,
      window_in_groups=self.mask == "image",
      **{name: x for name, x in given.items() if x is not None},
      cache=cache,
      start=start,
      head=head,
      train=train,
    )

  def _embed(self, image: jax.Array, train: bool) -> jax.Array:
    """Embeddings (B, N T, D) of pictures."""
    if image.ndim == 4:
      image = image[:, None]
    if image.ndim != 5:
      raise ConfigError(
        "config.input: 'image': expected [B, height, width, 3] or [B, pictures,"
        f" height, width, 3], got {list(image.shape)}."
      )
    B, N = image.shape[:2]
    cls, given = self._tower_class()
    with options.naming("config.model.image"):
      _, out = cls(**given, name="img")(
        image.reshape(B * N, *image.shape[2:]), train=train
      )
    features = out["encoded"]
    if self.class_token:
      features = jnp.concatenate([out["prefix"][:, :1], features], axis=1)
    width = self.text_decoder().width
    dtype = str(self.dtype)
    projector = Projector(self.projector, width, dtype, name="projector")
    embedded = projector(features, image.shape[2:4])
    return embedded.reshape(B, -1, width)

  def _example_image(self, tokens: jax.Array) -> jax.Array:
    """Pictures for the initialization by a batch without any."""
    given = self.image_tower()
    side = self.projector.pool * self.projector.merge
    grid = getattr(given, "posemb_grid", None) or (side, side)
    sides = [n * pixels for n, pixels in zip(grid, given.patch_size)]
    if self.image_size is not None:
      size = self.image_size
      sides = [size, size] if isinstance(size, int) else [*size]
    return jnp.zeros((tokens.shape[0], *sides, 3))

  def _tower_class(self) -> tuple[type[nn.Module], dict[str, Any]]:
    return self._part("image", self.image_model, self.image)

  def image_tower(self) -> Any:
    cls, given = self._tower_class()
    return cls(**given, parent=None)

  def text_decoder(self) -> Any:
    """The decoder as a model of its own; its parameters are below llm/."""
    cls, given = self._part("text", self.text_model, self.text)
    return cls(**given, parent=None)

  def _decoder_in_call(self) -> nn.Module:
    cls, given = self._part("text", self.text_model, self.text)
    return cls(**given, name="llm")

  @nn.nowrap
  def _part(
    self, field: str, name: str, given: Mapping[str, Any] | None
  ) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of a part, and its options."""
    key = f"config.model.{field}"
    cls = find_module("models", name, f"{key}_model").Model
    shared = {name: getattr(self, name) for name in _SHARED}
    fields = cls.__dataclass_fields__
    result = {
      name: x for name, x in shared.items() if x is not None and name in fields
    }
    result |= given or {}
    check_kwargs(cls, result, key)
    return cls, result

  def _check_projector(self) -> None:
    projector = self.projector
    if projector.mlp is not None:
      check_choice("config.model.projector.mlp", projector.mlp, ACTIVATIONS)
    if self.class_token and (projector.pool > 1 or projector.merge > 1):
      raise ConfigError(
        "config.model.class_token: expected False with projector.pool or "
        "merge, which join neighbouring patches."
      )

  def tokens_per_image(self, height: int, width: int) -> int:
    """Number T of image tokens of a picture of this size in pixels."""
    p, q = self.image_tower().patch_size
    side = self.projector.pool * self.projector.merge
    return (height // p // side) * (width // q // side) + self.class_token

  def check_data(
    self, described: Mapping[str, Any], spec: Mapping[str, Any]
  ) -> None:
    """Refuses data whose image tokens are not those of this model.

    Args:
      described: what the data say about themselves, see inputs/description.py.
      spec: {feature: ShapeDtypeStruct of a batch}.
    """
    pictures = described.get("prompts", {}).get("pictures")
    if not pictures or "image" not in spec:
      return
    if pictures["token"] != self.image_token:
      raise ConfigError(
        f"config.model.image_token={self.image_token}: the image tokens of "
        f"config.input have the id {pictures['token']}."
      )
    height, width = spec["image"].shape[-3:-1]
    expected = self.tokens_per_image(height, width)
    if pictures["tokens"] != expected:
      raise ConfigError(
        f"config.input: pictures.tokens={pictures['tokens']}: the model makes "
        f"{expected} image tokens of a picture of {height} x {width} pixels."
      )

  # What tasks ask of a decoder.

  @property
  def vocab_size(self) -> int:
    return self.text_decoder().vocab_size

  @property
  def num_ids(self) -> int:
    """Number of ids that tokens may have: the decoder's and the image token."""
    return max(self.vocab_size, self.image_token + 1)

  @property
  def max_len(self) -> int | None:
    return self.text_decoder().max_len

  @property
  def num_classes(self) -> int | None:
    return self.text_decoder().num_classes

  @property
  def logits_softcap(self) -> float | None:
    return self.text_decoder().logits_softcap

  @property
  def logits_multiplier(self) -> float:
    return self.text_decoder().logits_multiplier

  def head_kernel(self, params: Mapping[str, Any]) -> jax.Array:
    return self.text_decoder().head_kernel(params["llm"])

  def head_bias(self, params: Mapping[str, Any]) -> jax.Array | None:
    return self.text_decoder().head_bias(params["llm"])

  def known_targets(self, targets_BL: jax.Array) -> jax.Array:
    """Targets, where an image token that the decoder does not know is 0."""
    if self.image_token < self.vocab_size:
      return targets_BL
    return jnp.where(targets_BL == self.image_token, 0, targets_BL)

  def end_of_step(
    self, mutable: Mapping[str, Any], step_sums: Mapping[str, Any]
  ) -> dict[str, Any]:
    of_decoder = {name: x["llm"] for name, x in mutable.items() if "llm" in x}
    if not of_decoder:
      return dict(mutable)
    new = self.text_decoder().end_of_step(of_decoder, step_sums.get("llm", {}))
    return {
      name: {**x, "llm": new[name]} if name in new else x
      for name, x in mutable.items()
    }

  def init_cache(self, batch_size: int, max_len: int) -> kv_cache.Caches:
    # A prompt's image tokens have no embeddings when they are read again.
    # The last token of a prefix sees all of it, whatever the windows, and it is
    # read again to predict the first new token.
    return self.text_decoder().init_cache(
      batch_size, max_len, write_once=True, whole=self.mask == "prefix"
    )


class Projector(nn.Module):
  """Features of patches, as embeddings of the decoder."""

  options: ProjectorOptions
  width: int  # D.
  dtype: str

  @nn.compact
  def __call__(self, x: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Returns (pictures, T, D).

    Args:
      x: (pictures, P, width of the tower), row by row.
      size: height and width of the pictures in pixels.
    """
    given = self.options
    if given.pool > 1 or given.merge > 1:
      x = _joined(x, size, given.pool, given.merge)
    if given.norm_eps is not None:
      x = rms_norm.RMSNorm(
        x.shape[-1:], given.norm_eps, offset=1.0, dtype=self.dtype, name="norm"
      )(x)
    dense = functools.partial(
      nn.Dense, self.width, use_bias=given.use_bias, dtype=self.dtype
    )
    x = dense(name="linear_0")(x)
    if given.mlp is not None:
      x = mlp.KINDS[given.mlp].activation(x)
      x = dense(name="linear_1")(x)
    return x


def _joined(
  x: jax.Array, size: tuple[int, ...], pool: int, merge: int
) -> jax.Array:
  """Averages `pool` x `pool` patches, then joins the features of `merge`^2."""
  n, P = x.shape[:2]
  # Patches are square in pixels, so the grid has the proportions of a picture.
  rows = round((P * size[0] / size[1]) ** 0.5)
  columns = P // rows
  for name, side in (("pool", pool), ("merge", merge)):
    if rows * columns != P or rows % side or columns % side:
      raise ConfigError(
        f"config.model.projector.{name}={side}: expected a divisor of the rows "
        f"and columns of patches, got {rows} x {columns}."
      )
    rows, columns = rows // side, columns // side
    x = x.reshape(n, rows, side, columns, side, -1)
    if name == "pool":
      x = jnp.mean(x, axis=(2, 4))
    else:
      x = x.transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, rows * columns, -1)
    P = rows * columns
  return x


def _numbered(is_image_BL: jax.Array) -> jax.Array:
  """Number of the picture of each image token, 0 for other tokens."""
  before_BL = jnp.pad(is_image_BL, ((0, 0), (1, 0)))[:, :-1]
  number_BL = jnp.cumsum(is_image_BL & ~before_BL, axis=1)
  return jnp.where(is_image_BL, number_BL, 0)


def _in_prefix(
  prefix: jax.Array, L: int, cache: kv_cache.Caches | None, start: Any
) -> tuple[jax.Array, jax.Array]:
  """Int (B, L) and (B, S), 1 for tokens and for positions in the prefix."""
  if prefix.ndim == 2:
    return ((prefix != 0).astype(jnp.int32),) * 2
  is_first = isinstance(start, int) and start == 0
  S = L if cache is None or is_first else cache.length
  in_prefix = [
    (number < prefix[:, None]).astype(jnp.int32)
    for number in (start + jnp.arange(L), jnp.arange(S))
  ]
  return in_prefix[0], in_prefix[1]


def _in_text(embedded_BMD: jax.Array, is_image_BL: jax.Array) -> jax.Array:
  """Embeddings (B, L, D): the i-th image token of a text has the i-th one."""
  number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
  index_BL = jnp.clip(number_BL, 0, embedded_BMD.shape[1] - 1)
  return jnp.take_along_axis(embedded_BMD, index_BL[..., None], axis=1)


def _parts(model: Model) -> dict[str, vision_language_families.Part]:
  parts = {
    "img/": (model.image_model, model.image_tower()),
    "llm/": (model.text_model, model.text_decoder()),
  }
  result = {}
  for prefix, (name, part) in parts.items():
    module = find_module("models", name, "config.model")
    table = dims.of_model(module, part)
    result[prefix] = vision_language_families.Part(part, table)
  return result


def param_dims(model: Model) -> dims.Table:
  table: dict[str, str] = {}
  for prefix, part in _parts(model).items():
    table |= dims.under(prefix, part.dims)
  return {**table, **vision_language_families.PROJECTOR_DIMS}


# The tables of published models, whose tower is a ViT.
_PUBLISHED_DIMS = {"img/": vit.DIMS, "llm/": decoder.DIMS}


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  return vision_language_families.load(flat, like, _PUBLISHED_DIMS)


# Fields of the parts that do not change what they compute.
_OF_TRAINING = (
  *("parent", "name", "variant", "dropout", "drop_path", "scan", "attention"),
  *("remat_policy", "dtype", "head_zeroinit", "head_bias_init", "num_classes"),
  *("max_len", "init_std", "neftune", "rep_size", "head_bias"),
)


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of which two models with the same function have the same values."""
  result = dict(values)
  parts: dict[str, tuple[Any, Any]] = {
    "image": (vit.Model, vit_families.canonical),
    "text": (decoder.Model, decoder_families.canonical),
  }
  for name, (cls, canonical) in parts.items():
    part = cls(**(values.get(name) or {}), parent=None)
    fields = {field: getattr(part, field) for field in cls.__dataclass_fields__}
    result[name] = {
      field: x
      for field, x in canonical(fields).items()
      if field not in _OF_TRAINING
    }
  projector = values.get("projector") or {}
  if not isinstance(projector, ProjectorOptions):
    projector = ProjectorOptions(**projector)
  result["projector"] = projector._asdict()
  return result


_PUBLISHED = vision_language_families.make_layouts(_canonical)
published_fields = _PUBLISHED.fields


def to_published(
  model: Model,
  shapes: Mapping[str, Any],
  layout: str | None = None,
  origin: str | None = None,
) -> tuple[dict[str, Any], list[Any]]:
  del origin  # The model itself has it, as `published_as`.
  return vision_language_families.export(
    _PUBLISHED, model, _parts(model), shapes, layout
  )
