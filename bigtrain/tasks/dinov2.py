"""Self-distillation without labels: DINO, and DINOv2 with iBOT and KoLeo.

The teacher is a moving average of the student. It sees two large crops of an
image; the student sees these and several small crops, and learns to predict how
the teacher assigns each large crop to prototypes (arXiv 2104.14294). If patches
are masked for the student, it also predicts how the teacher assigns these
patches (iBOT, arXiv 2111.07832). DINOv2 (arXiv 2304.07193) computes the
assignments with Sinkhorn-Knopp and spreads features apart with KoLeo, both over
the global batch. In its last phase, DINOv3 (arXiv 2508.10104) keeps the
similarities between patches close to those of an earlier teacher: Gram
anchoring.

Legend: B batch, G large crops (2), S small crops, N samples, M masked patches,
D width, E width of the head's results, K prototypes.

A batch has "image" [B, H, W, channels], which is cropped on the devices; or
crops made by the input: "large_crops" [B, G, ...], "small_crops" [B, S, ...],
and "gram_crops" [B, G, ...], the large crops as the Gram teacher sees them. The
model is models/dinov2.py, or another one with the method `views`.

SigLIP 2 (arXiv 2502.14786, models/siglip2.py) has one large crop, which the
student sees with masked patches, and whose class token it predicts from the
small crops.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops, trees
from bigtrain.arrays.types import Batch, Metrics, Params, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import (
  collapse,
  forward,
  gram,
  prototypes,
  random_views,
  teachers,
)

# Options that may follow a schedule, with limits of their values.
LIMITS = dict(
  momentum=dict(least=0, most=1),
  centre_momentum=dict(least=0, most=1),
  teacher_temperature=dict(above=0),
  student_temperature=dict(above=0),
  mask_prob=dict(least=0, most=1),
  patch_weight=dict(least=0),
  koleo_weight=dict(least=0),
  gram_weight=dict(least=0),
  gram_copies=dict(least=0),
)
_NUM_SMALL = 8  # S by default.
_EPS = 1e-12


def inputs(batch: Batch) -> Batch:
  if "image" not in batch and "large_crops" in batch:
    return {"image": batch["large_crops"][:, 0]}
  return {"image": batch["image"]}


# The state: the teacher, the centres of its logits, and the Gram teacher.


def init_state(
  params: Params,
  *,
  model: Any,
  teacher: str = ".*",
  gram_weight: Any = None,
  gram_copies: Any = None,
) -> dict[str, Any]:
  """The initial state.

  Args:
    teacher: regular expression of the parameters that the teacher copies, for
      models in which the views do not depend on all of them.
    gram_weight, gram_copies: without a weight, there is no Gram teacher.
  """
  if gram_weight is None and gram_copies is not None:
    raise ConfigError(
      "config.loss.gram_copies: expected a gram_weight; without one there is "
      "no Gram teacher."
    )
  centre = {"class": jnp.zeros(model.num_prototypes)}
  if model.patch_prototypes:
    centre["patch"] = jnp.zeros(model.patch_prototypes)
  followed = trees.from_flat(
    {
      name: x
      for name, x in trees.flatten_with_names(params)
      if re.fullmatch(teacher, name)
    }
  )
  state = {"teacher": followed, "centre": centre}
  if gram_weight is not None:
    state["gram"] = {"teacher": followed, "copies": jnp.zeros((), jnp.int32)}
  return state


def update_state(
  state: Any,
  *,
  params: Params,
  sums: Any,
  momentum: float = 0.994,
  centre_momentum: float = 0.9,
  gram_copies: Any = 0,
) -> Any:
  """The next teacher, centres and Gram teacher.

  Args:
    momentum: of the teacher; published recipes let it rise to 1.
    centre_momentum: of the centres, which centering="mean" subtracts.
    gram_copies: number of times that the teacher has been copied to the Gram
      teacher. It usually follows a schedule; whenever it reaches the next whole
      number, the teacher is copied. At 0, the Gram teacher has the initial
      parameters.
  """
  mean = jax.tree.map(
    lambda total, old: total[0] / jnp.maximum(total[1], 1.0),
    sums,
    state["centre"],
    is_leaf=lambda x: isinstance(x, tuple),
  )
  student = dict(trees.flatten_with_names(params))
  followed = trees.map_with_names(
    lambda name, _: student[name], state["teacher"]
  )
  new = {
    "teacher": teachers.follow(state["teacher"], followed, momentum),
    "centre": teachers.follow(state["centre"], mean, centre_momentum),
  }
  if "gram" in state:
    old = state["gram"]
    copies = jnp.floor(jnp.asarray(gram_copies)).astype(jnp.int32)
    is_due = copies > old["copies"]
    new["gram"] = {
      "teacher": jax.tree.map(
        lambda x, old_x: jnp.where(is_due, x, old_x),
        new["teacher"],
        old["teacher"],
      ),
      "copies": copies,
    }
  return new


# The loss, in two halves: one for each example, one for the global batch.


def embed_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  state: Any,
  num_large: int = 2,
  num_small: int | None = None,
  large_size: int | None = None,
  small_size: int | None = None,
  large_area: Sequence[float] | None = None,
  small_area: Sequence[float] | None = None,
  flip: bool | None = None,
  contrast: float | None = None,
  mask_prob: float = 0.5,
  mask_ratio: Sequence[float] = (0.1, 0.5),
  gram_weight: Any = None,
  gram_size: int | None = None,
) -> tuple[dict[str, jax.Array], Any]:
  """Unit vectors of all crops, by the student and by the teacher.

  Args:
    num_large: G, 2 or, with small crops, 1.
    num_small: S; by default 8, or the number that the batch has.
    large_size, small_size: sides of the crops; by default the side of the
      image, and half of it.
    large_area, small_area: share of the image: (0.32, 1) and (0.05, 0.32).
    flip, contrast: see random_views.crops.
    mask_prob: share of the large crops with masked patches.
    mask_ratio: smallest and largest share of their patches that is masked.
    gram_weight: weight of Gram anchoring; None for a run without it. Steps in
      which the weight is 0 do not compute it.
    gram_size: side of the large crops as the Gram teacher sees them, a multiple
      of `large_size`; its features are resized to the student's grid. Crops
      that the input makes come with "gram_crops" instead.
  """
  large_crops = functools.partial(
    _large_crops, batch, num_large, area=large_area, flip=flip
  )
  large = large_crops(size=large_size, contrast=contrast)
  small = _small_crops(
    batch, num_small, small_size, small_area, flip=flip, contrast=contrast
  )
  _check_numbers(num_large, small)
  B, G = large.shape[:2]
  large_N = large.reshape(B * G, *large.shape[2:])
  grid = _grid(model, large_N.shape[1:])
  given: dict[str, Any] = dict(method="views")
  shown: dict[str, Any] = {}
  weight_NM = None
  if model.patch_prototypes:
    num_patches = math.prod(grid)
    given["chosen_BM"], weight_NM, shown["masked_BP"] = _masks(
      batch["_keys"], G, num_patches, mask_prob, mask_ratio
    )
  out, mutable = forward.apply(
    model, variables, rng, train, large_N, **given, **shown
  )
  teacher = _of_teacher(variables, state["teacher"])
  taught = _by_teacher(model, teacher, large_N, **given)

  def by_example(x: jax.Array) -> jax.Array:
    return x.reshape(B, -1, *x.shape[1:])

  result = _of_large(out, taught, weight_NM, by_example)
  if small is not None:
    small_NE = _small_vectors(model, variables, rng, train, small)
    result["small_BSE"] = by_example(small_NE)
  if gram_weight is not None:
    size = gram_size or large_size
    again = functools.partial(large_crops, size=size, contrast=0.0)
    gram_crops = functools.partial(_gram_crops, batch, again, gram_size)
    gram_teacher = _of_teacher(variables, state["gram"]["teacher"])
    gram_N = _gram_loss(
      model, gram_teacher, out["encoded"], gram_crops, grid, gram_weight
    )
    result["gram_BG"] = by_example(gram_N)
  return result, mutable


def _by_teacher(
  model: Any, teacher: Variables, large_N: jax.Array, **options: Any
) -> Any:
  with model_flops.share(1, 3):  # Without a backward pass.
    return model.apply(teacher, large_N, train=False, **options)


def _of_large(
  out: Mapping[str, jax.Array],
  taught: Mapping[str, jax.Array],
  weight_NM: jax.Array | None,
  by_example: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
  """Features of the large crops, from the student (`out`) and the teacher."""
  taught = jax.lax.stop_gradient(dict(taught))
  result = {
    "student_BGE": out["class_z"],
    "teacher_BGE": taught["class_z"],
    "features_BGD": out["head_input"],
    "teacher_features_BGD": taught["head_input"],
  }
  if weight_NM is not None:
    result |= {
      "student_BGME": out["patch_z"],
      "teacher_BGME": taught["patch_z"],
      "weight_BGM": weight_NM,
    }
  return {name: by_example(x) for name, x in result.items()}


def _check_numbers(num_large: int, small: jax.Array | None) -> None:
  if num_large == 1 and small is None:
    raise ConfigError(
      "config.loss.num_large=1: expected small crops, whose class tokens are "
      "compared with it, or num_large=2."
    )


def _small_vectors(
  model: Any,
  variables: Variables,
  rng: jax.Array | None,
  train: bool,
  small: jax.Array,
) -> jax.Array:
  """The student's vectors of the small crops, [B S, E]."""
  if model.posemb == "learn" and model.posemb_grid is None:
    raise ConfigError(
      "config.model.posemb_grid: missing; large and small crops have different "
      "grids of patches."
    )
  small_N = small.reshape(-1, *small.shape[2:])
  out, _ = forward.apply(model, variables, rng, train, small_N, method="views")
  return out["class_z"]


