"""Flow matching: learns the velocity that leads from noise to images.

A batch has "image" [B, rows, columns, channels], with values from -1 to 1, and
"labels", int [B], if the model has classes. The model is models/dit.py. With
config.model.latents, an autoencoder in config.teacher encodes the images, and
the flow leads to its latents.

Legend: B batch, C channels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import flows, forward

# Options that may follow a schedule, with limits of their values.
LIMITS = dict[str, Any](
  time_mean={}, time_std=dict(above=0), class_drop=dict(least=0, most=1)
)
# Each use of an example's random key has a number.
_TIME, _NOISE, _CLASS, _LATENT = range(4)


def inputs(batch: Batch) -> Batch:
  return {"image": batch["image"]}


def class_counts(model: Any) -> dict[str, int]:
  return {"labels": model.num_classes} if model.num_classes else {}


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  teacher: Any = None,
  times: str = "logit_normal",
  time_mean: float = -0.8,
  time_std: float = 0.8,
  class_drop: float = 0.1,
) -> tuple[Metrics, Variables]:
  """Computes the squared error of the velocity, (v - v_predicted)^2.

  Args:
    teacher: the autoencoder of config.teacher, for models of latents.
    times: how times are drawn: "logit_normal", the sigmoid of a normal
      variable, or "uniform".
    time_mean: mean of that variable; a lower mean gives more noise.
    time_std: its standard deviation.
    class_drop: share of the examples whose class is hidden in training, as
      guidance requires.
  """
  check_choice("config.loss.times", times, flows.TIMES)
  variables = dict(variables)
  autoencoder = variables.pop("teacher", None)
  image = batch["image"].astype(jnp.float32)
  keys_B = batch.get("_keys")
  if keys_B is None:  # Evaluations draw the same random numbers every time.
    keys_B = jax.vmap(jax.random.key)(jnp.arange(len(image)))
  if model.latents:
    image = _encoded(teacher, autoencoder, image, _folded(keys_B, _LATENT))
  elif teacher is not None:
    raise ConfigError(
      "config.teacher: expected none, or config.model.latents=True."
    )
  if image.shape[1:] != model.shape:
    raise ConfigError(
      "config.model.image_size, channels: the model is for "
      f"{'latents' if model.latents else 'images'} of shape {model.shape}, got "
      f"{image.shape[1:]}."
    )

  time_B = flows.times(_folded(keys_B, _TIME), times, time_mean, time_std)
  noise = model.noise_scale * flows.noise(_folded(keys_B, _NOISE), model.shape)
  z = flows.between(noise, image, time_B)
  labels_B = None
  if model.num_classes:
    labels_B = batch["labels"]
    if train:
      draw = functools.partial(jax.random.bernoulli, p=class_drop)
      dropped_B = jax.vmap(draw)(_folded(keys_B, _CLASS))
      labels_B = jnp.where(dropped_B, model.num_classes, labels_B)
  (out, _), mutable = forward.apply(
    model, variables, rng, train, z, time_B, labels_B
  )
  if model.predicts == "image":
    velocity_to = functools.partial(
      flows.velocity_to, z=z, time_B=time_B, least_noise=model.least_noise
    )
    error = velocity_to(out) - velocity_to(image)
  else:
    error = out - (image - noise)
  error_B = jnp.mean(jnp.square(error), range(1, error.ndim))
  weight_B = metrics.example_weights(batch, image)
  return {"loss": metrics.pair(error_B, weight_B)}, mutable


def _folded(keys_B: jax.Array, number: int) -> jax.Array:
  return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, number)


def _encoded(
  teacher: Any, autoencoder: Any, image: jax.Array, keys_B: jax.Array
) -> jax.Array:
  """Draws latents of images from the distribution that the encoder returns."""
  if teacher is None:
    raise ConfigError(
      "config.teacher: missing; config.model.latents=True needs an autoencoder."
    )
  mean, std = teacher.apply(autoencoder, image, method="encode")
  latents = mean + std * flows.noise(keys_B, mean.shape[1:])
  return jax.lax.stop_gradient(teacher.scaled(latents))


def _velocity(
  model: Any, variables: Variables, labels_B: jax.Array | None
) -> flows.Velocity:
  """The velocity that a model predicts for images of these classes."""

  def velocity(z: jax.Array, t: jax.Array) -> jax.Array:
    time_B = jnp.full(len(z), t)
    out, _ = model.apply(variables, z, time_B, labels_B, train=False)
    if model.predicts == "velocity":
      return out
    return flows.velocity_to(out, z, time_B, model.least_noise)

  return velocity


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """ "samples" makes images; "encoded" returns features of noiseless images."""

  def samples(
    variables: Variables,
    batch: Batch,
    *,
    steps: int = 50,
    sampler: str = "heun",
    guidance: float = 1.0,
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
  ) -> jax.Array:
    """Makes images (B, rows, columns, C) in [-1, 1], one for each "_index".

    The noise depends only on the seed and this index. Without "labels", the
    class is the index modulo the number of classes.

    Args:
      steps: number of steps from noise to image.
      sampler: "euler", or "heun" with two calls of the model in most steps.
      guidance: scale of classifier-free guidance; 1 for none.
      guidance_interval: times at which guidance is on.
      seed: seed of the noise.
    """
    check_number("pred_kw.steps", steps, least=1, whole=True)
    check_choice("pred_kw.sampler", sampler, flows.SAMPLERS)
    check_number("pred_kw.guidance", guidance, least=0)
    index_B = batch["_index"]
    variables = dict(variables)
    autoencoder = variables.pop("teacher", None)

    velocity = _velocity(model, variables, None)
    if model.num_classes:
      labels_B = batch.get("labels", index_B % model.num_classes)
      velocity = flows.guided(
        _velocity(model, variables, labels_B),
        velocity,
        guidance,
        (float(guidance_interval[0]), float(guidance_interval[1])),
      )
    elif guidance != 1:
      raise ConfigError(
        f"pred_kw.guidance={guidance}: needs config.model.num_classes."
      )
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
      jax.random.key(seed), index_B
    )
    z = model.noise_scale * flows.noise(keys_B, model.shape)
    image = flows.integrate(velocity, z, steps, sampler)
    if model.latents:
      unscaled = teacher.unscaled(image)
      image = teacher.apply(autoencoder, unscaled, method="decode")
    return jnp.clip(image, -1.0, 1.0)

  def encoded(variables: Variables, batch: Batch) -> jax.Array:
    own = {name: x for name, x in variables.items() if name != "teacher"}
    image = batch["image"]
    return model.apply(own, image, jnp.ones(len(image)), train=False)[1][
      "encoded"
    ]

  fns: dict[str, PredictFn] = {}
  reads_latents = model is not None and model.latents
  if not reads_latents:
    fns = {"samples": samples, "encoded": encoded}
    fns["loss"] = forward.metrics_fn(loss_fn, model=model)
  elif teacher is not None:
    fns = {"samples": samples}
    fns["loss"] = forward.metrics_fn(loss_fn, model=model, teacher=teacher)
  return fns
