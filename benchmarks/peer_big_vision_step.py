"""Steps of big_vision's classifiers and CapPa, for peer_process.py.

Model, loss and optimizer come unmodified from the checkout. The update is part
of the main functions of its trainers, and CapPa's does not run with current
versions of jax. So this module repeats the lines that combine the parts:
gradients, optimizer updates, and the norms that it logs in each step.
"""

import importlib
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from big_vision import optax as bv_optax
from big_vision import utils

from benchmarks import peer_process


def main() -> None:
  """Compiles the update of the options on the command line, and serves it."""
  options = json.loads(sys.argv[1])
  model, loss_fn, batch = _parts(options)

  def init_params() -> Any:
    # A model with captions takes both.
    example = batch[: 1 if "num_classes" in options["model"] else 2]
    variables = model.init(jax.random.PRNGKey(0), *map(jnp.asarray, example))
    return variables["params"]

  tx, _ = bv_optax.make(
    _optimizer(),
    jax.eval_shape(init_params),
    sched_kw=dict(
      total_steps=1_000_000, batch_size=len(batch[0]), data_size=1_000_000
    ),
  )

  def init() -> Any:
    params = init_params()
    return params, tx.init(params)

  def update(state: Any, rng: jax.Array, batch: Any) -> Any:
    params, opt = state
    count = bv_optax.get_count(opt, jittable=True)
    rng = jax.random.fold_in(rng, count)
    loss, grads = jax.value_and_grad(loss_fn)(params, rng, *batch)
    updates, opt = tx.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    trees = {"grads": grads, "params": params, "updates": updates}
    norms = {f"l2_{n}": optax.global_norm(tree) for n, tree in trees.items()}
    return (params, opt), {"training_loss": loss, **norms}

  shapes = jax.eval_shape(init)
  rng = jax.random.PRNGKey(1)
  lowered = jax.jit(update, donate_argnums=0).lower(shapes, rng, batch)
  program = lowered.compile()
  memory = program.memory_analysis()
  ready = {
    "parameters": sum(x.size for x in jax.tree.leaves(shapes[0])),
    "temp_bytes": memory.temp_size_in_bytes,
    "state_bytes": sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)
    ),
  }
  if options.get("memory_only"):
    peer_process.serve(ready, lambda steps: 0.0)
    return
  state = jax.jit(init)()
  batch = jax.device_put(batch)

  def run(steps: int) -> tuple[float, float]:
    nonlocal state
    jax.block_until_ready(state)
    start_secs, start_cpu_secs = time.perf_counter(), time.process_time()
    for _ in range(steps):
      state, measured = program(state, rng, batch)
    jax.block_until_ready((state, measured))
    cpu_secs = time.process_time() - start_cpu_secs
    return time.perf_counter() - start_secs, cpu_secs

  peer_process.serve(ready, run)


def _parts(options: Any) -> tuple[Any, Any, Any]:
  """Returns (model, loss_fn(params, rng, *batch), batch)."""
  draw = np.random.default_rng(0)
  size, batch_size = options["size"], options["batch_size"]
  image = draw.normal(size=(batch_size, size, size, 3)).astype(np.float32)
  module = importlib.import_module(f"big_vision.models.{options['module']}")
  model = module.Model(**options["model"])
  classes = options["model"].get("num_classes")
  if classes:
    labels = np.eye(classes, dtype=np.float32)[
      draw.integers(classes, size=batch_size)
    ]

    def image_loss(params: Any, rng: Any, image: Any, labels: Any) -> Any:
      logits, _ = model.apply(
        {"params": params}, image, train=True, rngs={"dropout": rng}
      )
      return utils.softmax_xent(logits=logits, labels=labels)

    return model, image_loss, (image, labels)

  shape = (batch_size, options["model"]["seq_len"])
  text = draw.integers(1, options["model"]["vocab_size"], size=shape)

  def caption_loss(params: Any, rng: Any, image: Any, text: Any) -> Any:
    logits = model.apply(
      {"params": params}, image, text, train=True, rngs={"dropout": rng}
    )
    return utils.weighted_softmax_xent(
      logits=logits, labels=text, weights=(text != 0).astype(jnp.float32)
    )

  return model, caption_loss, (image, text.astype(np.int32))


def _optimizer() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      optax_name="scale_by_adam",
      lr=1e-4,
      wd=1e-4,
      grad_clip_norm=1.0,
      schedule=dict(decay_type="cosine", warmup_steps=1000),
    )
  )


if __name__ == "__main__":
  main()