def _of_teacher(variables: Variables, teacher: Params) -> Variables:
  """The variables, with the teacher's parameters in place of the student's."""
  params = dict(trees.flatten_with_names(variables["params"]))
  params |= trees.flatten_with_names(teacher)
  return {**variables, "params": trees.from_flat(params)}


def _large_crops(
  batch: Batch,
  number: int,
  size: int | None,
  area: Sequence[float] | None,
  **options: Any,
) -> jax.Array:
  """The large crops [B, G, ...], from the batch or made here."""
  check_number("config.loss.num_large", number, least=1, most=2, whole=True)
  if "large_crops" in batch:
    ready = batch["large_crops"]
    if ready.shape[1] != number:
      raise ConfigError(
        f"config.input: expected {number} large crops of each image, got "
        f"'large_crops' with {ready.shape[1]}."
      )
    random_views.check_unused(
      "large_crops", large_size=size, large_area=area, **options
    )
    return ready
  image = batch["image"]
  return random_views.crops(
    random_views.folded(batch["_keys"], 0),
    image,
    number,
    size or image.shape[1],
    random_views.shares("large_area", area, (0.32, 1.0)),
    **options,
  )


def _gram_crops(
  batch: Batch, again: Callable[[], jax.Array], size: int | None
) -> jax.Array:
  """The large crops as the Gram teacher sees them, without changes of contrast.

  Args:
    again: makes the same crops again, if the batch does not have them.
  """
  if "large_crops" not in batch:
    return again()
  if size is not None:
    raise ConfigError(
      f"config.loss.gram_size={size}: large crops made in config.input.pp need "
      "the feature 'gram_crops' instead of a size."
    )
  return batch.get("gram_crops", batch["large_crops"])


