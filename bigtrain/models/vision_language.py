"""A decoder that reads pictures: PaliGemma, Gemma 3, LLaVA, Idefics 3, Qwen-VL.

An image tower computes features of patches, and a projector turns them into
embeddings, which the decoder reads in place of image tokens: the first image
token of a text gets the first embedding of its first picture, and so on.
Options of the tower are in models/vit.py, or in models/native_vit.py for
pictures of any shape, options of the decoder in models/decoder.py. Parameters
are named img/..., projector/..., llm/... and, of features of inner layers,
deepstack/...

Axes: B batch, N pictures of an example, P patches, T image tokens of a picture,
L length, D width of the decoder.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
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
  kv_cache,
  masks,
  mlp,
  options,
  rms_norm,
  tiled_pictures,
)
from bigtrain.models.published import (
  decoder_families,
  vision_language_families,
  vit_families,
)
from bigtrain.models.published.vits import native_towers

# Which tokens see later ones: none; the tokens of a prompt, as in PaliGemma;
# the tokens of the same picture, as in Gemma 3; or the same, but only in layers
# with a window, as in Gemma 4.
MASKS = ("causal", "prefix", "image", "windowed_image")
ACTIVATIONS = ("gelu", "gelu_erf", "gelu_quick", "relu", "silu", "swiglu")
NORMS = ("offset_rmsnorm", "rmsnorm", "plain_rmsnorm", "layernorm")

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
  # Whether a linear layer brings these back to the width of one patch, as in
  # Mistral 3; its inputs are channel by channel.
  merge_layer: bool = False
  norm_eps: float | None = None  # Of a norm; None without one.
  # "rmsnorm", "layernorm", "offset_rmsnorm" with Gemma's offset, or
  # "plain_rmsnorm" without a scale.
  norm: str = "offset_rmsnorm"
  # Whether the norm is of each patch, before their features are joined.
  norm_patches: bool = False
  # Activation between two linear layers, as in LLaVA; None for one layer. With
  # "swiglu", the second half of the first layer's features gates the first.
  mlp: str | None = None
  hidden: int | None = None  # Width of the first layer; the decoder's if None.
  use_bias: bool = True


class Embedded(NamedTuple):
  """Pictures as embeddings of the decoder."""

  x_BND: jax.Array  # (B, N T, D).
  # Rows and columns of each picture's tokens, (B or 1, N, 2). The tokens of a
  # picture beyond them are padding.
  grids_BN2: jax.Array
  # Whether all pictures have the same grid, and none has padding.
  is_uniform: bool
  # What is added after the first n layers, (B, n, N T, D).
  added_BnMD: jax.Array | None
  # Of pictures with tiles, and the layout (B, N, 4) if the batch has one.
  views: tiled_pictures.Views | None = None
  layout_BN4: jax.Array | None = None

  def repeated(self, number: int) -> "Embedded":
    """Each example's pictures `number` times in a row."""
    repeat = functools.partial(jnp.repeat, repeats=number, axis=0)
    grids, added = self.grids_BN2, self.added_BnMD
    views, layout = self.views, self.layout_BN4
    return self._replace(
      x_BND=repeat(self.x_BND),
      grids_BN2=repeat(grids) if len(grids) > 1 else grids,
      added_BnMD=None if added is None else repeat(added),
      views=views and views._replace(x_BND=repeat(views.x_BND)),
      layout_BN4=None if layout is None else repeat(layout),
    )


