"""Microbatches: their number, and how a global batch is cut into them.

config.microbatches is their number, config.microbatch_examples their size over
all devices. At most one of the two may be given.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.config.settings import Config


def read(config: Config, batch_size: int, mesh: Mesh) -> int:
  """Returns the number of microbatches; ConfigError if it does not divide."""
  number = config.get("microbatches")
  examples = config.get("microbatch_examples")
  key = "config.microbatch_examples"
  if number is not None and examples is not None:
    raise ConfigError(f"config.microbatches and {key}: give only one.")
  if examples is not None:
    sharding.check_batch(examples, mesh, key)
    if batch_size % examples:
      raise ConfigError(
        f"{key}={examples} does not divide the batch of {batch_size}."
      )
    number = batch_size // examples
  elif number is None:
    number = 1
  check(batch_size, number, mesh)
  return number


def check(batch_size: int, number: int, mesh: Mesh) -> None:
  """Raises ConfigError if microbatches cannot be split evenly over devices."""
  check_number("config.microbatches", number, least=1, whole=True)
  ways = sharding.batch_ways(mesh)
  if batch_size % (number * ways):
    candidates = range(1, batch_size // ways + 1)
    divisors = [n for n in candidates if batch_size % (n * ways) == 0]
    nearest = min(divisors, key=lambda n: abs(n - number), default=1)
    devices = "devices" if ways == mesh.size else "groups of devices"
    raise ConfigError(
      f"config.microbatches={number}: a batch of {batch_size} on {ways} "
      f"{devices} does not divide into that many microbatches; the nearest "
      f"number that works is {nearest}."
    )
  # A pipeline cuts each microbatch again, into those that fill its stages.
  in_pipeline = sharding.schedule_of(mesh).microbatches
  groups = mesh.shape["replica"] * mesh.shape["fsdp"]
  examples = batch_size // (number * groups)
  if in_pipeline and examples % in_pipeline:
    raise ConfigError(
      f"config.mesh.pipeline_microbatches={in_pipeline} does not divide "
      f"{examples}, the examples that pass the same stages."
    )


def split(batch: Any, number: int, mesh: Mesh) -> Any:
  """[B, ...] as [number, B / number, ...]; example i is in i % number.

  They are interleaved so that each device keeps its own examples; contiguous
  microbatches would move most of the batch between devices.
  """
  layout = NamedSharding(mesh, PartitionSpec(None, sharding.batch_axes(mesh)))

  def split_array(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0] // number, number, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, layout)

  return jax.tree.map(split_array, batch)


def join(parts: Any, mesh: Mesh) -> Any:
  """The inverse of `split`."""

  def join_array(x: jax.Array) -> jax.Array:
    x = x.swapaxes(0, 1)
    x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return jax.lax.with_sharding_constraint(x, sharding.batch(mesh))

  return jax.tree.map(join_array, parts)