def _small_crops(
  batch: Batch,
  number: int | None,
  size: int | None,
  area: Sequence[float] | None,
  **options: Any,
) -> jax.Array | None:
  """The small crops [B, S, ...], if any, from the batch or made here."""
  key = "config.loss.num_small"
  if number is not None:
    check_number(key, number, least=0, whole=True)
  if "large_crops" in batch:
    ready = batch.get("small_crops")
    num_ready = 0 if ready is None else ready.shape[1]
    if number is not None and number > num_ready:
      raise ConfigError(
        f"{key}={number}: more than the {num_ready} small crops that the batch "
        f"has of each image; expected at most {num_ready}."
      )
    random_views.check_unused(
      "large_crops", small_size=size, small_area=area, **options
    )
    return ready[:, :number] if ready is not None and number != 0 else None
  number = _NUM_SMALL if number is None else number
  if not number:
    return None
  image = batch["image"]
  return random_views.crops(
    random_views.folded(batch["_keys"], 1),
    image,
    number,
    size or image.shape[1] // 2,
    random_views.shares("small_area", area, (0.05, 0.32)),
    **options,
  )


def _gram_loss(
  model: Any,
  teacher: Variables,
  student_NPD: jax.Array,
  gram_crops: Callable[[], jax.Array],
  grid: tuple[int, int],
  weight: Any,
) -> jax.Array:
  """Difference of the Gram matrices of student and Gram teacher, [N].

  Args:
    teacher: variables of the Gram teacher.
    student_NPD: the student's features of the large crops.
    gram_crops: makes the crops that the Gram teacher sees.
    grid: the student's rows and columns of patches.
    weight: the loss is not computed if it is 0.
  """

  def compute() -> jax.Array:
    crops = gram_crops()
    large_N = crops.reshape(-1, *crops.shape[2:])
    out = _by_teacher(model, teacher, large_N, method="views")
    taught_NPD = jax.lax.stop_gradient(out["encoded"])
    rows, columns = _grid(model, large_N.shape[1:])
    taught_NPD = gram.resized(taught_NPD, (rows, columns), grid)
    return gram.loss(student_NPD, taught_NPD)

  if not isinstance(weight, jax.Array):
    return compute()
  zeros = jnp.zeros(len(student_NPD))
  return jax.lax.cond(weight > 0, compute, lambda: zeros)


