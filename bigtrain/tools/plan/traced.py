"""Sizes of a config's state and work, without compiling its update."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from bigtrain import lengths as lengths_lib
from bigtrain import parts, settings, sharding, trees
from bigtrain.inputs import pipeline
from bigtrain.optim import chain, views
from bigtrain.reports import flops
from bigtrain.step import gradients, initial

# Largest size of `tensor` that is considered.
MOST_TENSOR = 8


class Traced(NamedTuple):
  """Sizes that do not depend on the mesh.

  Attributes:
    parameters: number of parameters.
    opt_bytes: bytes of the optimizer's state, over all devices.
    model_flops: FLOPs of a step over all devices, without recomputation.
    batch_bytes: bytes of a batch, over all devices.
    tokens_per_example: tokens per example, or None.
    tensor_sizes: sizes of the axis `tensor` that the model's rules allow.
  """

  parameters: int
  opt_bytes: int
  model_flops: int
  batch_bytes: int
  tokens_per_example: int | None
  tensor_sizes: tuple[int, ...]


def measure(plain: Mapping[str, Any]) -> Traced:
  """Traces the loss of a config on one device.

  Raises:
    ConfigError: a mistake in the config.
  """
  config = parts.with_published_sizes(settings.Config(dict(plain)))
  mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    batch_size = config.input.batch_size
    data = pipeline.make_train(
      *(config.input,),
      seed=0,
      mesh=mesh,
      pp_modules=config.get("pp_modules", ()),
      run=config,
    )
    spec = sharding.batch_spec(data.spec, mesh)
    lengths = lengths_lib.read(
      config, batch_size, data.num_examples, data.tokens_per_example
    )
    task = parts.task(config)
    module, model = parts.model(config)
    loss_fn = parts.loss_fn(config, task, model, None)
    variables = jax.eval_shape(initial.variables_fn(task, model, spec, 0))
    params = variables["params"]
    optimizer = chain.make(
      config, params, lengths.units, views.of_model(module, model, params)
    )
    trained, _ = trees.partition(params, optimizer.trainable)
    opt = jax.eval_shape(optimizer.tx.init, trained)
    args = gradients.loss_args({"params": params}, spec, mesh)
    variables_arg = {**variables, **args[0]}
    forward = flops.forward_flops(loss_fn, variables_arg, *args[1:])
  shapes = {
    name: tuple(x.shape) for name, x in trees.flatten_with_names(params)
  }
  return Traced(
    sum(math.prod(shape) for shape in shapes.values()),
    _nbytes(opt),
    flops.train_flops(forward),
    _nbytes(data.spec),
    lengths.units.tokens_per_example,
    (
      1,
      *(
        n
        for n in range(2, MOST_TENSOR + 1)
        if _allows(module, model, shapes, n)
      ),
    ),
  )


def _nbytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _allows(
  module: Any, model: Any, shapes: Mapping[str, tuple[int, ...]], ways: int
) -> bool:
  """Whether a model's rules allow a size of `tensor`."""
  if not hasattr(module, "param_dims"):
    return False
  try:
    sharding.place(module.param_dims(model), shapes, {"tensor": ways})
  except settings.ConfigError:
    return False
  return True