class Model(nn.Module):
  """Tower, projector and decoder."""

  head_name: ClassVar[str] = "llm/head"  # Its parameters, for adapters.
  # The part whose logits of attention are collected.
  attention_logits_of: ClassVar[str] = "llm"

  image: Mapping[str, Any] | None = None  # Options of the tower's Model.
  text: Mapping[str, Any] | None = None  # Options of the decoder's Model.
  image_model: str = "vit"  # Module in bigtrain.models, or a dotted path.
  text_model: str = "decoder"  # The same.
  projector: Any = None  # Options of ProjectorOptions.
  # Options of tiled_pictures.Options, if pictures are cut into tiles whose
  # tokens stand row by row, as in LLaVA-NeXT and LLaVA-OneVision.
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
    projector = options.read_tuple(
      ProjectorOptions,
      self.projector or {},
      "config.model.projector",
      pool=dict(least=1, whole=True),
      merge=dict(least=1, whole=True),
      norm_eps=dict(above=0),
      hidden=dict(least=1, whole=True),
    )
    tiles = tiled_pictures.read(self.tiles, "config.model.tiles")
    options.set_fields(self, {"projector": projector, "tiles": tiles})
    key = "config.model.image_token"
    check_number(key, self.image_token, least=0, whole=True)
    check_choice("config.model.mask", self.mask, MASKS)
    check_number("config.model.embed_multiplier", self.embed_multiplier)
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
      image: float (B, height, width, 3), or (B, N, height, width, 3); examples
        with fewer pictures have any others after their own; with `tiles`, the
        views of each, of which `shapes` may be the layout, int (B, N, 4), see
        layers/tiled_pictures.py. With B / K pictures
        or sets of them, K texts in a row have the same ones. None for texts,
        and for tokens after a prompt whose keys are in the cache. With
        `shapes`, ready patches (B, P, values) or (B, N, P, values) of
        models.native_vit.
        patches, zeros for no picture; also with the number of frames in front.
      prefix: int (B,), number of leading tokens that see each other, with
        mask="prefix"; bool (B, L) for packed texts.
    """
    if prefix is not None and self.mask != "prefix":
      raise ConfigError(
        f"config.model.mask={self.mask!r}: expected 'prefix' for data with the "
        "feature 'prefix'."
      )
    is_image_BL = tokens == self.image_token
    inserted = added = None
    if image is not None or self.is_initializing():
      image = self._example_image(tokens) if image is None else image
      embedded = self._embed(image, shapes, train)
      if len(embedded.x_BND) < len(tokens):
        # Several answers to a prompt. The tower reads its pictures once.
        embedded = embedded.repeated(len(tokens) // len(embedded.x_BND))
      inserted, added = self._in_text(embedded, is_image_BL)
      if self.embed_multiplier != 1:
        inserted = inserted[0] * self.embed_multiplier, inserted[1]
      if self._has_axes():
        positions, cache = _with_axes(
          embedded.grids_BN2, is_image_BL, positions, segments, cache
        )
    elif cache is not None and cache.shift_B is not None:
      # Behind pictures, whose rows and columns are fewer than their tokens.
      positions = start + jnp.arange(tokens.shape[1]) + cache.shift_B[:, None]
    groups = None
    in_images = self.mask in ("image", "windowed_image")
    if in_images and (tokens.shape[1] > 1 or cache is None):
      number_BL = _numbered(is_image_BL)
      groups = masks.Groups(
        number_BL,
        number_BL,
        window_in_groups=True,
        need_window=self.mask == "windowed_image",
      )
    elif prefix is not None:
      groups = _in_prefix(prefix, tokens.shape[1], cache, start)
    given = dict(segments=segments, positions=positions, real=real)
    return self._decoder_in_call()(
      tokens,
      inserted=inserted,
      **({} if added is None else {"added": added}),
      groups=groups,
      **{name: x for name, x in given.items() if x is not None},
      cache=cache,
      start=start,
      head=head,
      train=train,
    )

  def _embed(
    self, image: jax.Array, shapes: jax.Array | None, train: bool
  ) -> Embedded:
    layout_BN4 = None
    if self.tiles is not None:
      layout_BN4, shapes = shapes, None
    image, shapes_BN2 = _by_picture(image, shapes)
    if shapes_BN2 is None and not self._is_native():
      image = self._in_whole_patches(image)
    B, N = image.shape[:2]
    cls, given = self._tower_class()
    options_of_shape: dict[str, Any] = {}
    if shapes_BN2 is not None:
      options_of_shape["shapes"] = shapes_BN2.reshape(B * N, 2)
    with options.naming("config.model.image"):
      _, out = cls(**given, name="img")(
        image.reshape(B * N, *image.shape[2:]), **options_of_shape, train=train
      )
    features = out["encoded"]
    if self.class_token:
      features = jnp.concatenate([out["prefix"][:, :1], features], axis=1)
    width = self.text_decoder().width
    dtype = str(self.dtype)
    # Features of towers for any shape are in order, square by square.
    size = None if self._is_native() else image.shape[2:4]
    projector = Projector(self.projector, width, dtype, name="projector")
    embedded = projector(features, size)
    added = None
    if out.get("taps") is not None:
      joined = self.projector._replace(norm_patches=False)
      added = Projectors(joined, width, dtype, name="deepstack")(out["taps"])
      added = added.reshape(B, N, *added.shape[1:]).swapaxes(1, 2)
      added = added.reshape(B, added.shape[1], -1, width)
    side = self.projector.pool * self.projector.merge
    if shapes_BN2 is not None:
      grids = shapes_BN2 // side
    else:
      sides = zip(image.shape[2:4], _two(self.image_tower().patch_size))
      grid = [n // p // side for n, p in sides]
      grids = jnp.asarray([[grid] * N])
    x_BND = embedded.reshape(B, -1, width)
    views = None
    if self.tiles is not None:
      newline_D = tiled_pictures.Newline(width, name="tiles")()
      views = tiled_pictures.Views(
        x_BND, newline_D, (grid[0], grid[1]), self.tiles
      )
    return Embedded(x_BND, grids, shapes_BN2 is None, added, views, layout_BN4)

  def _in_text(
    self, embedded: Embedded, is_image_BL: jax.Array
  ) -> tuple[Any, jax.Array | None]:
    """The arguments `inserted` and `added` of the decoder."""
    if embedded.views is not None:
      x_BLD = embedded.views.in_text(embedded.layout_BN4, is_image_BL)
      return (x_BLD, is_image_BL), None
    if embedded.is_uniform:
      number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
      index_BL = jnp.clip(number_BL, 0, embedded.x_BND.shape[1] - 1)
    else:
      place = _places(embedded.grids_BN2, is_image_BL)
      T = embedded.x_BND.shape[1] // embedded.grids_BN2.shape[1]
      index_BL = place.picture_BL * T + jnp.clip(place.token_BL, 0, T - 1)

    def pick(x: jax.Array) -> jax.Array:
      return jnp.take_along_axis(x, index_BL[..., None], axis=1)

    inserted = pick(embedded.x_BND), is_image_BL
    if embedded.added_BnMD is None:
      return inserted, None
    added_BnLD = jax.vmap(pick, in_axes=1, out_axes=1)(embedded.added_BnMD)
    added_BnLD = jnp.where(is_image_BL[:, None, :, None], added_BnLD, 0)
    return inserted, added_BnLD

  @nn.nowrap
  def _in_whole_patches(self, image: jax.Array) -> jax.Array:
    """Leaves out the last rows and columns of pixels that fill no patch.

    Of 384 x 384 pixels in patches of 14 x 14, for one, these are six.
    """
    height, width = (
      n // p * p
      for n, p in zip(image.shape[2:4], _two(self.image_tower().patch_size))
    )
    return image[:, :, :height, :width]

  @nn.nowrap
  def _is_native(self) -> bool:
    return hasattr(self.image_tower(), "merge")

  @nn.nowrap
  def _has_axes(self) -> bool:
    return getattr(self.text_decoder(), "rope_axes", None) is not None

  def _example_image(self, tokens: jax.Array) -> jax.Array:
    """Pictures for the initialization by a batch without any."""
    given = self.image_tower()
    side = self.projector.pool * self.projector.merge
    grid = (side, side)
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

  def _check_projector(self) -> None:
    projector = self.projector
    if projector.mlp is not None:
      check_choice("config.model.projector.mlp", projector.mlp, ACTIVATIONS)
    check_choice("config.model.projector.norm", projector.norm, NORMS)
    with options.naming("config.model.image"):
      merge = getattr(self.image_tower(), "merge", None)
    sides = projector.merge, projector.pool
    if merge is not None and sides not in ((merge, 1), (1, merge)):
      raise ConfigError(
        f"config.model.projector.merge={projector.merge}: expected {merge}, as "
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
    if self.class_token and (projector.pool > 1 or projector.merge > 1):
      raise ConfigError(
        "config.model.class_token: expected False with projector.pool or "
        "merge, which join neighbouring patches."
      )

  def tokens_per_image(self, height: int, width: int) -> int:
    """Number T of image tokens of a picture of this size in pixels."""
    p, q = _two(self.image_tower().patch_size)
    side = self.projector.pool * self.projector.merge
    number = (height // p // side) * (width // q // side) + self.class_token
    return number + (self.tiles is not None)

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


class Projector(nn.Module):
  """Features of patches, as embeddings of the decoder."""

  options: ProjectorOptions
  width: int  # D.
  dtype: str

  @nn.compact
  def __call__(
    self, x: jax.Array, size: tuple[int, ...] | None = None
  ) -> jax.Array:
    """Returns (pictures, T, D).

    Args:
      x: (pictures, P, width of the tower), row by row.
      size: height and width of the pictures in pixels; None if the patches of
        each square that is joined or averaged follow each other.
    """
    given = self.options
    if given.norm_patches:
      x = self._normed(x)
    if size is None and given.pool > 1:
      squares = x.reshape(len(x), -1, given.pool**2, x.shape[-1])
      x = jnp.mean(squares, axis=2)
    elif size is None:
      x = x.reshape(len(x), x.shape[1] // given.merge**2, -1)
    elif given.pool > 1 or given.merge > 1:
      x = _joined(x, size, given.pool, given.merge)
    if given.merge_layer:
      width = x.shape[-1] // given.merge**2
      x = x.reshape(*x.shape[:-1], given.merge**2, width).swapaxes(-1, -2)
      x = x.reshape(*x.shape[:-2], -1)
      x = nn.Dense(width, use_bias=False, dtype=self.dtype, name="merge_layer")(
        x
      )
    if not given.norm_patches:
      x = self._normed(x)
    dense = functools.partial(
      nn.Dense, use_bias=given.use_bias, dtype=self.dtype
    )
    if given.mlp is None:
      return dense(self.width, name="linear_0")(x)
    x = dense(given.hidden or self.width, name="linear_0")(x)
    kind = mlp.KINDS[given.mlp]
    if kind.gated:
      x, gate = jnp.split(x, 2, axis=-1)
      x = x * kind.activation(gate)
    else:
      x = kind.activation(x)
    return dense(self.width, name="linear_1")(x)

  @nn.nowrap
  def _normed(self, x: jax.Array) -> jax.Array:
    eps, kind = self.options.norm_eps, self.options.norm
    if eps is None:
      return x
    if kind == "layernorm":
      return nn.LayerNorm(eps, self.dtype, name="norm")(x)
    offset = 1.0 if kind == "offset_rmsnorm" else 0.0
    return rms_norm.RMSNorm(
      x.shape[-1:],
      eps,
      offset=offset,
      scaled=kind != "plain_rmsnorm",
      dtype=self.dtype,
      name="norm",
    )(x)


class Projectors(nn.Module):
  """A projector for each of several layers of the tower."""

  options: ProjectorOptions
  width: int
  dtype: str

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """(pictures, layers, P, width of the tower) to (pictures, layers, T, D)."""
    # Left to itself, XLA splits the features by width and gathers them for the
    # norms.
    x = sharding.over_batch(x)
    layers = [
      Projector(self.options, self.width, self.dtype, name=f"blocks_{i}")(
        x[:, i]
      )
      for i in range(x.shape[1])
    ]
    return jnp.stack(layers, axis=1)


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
) -> masks.Groups:
  """A group of the tokens, and of the positions, in the prefix."""
  if prefix.ndim == 2:
    return masks.Groups(*((prefix != 0).astype(jnp.int32),) * 2)
  is_first = isinstance(start, int) and start == 0
  S = L if cache is None or is_first else cache.length
  in_prefix = [
    (number < prefix[:, None]).astype(jnp.int32)
    for number in (start + jnp.arange(L), jnp.arange(S))
  ]
  return masks.Groups(in_prefix[0], in_prefix[1])


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


class _Places(NamedTuple):
  """Picture and token numbers of image tokens; meaningless at other tokens."""

  picture_BL: jax.Array  # Number of the picture.
  token_BL: jax.Array  # Number of the token in the picture.


def _places(grids_BN2: jax.Array, is_image_BL: jax.Array) -> _Places:
  number_BL = jnp.cumsum(is_image_BL, axis=1) - 1
  ends_BN = jnp.cumsum(jnp.prod(grids_BN2, axis=-1), axis=1)
  picture_BL = jnp.sum(number_BL[..., None] >= ends_BN[:, None], axis=-1)
  picture_BL = jnp.clip(picture_BL, 0, grids_BN2.shape[1] - 1)
  starts_BN = jnp.pad(ends_BN, ((0, 0), (1, 0)))[:, :-1]
  starts_BN = jnp.broadcast_to(starts_BN, (len(number_BL), starts_BN.shape[1]))
  start_BL = jnp.take_along_axis(starts_BN, picture_BL, axis=1)
  return _Places(picture_BL, number_BL - start_BL)


def _with_axes(
  grids_BN2: jax.Array,
  is_image_BL: jax.Array,
  positions_BL: jax.Array | None,
  segments_BL: jax.Array | None,
  cache: kv_cache.Caches | None,
) -> tuple[jax.Array, kv_cache.Caches | None]:
  """Positions (B, L, 3) in time, row and column, and the cache's shift.

  As in Qwen2-VL (https://arxiv.org/abs/2409.12191): all tokens of a picture
  have the time of its first one, and what follows begins after the larger of
  its numbers of rows and columns.
  """
  B, L = is_image_BL.shape
  grids_BN2 = jnp.broadcast_to(grids_BN2, (B, *grids_BN2.shape[1:]))
  place = _places(grids_BN2, is_image_BL)
  grid_BL2 = jnp.take_along_axis(grids_BN2, place.picture_BL[..., None], axis=1)
  extent_BL = jnp.max(grid_BL2, axis=-1)
  is_first_BL = is_image_BL & (place.token_BL == 0)
  step_BL = jnp.where(is_image_BL, is_first_BL * extent_BL, 1)
  end_BL = jnp.cumsum(step_BL, axis=1)
  # A picture's tokens share the position before it.
  time_BL = end_BL - jnp.where(is_image_BL, extent_BL, 1)
  if positions_BL is None:
    positions_BL = decoder.positions_of(L, 0, segments_BL)
  # Positions count from the first token of each document.
  number_BL = jnp.arange(L) - positions_BL
  first_BL = jnp.take_along_axis(
    time_BL, jnp.broadcast_to(number_BL, (B, L)), axis=1
  )
  time_BL = time_BL - first_BL
  columns_BL = jnp.maximum(grid_BL2[..., 1], 1)
  row_BL, column_BL = jnp.divmod(place.token_BL, columns_BL)
  axes = [time_BL, time_BL + row_BL, time_BL + column_BL]
  result = [jnp.where(is_image_BL, axis, time_BL) for axis in axes]
  if cache is not None:
    shift_B = jnp.sum(step_BL, axis=1) - L
    cache = dataclasses.replace(cache, shift_B=shift_B)
  return jnp.stack(result, axis=-1), cache


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
_OF_TRAINING = (
  *("parent", "name", "variant", "dropout", "drop_path", "scan", "attention"),
  *("remat_policy", "dtype", "head_zeroinit", "head_bias_init", "num_classes"),
  *("max_len", "init_std", "neftune", "rep_size", "head_bias"),
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
      if field not in _OF_TRAINING
    }
  projector = values.get("projector") or {}
  if not isinstance(projector, ProjectorOptions):
    projector = ProjectorOptions(**projector)
  result["projector"] = projector._asdict()
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