def _grid(model: Any, shape: Sequence[int]) -> tuple[int, int]:
  p, q = model.patch_size
  return shape[0] // p, shape[1] // q


def _masks(
  keys_B: jax.Array,
  num_crops: int,
  num_patches: int,
  prob: float,
  ratio: Sequence[float],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws masks of all large crops, N = B G of them.

  Returns the first M patches of a random order, their weights [N, M], and which
  patches are masked [N, P]. The weights of a crop add up to 1, or to 0 if
  nothing is masked in it.
  """
  ratio = random_views.shares("mask_ratio", ratio, may_be_none=True)
  M = int(ratio[1] * num_patches)
  if M < 1:
    raise ConfigError(
      f"config.loss.mask_ratio={ratio!r}: masks none of {num_patches} patches."
    )

  def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(key, 3)
    order_P = jax.random.permutation(keys[0], num_patches)
    share = jax.random.uniform(keys[1], minval=ratio[0], maxval=ratio[1])
    number = jnp.clip(jnp.round(share * num_patches), 1, M)
    number = jnp.where(jax.random.uniform(keys[2]) < prob, number, 0)
    is_masked_M = jnp.arange(M) < number
    masked_P = jnp.zeros(num_patches, bool).at[order_P[:M]].set(is_masked_M)
    return order_P[:M], is_masked_M / jnp.maximum(number, 1), masked_P

  split = jax.vmap(lambda key: jax.random.split(key, num_crops))
  return jax.vmap(draw)(split(random_views.folded(keys_B, 2)).reshape(-1))


def embeddings_loss_fn(
  params: Params,
  embeddings: Mapping[str, jax.Array],
  batch: Batch,
  *,
  state: Any,
  log_step: Any = True,
  centering: str = "sinkhorn",
  teacher_temperature: float = 0.07,
  student_temperature: float = 0.1,
  patch_weight: float = 1.0,
  koleo_weight: Any = 0.1,
  gram_weight: Any = None,
) -> tuple[Metrics, Any]:
  """The loss of the global batch.

  Args:
    centering: "sinkhorn", or "mean": logits minus their moving average, as in
      DINO.
    teacher_temperature: published recipes let it rise from 0.04.
    student_temperature: of the student's assignments.
    patch_weight: weight of the loss of masked patches.
    koleo_weight: weight of KoLeo for each large crop.
    gram_weight: weight of the difference of Gram matrices.
  """
  check_choice("config.loss.centering", centering, ("sinkhorn", "mean"))
  assign = functools.partial(
    _assign, centering=centering, temperature=teacher_temperature
  )
  teacher_BGE = embeddings["teacher_BGE"]
  student_BGE = embeddings["student_BGE"]
  B, G = teacher_BGE.shape[:2]
  weight_B = metrics.example_weights(batch, teacher_BGE)
  weight_N = jnp.repeat(weight_B, G)

  # Class tokens: each of the student's views is compared with every large crop
  # but itself.
  name = "class_prototypes"
  scores_NK = _scores(state["teacher"], name, teacher_BGE.reshape(B * G, -1))
  target_NK = assign(scores_NK, weight_N, state["centre"]["class"])
  target_BGK = target_NK.reshape(B, G, -1)
  student_BVE = student_BGE
  if "small_BSE" in embeddings:
    student_BVE = jnp.concatenate([student_BGE, embeddings["small_BSE"]], 1)
  logits_BVK = _scores(params, name, student_BVE) / student_temperature
  pair_losses = [
    prototypes.cross_entropy(target_BGK[:, g], logits_BVK[:, v])
    for g in range(G)
    for v in range(logits_BVK.shape[1])
    if v != g
  ]
  class_loss_B = jnp.mean(jnp.stack(pair_losses), axis=0)
  loss_B = class_loss_B
  result = {"class_loss": metrics.pair(class_loss_B, weight_B)}
  sums = {"class": (weight_N @ scores_NK, jnp.sum(weight_N))}

  if "student_BGME" in embeddings:
    patch_loss_B, sums["patch"] = _patch_loss(
      params, embeddings, state, weight_B, student_temperature, assign
    )
    loss_B = loss_B + patch_weight * patch_loss_B
    result["patch_loss"] = metrics.pair(patch_loss_B, weight_B)
  if isinstance(koleo_weight, jax.Array) or koleo_weight:
    features_BGD = embeddings["features_BGD"]
    of_crops = [
      prototypes.koleo(features_BGD[:, g], weight_B) for g in range(G)
    ]
    koleo_B = jnp.sum(jnp.stack(of_crops), axis=0)
    loss_B = loss_B + koleo_weight * koleo_B
    result["koleo_loss"] = metrics.pair(koleo_B, weight_B)
  if gram_weight is not None:
    gram_B = jnp.mean(embeddings["gram_BG"], axis=1)
    loss_B = loss_B + gram_weight * gram_B
    result["gram_loss"] = metrics.pair(gram_B, weight_B)
  result["loss"] = metrics.pair(loss_B, weight_B)
  diagnosis = _diagnosis(
    embeddings, student_BVE, target_BGK, weight_B, log_step
  )
  return {**result, **diagnosis}, sums


loss_fn = forward.whole_loss_fn(embed_fn, embeddings_loss_fn)


def _scores(params: Params, name: str, z: jax.Array) -> jax.Array:
  """Cosines of unit vectors and prototypes."""
  kernel_EK = params[name]["kernel"].astype(jnp.float32)
  norm_K = jnp.sqrt(jnp.sum(jnp.square(kernel_EK), 0) + _EPS)
  return z @ (kernel_EK / norm_K)


def _assign(
  scores_NK: jax.Array,
  weight_N: jax.Array,
  centre_K: jax.Array,
  *,
  centering: str,
  temperature: Any,
) -> jax.Array:
  """The teacher's assignments; finite where the weight is 0."""
  if centering == "mean":
    return jax.nn.softmax((scores_NK - centre_K) / temperature)
  return prototypes.sinkhorn(scores_NK / temperature, weight_N)


def _patch_loss(
  params: Params,
  embeddings: Mapping[str, jax.Array],
  state: Any,
  weight_B: jax.Array,
  student_temperature: float,
  assign: Any,
) -> tuple[jax.Array, Any]:
  """The loss of the masked patches [B], and the sum of the teacher's logits."""
  weight_BGM = embeddings["weight_BGM"] * weight_B[:, None, None]
  weight_N = (weight_BGM > 0).astype(jnp.float32).reshape(-1)
  teacher_NE = embeddings["teacher_BGME"]
  teacher_NE = teacher_NE.reshape(-1, teacher_NE.shape[-1])
  name = "patch_prototypes"
  scores_NK = _scores(state["teacher"], name, teacher_NE)
  target_NK = assign(scores_NK, weight_N, state["centre"]["patch"])
  student_NE = embeddings["student_BGME"].reshape(teacher_NE.shape)
  logits_NK = _scores(params, name, student_NE) / student_temperature
  loss_N = prototypes.cross_entropy(target_NK, logits_NK)
  loss_BGM = loss_N.reshape(weight_BGM.shape) * weight_BGM
  G = weight_BGM.shape[1]
  total = weight_N @ scores_NK, jnp.sum(weight_N)
  return jnp.sum(loss_BGM, (1, 2)) / G, total


# Metrics that show a collapse.


def _diagnosis(
  embeddings: Mapping[str, jax.Array],
  student_BVE: jax.Array,
  target_BGK: jax.Array,
  weight_B: jax.Array,
  log_step: Any,
) -> Metrics:
  """Entropy of the teacher, prototypes in use, and the signs of collapse.py.

  "teacher_entropy" is the entropy of one image's assignment, in nats;
  "used_prototypes" the number in use over the batch.
  """
  B, G, K = target_BGK.shape
  weight_N = jnp.repeat(weight_B, G)
  used = prototypes.used(target_BGK.reshape(B * G, K), weight_N)
  entropy_B = jnp.mean(prototypes.entropy(target_BGK), 1)
  of_teacher = {
    "teacher_entropy": metrics.pair(entropy_B, weight_B),
    "used_prototypes": (used, jnp.ones(())),
  }
  signs = collapse.signs(
    embeddings["teacher_features_BGD"][:, 0],
    student_BVE[:, 0],
    student_BVE[:, 1],
    weight_B,
    log_step,
  )
  return {**jax.lax.stop_gradient(of_teacher), **signs}


def problem(
  values: Mapping[str, float], *, model: Any, stop_on_collapse: bool = True
) -> str | None:
  """Describes a collapse of features that a log entry shows."""
  if not stop_on_collapse or "teacher_entropy" not in values:
    return None
  most = float(jnp.log(model.num_prototypes))
  if values["used_prototypes"] < 1.05:
    return "the teacher assigns all images to one prototype"
  if values["teacher_entropy"] > 0.999 * most:
    return (
      "the teacher's assignment of each image is uniform over all "
      f"{model.num_prototypes} prototypes"
    )
  return collapse.problem(
    values, vectors="the student's vectors", features="the teacher's features"
  )


def predict_fns(model: Any) -> dict[str, PredictFn]:
  return {
    "pre_logits": forward.layers_fn(model, inputs),
    "pixels": forward.pixels,
  }
