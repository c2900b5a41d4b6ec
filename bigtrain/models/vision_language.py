"""A decoder that reads pictures: PaliGemma, Gemma 3, LLaVA, Idefics 3, Qwen-VL.

An image tower computes features of patches, and a projector
(layers/projector.py) turns them into embeddings, which the decoder reads in
place of image tokens: the first image token of a text gets the first embedding
of its first picture, and so on (layers/image_tokens.py). Options of the tower
are in models/vit.py, or in models/native_vit.py for pictures of any shape, and
options of the decoder in models/decoder.py. Parameters are named img/...,
projector/..., llm/... and, for features of the tower's inner layers,
deepstack/...

This module begins with the model: its fields, the forward pass, its parts and
their checks, and the methods that tasks call on any decoder. It ends with the
names of its parameters, and with published files.

Axes: B batch, N pictures of an example, P patches, T image tokens of a picture,
L length, D width of the decoder.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

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
from bigtrain.models import decoder, native_vit, vit
from bigtrain.models.layers import (
  image_tokens,
  kv_cache,
  masks,
  options,
  projector,
  tiled_pictures,
)
from bigtrain.models.published import (
  decoder_families,
  layouts,
  vision_language_families,
  vit_families,
)
from bigtrain.models.published.vits import native_towers

# Which tokens see later ones: none; the tokens of a prompt, as in PaliGemma;
# the tokens of the same picture, as in Gemma 3; or the same, but only in layers
# with a window, as in Gemma 4.
MASKS = ("causal", "prefix", "image", "windowed_image")

# Fields that both parts get unless their own options have them.
_SHARED = ("attention", "dtype", "remat_policy", "scan")
# {part of the parameters: (its module, the method that makes its model)}, for
# config.model_init.parts.
PARTS = {"img": (vit, "image_tower"), "llm": (decoder, "text_decoder")}


class Model(nn.Module):
  """Tower, projector and decoder."""

  head_name: ClassVar[str] = "llm/head"  # Its parameters, for adapters.
  # The part whose logits of attention are collected.
  attention_logits_of: ClassVar[str] = "llm"

  image: Mapping[str, Any] | None = None  # Options of the tower's Model.
  text: Mapping[str, Any] | None = None  # Options of the decoder's Model.
  image_model: str = "vit"  # Module in bigtrain.models, or a dotted path.
  text_model: str = "decoder"  # The same.
  projector: Any = None  # See projector.Options.
  # See tiled_pictures.Options: pictures are cut into tiles whose tokens stand
  # row by row, as in LLaVA-NeXT and LLaVA-OneVision.
  tiles: Any = None
  image_token: int = options.DERIVED  # Id of the tokens that pictures replace.
  mask: str = "causal"  # A name in MASKS.
  class_token: bool = False  # Whether the tower's class token is used as well.
  # Factor of the pictures' embeddings, for decoders that scale all inputs.
  embed_multiplier: float = 1.0
  # Height and width of pictures in pixels; only for an initialization by texts.
  image_size: Any = None
  # Published layout of an export, where several compute the same.
  published_as: str | None = None
  # Whether log entries have the largest score of each layer of the decoder.
  attention_logits: bool = False
  # These four are of both parts; None for their own defaults.
  attention: str | None = None
  dtype: str | None = None  # Of the computation.
  remat_policy: str | None = None  # What is kept for the backward pass.
  scan: bool | None = None  # Whether blocks are a loop.

  def __post_init__(self) -> None:
    options.set_fields(
      self,
      {
        "projector": projector.read(self.projector, "config.model.projector"),
        "tiles": tiled_pictures.read(self.tiles, "config.model.tiles"),
      },
    )
    key = "config.model.image_token"
    check_number(key, self.image_token, least=0, whole=True)
    check_choice("config.model.mask", self.mask, MASKS)
    check_number("config.model.embed_multiplier", self.embed_multiplier)
    self._check_parts()
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
    shapes: jax.Array | None = None,
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
      image: float (B, height, width, 3), or (B, N, height, width, 3) for
        several pictures; the pictures of examples that have fewer come first.
        With `tiles`, the N views of an example. With `shapes` but no `tiles`,
        ready patches (B, P, values) or (B, N, P, values), see
        models.native_vit. If there are only B / K examples of pictures, K texts
        in a row have the same ones. None for texts without pictures, and for
        tokens after a prompt whose keys are in the cache.
      shapes: int (B, 2) or (B, N, 2), rows and columns of each picture's
        patches, zeros for no picture; a third number in front of them, of
        frames, is ignored. With `tiles`, the layout of the views, int
        (B, N, 4), see layers/tiled_pictures.py; by default a guess from the
        number of image tokens.
      prefix: int (B,), number of leading tokens that see each other, with
        mask="prefix"; bool (B, L) for packed texts.
    """
    if prefix is not None and self.mask != "prefix":
      raise ConfigError(
        f"config.model.mask={self.mask!r}: expected 'prefix' for data with the "
        "feature 'prefix'."
      )
    is_image_BL = tokens == self.image_token
    optional: dict[str, Any] = dict(
      segments=segments, positions=positions, real=real
    )
    inserted = None
    if image is not None or self.is_initializing():
      image = self._example_image(tokens) if image is None else image
      pictures = self._pictures(image, shapes, train)
      if len(pictures.x_BND) < len(tokens):
        # Several answers to a prompt. The tower reads its pictures once.
        pictures = pictures.repeated(len(tokens) // len(pictures.x_BND))
      (x_BLD, at_BL), added_BnLD = pictures.in_text(is_image_BL)
      if self.embed_multiplier != 1:
        x_BLD = x_BLD * self.embed_multiplier
      inserted = x_BLD, at_BL
      optional["added"] = added_BnLD
      if self._has_axes():
        optional["positions"], cache = image_tokens.with_axes(
          pictures.grids_BN2, is_image_BL, positions, segments, cache
        )
    elif cache is not None and cache.shift_B is not None:
      # Behind pictures, whose rows and columns are fewer than their tokens.
      optional["positions"] = (
        start + jnp.arange(tokens.shape[1]) + cache.shift_B[:, None]
      )

    # A user's own decoder need not have those arguments that are None.
    return self._decoder_in_call()(
      tokens,
      inserted=inserted,
      groups=self._groups(is_image_BL, prefix, cache, start),
      **{name: x for name, x in optional.items() if x is not None},
      cache=cache,
      start=start,
      head=head,
      train=train,
    )

  @nn.nowrap
  def _groups(
    self,
    is_image_BL: jax.Array,
    prefix: jax.Array | None,
    cache: kv_cache.Caches | None,
    start: jax.Array | int,
  ) -> masks.Groups | None:
    """The tokens that see each other, as `mask` says; None for none."""
    L = is_image_BL.shape[1]
    is_step = L == 1 and cache is not None  # Of generation.
    if self.mask in ("image", "windowed_image") and not is_step:
      return image_tokens.groups_of_pictures(
        is_image_BL, need_window=self.mask == "windowed_image"
      )
    if prefix is not None:
      return image_tokens.group_of_prefix(prefix, L, cache, start)
    return None

  def _pictures(
    self, image: jax.Array, shapes: jax.Array | None, train: bool
  ) -> image_tokens.Pictures:
    """Applies the tower and the projectors."""
    layout_BN4 = None
    if self.tiles is not None:
      layout_BN4, shapes = shapes, None
    image, shapes_BN2 = _by_picture(image, shapes)
    if shapes_BN2 is None and not self._is_native():
      image = self._in_whole_patches(image)
    B, N = image.shape[:2]

    # The tower has one axis for the pictures of all examples.
    cls, tower_fields = self._tower_class()
    shape_args: dict[str, Any] = {}
    if shapes_BN2 is not None:
      shape_args["shapes"] = shapes_BN2.reshape(B * N, 2)
    with options.naming("config.model.image"):
      _, out = cls(**tower_fields, name="img")(
        image.reshape(B * N, *image.shape[2:]), **shape_args, train=train
      )
    features = out["encoded"]
    if self.class_token:
      features = jnp.concatenate([out["prefix"][:, :1], features], axis=1)

    width, dtype = self.text_decoder().width, str(self.dtype)
    # Features of towers for any shape are in order, square by square.
    size = None if self._is_native() else image.shape[2:4]
    project = projector.Projector(
      self.projector, width, dtype, name="projector"
    )
    x_BND = project(features, size).reshape(B, -1, width)
    added_BnMD = None
    if out.get("taps") is not None:  # Features of inner layers.
      project_taps = projector.Projectors(
        self.projector._replace(norm_patches=False),
        width,
        dtype,
        name="deepstack",
      )
      added = project_taps(out["taps"])
      # From one picture per row to all pictures of an example in a row.
      added = added.reshape(B, N, *added.shape[1:]).swapaxes(1, 2)
      added_BnMD = added.reshape(B, added.shape[1], -1, width)

    views = None
    if shapes_BN2 is not None:
      grids_BN2 = shapes_BN2 // self.projector.side
    else:
      grid = self._grid(*image.shape[2:4])
      grids_BN2 = jnp.asarray([[grid] * N])
      if self.tiles is not None:
        newline_D = tiled_pictures.Newline(width, name="tiles")()
        views = tiled_pictures.Views(x_BND, newline_D, grid, self.tiles)
    return image_tokens.Pictures(
      x_BND, grids_BN2, shapes_BN2 is None, added_BnMD, views, layout_BN4
    )

  @nn.nowrap
  def _grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of image tokens of a picture of this size in pixels."""
    rows, columns = _two(self.image_tower().patch_size)
    side = self.projector.side
    return height // rows // side, width // columns // side

  @nn.nowrap
  def _in_whole_patches(self, image: jax.Array) -> jax.Array:
    """Leaves out the last rows and columns of pixels that fill no patch.

    Of 384 x 384 pixels in patches of 14 x 14, for one, these are six.
    """
    height, width = image.shape[2:4]
    rows, columns = _two(self.image_tower().patch_size)
    return image[:, :, : height // rows * rows, : width // columns * columns]

  @nn.nowrap
  def _is_native(self) -> bool:
    return hasattr(self.image_tower(), "merge")

  @nn.nowrap
  def _has_axes(self) -> bool:
    return getattr(self.text_decoder(), "rope_axes", None) is not None

  def _example_image(self, tokens: jax.Array) -> jax.Array:
    """Pictures for the initialization by a batch without any."""
    given = self.image_tower()
    grid = (self.projector.side, self.projector.side)
    if not self._is_native():
      grid = getattr(given, "posemb_grid", None) or grid
    sides = [n * pixels for n, pixels in zip(grid, _two(given.patch_size))]
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
    """The decoder as a separate model; its parameters are below llm/."""
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

  def _check_parts(self) -> None:
    """Checks that tower, projector and decoder fit each other."""
    given = self.projector
    with options.naming("config.model.image"):
      # Towers for pictures of any shape have the patches of a square in a row.
      merge = getattr(self.image_tower(), "merge", None)
    sides = given.merge, given.pool
    if merge is not None and sides not in ((merge, 1), (1, merge)):
      raise ConfigError(
        f"config.model.projector.merge={given.merge}: expected {merge}, as "
        "config.model.image.merge, and pool=1; or the other way round."
      )
    if self.tiles is not None and (self.class_token or merge is not None):
      raise ConfigError(
        "config.model.tiles: expected a tower for pictures of one size, and no "
        "class_token."
      )
    if self.tiles is not None and self._has_axes():
      raise ConfigError(
        "config.model.tiles: expected a decoder without rope_axes."
      )
    if self.class_token and given.side > 1:
      raise ConfigError(
        "config.model.class_token: expected False with projector.pool or "
        "merge, which join neighbouring patches."
      )

  def tokens_per_image(self, height: int, width: int) -> int:
    """Number T of image tokens of a picture of this size in pixels."""
    rows, columns = self._grid(height, width)
    has_newline = self.tiles is not None
    return rows * columns + self.class_token + has_newline

  def check_data(
    self, described: Mapping[str, Any], spec: Mapping[str, Any]
  ) -> None:
    """Refuses data whose image tokens do not fit this model.

    Args:
      described: what the data say about themselves, see inputs/description.py.
      spec: {feature: ShapeDtypeStruct of a batch}.
    """
    pictures = described.get("prompts", {}).get("pictures")
    if not pictures or "image" not in spec:
      return
    is_fixed = "shapes" not in spec and pictures.get("layout") is None
    if pictures["token"] != self.image_token:
      raise ConfigError(
        f"config.model.image_token={self.image_token}: the image tokens of "
        f"config.input have the id {pictures['token']}."
      )
    if not is_fixed:  # Pictures of other sizes have other numbers of tokens.
      return
    height, width = spec["image"].shape[-3:-1]
    expected = self.tokens_per_image(height, width)
    if pictures["tokens"] != expected:
      raise ConfigError(
        f"config.input: pictures.tokens={pictures['tokens']}: the model makes "
        f"{expected} image tokens of a picture of {height} x {width} pixels."
      )

  # Methods that tasks call on a decoder.

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


def _by_picture(
  image: jax.Array, shapes: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  """Pictures (B, N, ...), and their shapes (B, N, 2) if these differ."""
  if shapes is None:
    if image.ndim == 4:
      image = image[:, None]
    if image.ndim != 5:
      raise ConfigError(
        "config.input: 'image': expected [B, height, width, 3] or [B, pictures,"
        f" height, width, 3], got {list(image.shape)}; ready patches need "
        "'shapes'."
      )
    return image, None
  if image.ndim == 3 and shapes.ndim == 2:
    image, shapes = image[:, None], shapes[:, None]
  if image.ndim != 4 or shapes.ndim != 3 or shapes.shape[-1] not in (2, 3):
    raise ConfigError(
      "config.input: 'image': expected [B, pictures, patches, values] with "
      f"'shapes' [B, pictures, 2], got {list(image.shape)} and "
      f"{list(shapes.shape)}."
    )
  return image, shapes[..., -2:]


def _two(size: Any) -> tuple[int, int]:
  return (size, size) if isinstance(size, int) else tuple(size)


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


# The tables of published models. Those of the two kinds of towers agree on the
# names that both have.
_PUBLISHED_DIMS = {
  "img/": {**native_vit.DIMS, **vit.DIMS},
  "llm/": decoder.DIMS,
}
_TOWERS: Mapping[str, Any] = {
  "vit": (vit.Model, vit_families.canonical),
  "native_vit": (native_vit.Model, native_towers.canonical),
}


def from_published(
  flat: Mapping[str, np.ndarray], like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
  return vision_language_families.load(flat, like, _PUBLISHED_DIMS)


# Fields of the parts that do not change what they compute.
_NOT_COMPUTED = (
  *layouts.NOT_COMPUTED,
  "max_len",
  "init_std",
  "neftune",
  "rep_size",
  "head_bias",
)


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of which two models with the same function have the same values."""
  result = dict(values)
  parts: dict[str, tuple[Any, Any]] = {
    "image": _TOWERS.get(values.get("image_model", "vit"), _TOWERS["vit"]),
    "text": (decoder.Model, decoder_families.canonical),
  }
  for name, (cls, canonical) in parts.items():
    part = cls(**(values.get(name) or {}), parent=None)
    fields = {field: getattr(part, field) for field in cls.__dataclass_fields__}
    result[name] = {
      field: x
      for field, x in canonical(fields).items()
      if field not in _NOT_COMPUTED
    }
  given = projector.read(values.get("projector"), "config.model.projector")
  result["projector"] = given._asdict()
  tiles = tiled_pictures.read(values.get("tiles"), "config.model.tiles")
  result["tiles"] = tiles and tiles._asdict()
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
