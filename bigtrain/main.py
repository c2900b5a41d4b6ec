"""Trains what a config describes, from the first flag to the last row.

  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits

The program is one flat function, `train`, which reads top to bottom: where it
runs, what goes in, model and optimizer, update_fn, where it starts, what is
evaluated, the loop. What differs between experiments stands in the config and
behind the seams: tasks, models, evaluators, data sources, preprocessing ops
and hooks are found by name. Nothing here knows any of them.
"""

from bigtrain import cluster

if __name__ == "__main__":
  cluster.catch_signals()  # The imports below take a second or two.

import dataclasses
import functools
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags, logging

from bigtrain import (
  checkpoint,
  chrono,
  flops,
  hooks,
  input_pipeline,
  lease,
  metrics,
  optim,
  record,
  settings,
  sharding,
  start,
  train_step,
  trees,
  writers,
)
from bigtrain.evaluators import common as evaluators

# Steps that may be on their way to the device: enough to keep it busy, few
# enough that a signal is obeyed soon and that batches do not pile up.
_STEPS_IN_FLIGHT = 4


def train(config: Mapping[str, Any], workdir: str) -> dict[str, Any]:
  """Trains, evaluates and saves; goes on where an earlier call stopped.

  Args:
    config: what a config file's get_config returns; a ConfigDict or a dict.
    workdir: folder of the run: config.json, run.json, metrics.jsonl,
      tensorboard/, checkpoints/.

  Returns:
    The newest value of every metric that was written, and "step".

  Raises:
    ConfigError: the config or the data is wrong, told before compiling where
      that is possible.
    Preempted: a signal ended the run; the state is saved.
  """
  config = settings.Config(settings.plain(config))
  began = time.monotonic()
  record.compile_cache(config.get("compile_cache", True))
  held = lease.acquire(workdir)

  # Where it runs.
  mesh_options = config.kwargs("mesh")
  settings.check_kwargs(sharding.make_mesh, mesh_options, "config.mesh")
  mesh = sharding.make_mesh(**mesh_options)
  logging.info("%s", record.topology(mesh))

  # What goes in. The batch of step s is a function of the config and s alone.
  seed = config.get("seed", 0)
  batch_size = config.input.batch_size
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  microbatches = config.get("microbatches", 1)
  train_step.check_microbatches(batch_size, microbatches, mesh)
  pp_modules = config.get("pp_modules", ())
  train_input = input_pipeline.make_train(
    config.input, seed=seed, mesh=mesh, pp_modules=pp_modules
  )
  batch_spec = train_input.spec
  units = settings.Units(
    batch_size=batch_size,
    examples_per_epoch=train_input.num_examples,
    tokens_per_example=input_pipeline.tokens_per_example(batch_spec),
  )
  total_steps = settings.steps(config, "total", units)
  if not total_steps:
    raise settings.ConfigError(
      "config.total_steps: missing; give total_steps, total_epochs, "
      "total_examples or total_tokens."
    )
  units = dataclasses.replace(units, total_steps=total_steps)
  log_steps = settings.steps(config, "log", units, default=50)
  ckpt_steps = settings.steps(config, "ckpt", units, default=1000)
  last_step = min(total_steps, config.get("stop_at_steps") or total_steps)

  # Task and model.
  task = settings.find_module("tasks", config.task, "config.task")
  model_module = settings.find_module(
    "models", config.model_name, "config.model_name"
  )
  model_options = config.kwargs("model")
  settings.check_kwargs(model_module.Model, model_options, "config.model")
  model = model_module.Model(**model_options)
  loss_options = config.kwargs("loss")
  settings.check_kwargs(
    task.loss_fn,
    loss_options,
    "config.loss",
    given=("variables", "batch", "rng", "model", "train"),
  )
  loss_fn = functools.partial(
    task.loss_fn, model=model, train=True, **loss_options
  )

  def init_variables() -> dict[str, Any]:
    """The model's parameters and mutable collections, from the seed."""
    init_rng, _ = jax.random.split(jax.random.key(seed))
    example = {
      name: jnp.zeros((1, *spec.shape[1:]), spec.dtype)
      for name, spec in batch_spec.items()
    }
    return dict(model.init(init_rng, **task.inputs(example)))

  # Optimizer. Its state exists for parameters that are trained only.
  params_spec = jax.eval_shape(init_variables)["params"]
  optimizer = optim.make(config, params_spec, units)
  ema_decay = config.get("ema_decay")
  ema_start = settings.steps(config, "ema_start", units, default=0)

  def init_state() -> dict[str, Any]:
    """Everything that a checkpoint holds, as of step 0."""
    variables = init_variables()
    params = variables.pop("params")
    trained, _ = trees.partition(params, optimizer.trainable)
    state = {
      "params": params,
      "opt": optimizer.tx.init(trained),
      "step": jnp.zeros((), jnp.int32),
    }
    if variables:
      state["mutable"] = variables
    if ema_decay:
      state["ema"] = params
    return state

  # How the state lies on the devices.
  state_spec = jax.eval_shape(init_state)
  state_sharding, notes = sharding.state_shardings(
    state_spec, mesh, config.get("sharding", sharding.DEFAULT_RULES)
  )
  for note in notes:
    logging.warning("config.sharding: %s", note)
  state_spec = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state_spec,
    state_sharding,
  )

  # The update. `tally` sums metrics since the last row, on the device.
  nonfinite = config.get("nonfinite", "stop")
  metrics.check_nonfinite(nonfinite)
  weight_stats = config.get("weight_stats", "none")
  metrics.check_weight_stats(weight_stats)

  def logs(step: Any) -> Any:
    """Whether a row is written after `step`; works on device and host."""
    return (step == 1) | (step % log_steps == 0) | (step == total_steps)

  def update_fn(
    state: dict[str, Any], tally: metrics.Tally, batch: dict[str, jax.Array]
  ) -> tuple[dict[str, Any], metrics.Tally]:
    """One step: a new state, and the tally with this step's metrics."""
    _, step_rng = jax.random.split(jax.random.key(seed))
    rng = jax.random.fold_in(step_rng, state["step"])
    grads, pairs, mutable = train_step.gradients(
      loss_fn,
      state["params"],
      state.get("mutable", {}),
      batch,
      rng,
      trainable=optimizer.trainable,
      microbatches=microbatches,
      mesh=mesh,
    )
    trained, frozen = trees.partition(state["params"], optimizer.trainable)
    updates, opt = optimizer.tx.update(
      grads, state["opt"], trained, step=state["step"]
    )
    params = trees.merge(optax.apply_updates(trained, updates), frozen)
    step = state["step"] + 1
    new_state = {"params": params, "opt": opt, "step": step}
    if "mutable" in state:
      new_state["mutable"] = mutable
    if "ema" in state:
      new_state["ema"] = optim.ema_update(
        state["ema"], params, step - ema_start, ema_decay
      )
    # A step that is not finite never reaches the state.
    tally, good = metrics.count_step(
      tally, step, pairs, metrics.global_norm(grads), nonfinite
    )
    new_state = metrics.select(good, new_state, state, nonfinite)
    rates = {n: f(state["step"]) for n, f in optimizer.schedules.items()}
    # Norms cost a pass over the parameters: only for rows.
    stats = jax.lax.cond(
      logs(step),
      lambda: metrics.norms(params, grads, updates, weight_stats),
      lambda: metrics.no_norms(params, grads, updates, weight_stats),
    )
    tally = metrics.keep_last(tally, {**rates, **stats})
    return new_state, tally

  # What is evaluated, checked now and built when first due.
  console = writers.Console(total_steps)
  step = 0
  evaluations = evaluators.from_config(
    config,
    task.predict_fns(model),
    units,
    evaluators.Context(
      name="",
      workdir=workdir,
      mesh=mesh,
      batch_size=batch_size,
      pp_modules=pp_modules,
      step=lambda: step,
      progress=console.evaluation_progress,
    ),
    weights=("params", "ema") if ema_decay else ("params",),
  )
  return {}
