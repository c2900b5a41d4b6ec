"""Trains what a config describes, from the first flag to the last row.

  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits

One flat function, `train`, reads top to bottom: where it runs, what goes in,
the model, the optimizer, update_fn, what is evaluated, where it starts, the
loop. What differs between experiments stands in the config and behind seams
(tasks, models, evaluators, data sources, preprocessing ops, hooks), all found
by name. Nothing here knows any of them.
"""

from bigtrain import cluster

if __name__ == "__main__":
  cluster.catch_signals()  # The imports below take a second or two.

import collections
import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from bigtrain import (
  checkpoint,
  chrono,
  command,
  flops,
  guard,
  hooks,
  host_memory,
  input_pipeline,
  lease,
  metrics,
  optim,
  record,
  settings,
  sharding,
  train_step,
  trees,
  watchdog,
  writers,
)
from bigtrain import start as start_lib
from bigtrain import tally as tally_lib
from bigtrain.evaluators import common as evaluators

# Steps that may be queued on the device: enough to keep it busy, few enough
# that batches do not pile up there and that a signal is obeyed soon.
_STEPS_IN_FLIGHT = 4


def train(config: Any, workdir: str) -> dict[str, Any]:
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
    NotFinite: a loss or gradient was NaN or infinite (config.nonfinite).
  """
  rollbacks: list[guard.Rollback] = []
  while True:
    try:
      with contextlib.ExitStack() as at_end:
        return _train(config, workdir, at_end, rollbacks)
    except guard.Rollback as e:
      logging.error("%s", e)
      rollbacks.append(e)


def _train(
  config: Any,
  workdir: str,
  at_end: contextlib.ExitStack,
  rollbacks: list[guard.Rollback],
) -> dict[str, Any]:
  """The program; what it opens is closed by `at_end`."""
  config = settings.Config(config)
  host_memory.keep_freed()
  record.use_compile_cache(config.get("compile_cache", True))
  dog = watchdog.Watchdog(watchdog.read_limits(config), workdir)
  at_end.callback(dog.close)

  # Where it runs.
  cluster.join(config)
  cluster.agree(lambda: record.identity(config.to_dict()))
  mesh = sharding.from_config(config)
  logging.info("%s", record.topology(mesh))

  # What goes in. The batch of step s is a function of the config and s alone.
  seed = settings.whole_number(config, "seed", 0, least=0)
  batch_size = config.input.batch_size
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  microbatches = config.get("microbatches", 1)
  train_step.check_microbatches(batch_size, microbatches, mesh)
  pp_modules = config.get("pp_modules", ())
  train_input = input_pipeline.make_train(
    config.input, seed=seed, mesh=mesh, pp_modules=pp_modules
  )
  batch_spec = {
    name: jax.ShapeDtypeStruct(
      spec.shape, spec.dtype, sharding=sharding.batch(mesh)
    )
    for name, spec in train_input.spec.items()
  }
  units = settings.Units(
    batch_size=batch_size,
    examples_per_epoch=train_input.num_examples,
    tokens_per_example=input_pipeline.tokens_per_example(batch_spec),
  )
  total_steps = settings.steps(config, "total", units)
  if not total_steps:
    raise settings.ConfigError(
      f"config.total_steps: missing{config.misspelled('total_steps')}; give "
      "total_steps, total_epochs, total_examples or total_tokens."
    )
  units = dataclasses.replace(units, total_steps=total_steps)
  # A length of 0 means: only at the end.
  log_steps = settings.steps(config, "log", units, 50) or total_steps
  ckpt_steps = settings.steps(config, "ckpt", units, 1000) or total_steps
  stop_at = settings.steps(config, "stop_at", units) or total_steps
  last_step = min(total_steps, stop_at)

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

  # Optimizer. Parameters that are frozen have no state there.
  params_spec = jax.eval_shape(init_variables)["params"]
  optimizer = optim.make(config, params_spec, units)
  ema_update = optim.make_ema(config, units)

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
    if ema_update:
      state["ema"] = optim.ema_init(params)
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

  # The update. `tally` sums metrics between rows, on the device.
  nonfinite = config.get("nonfinite", "stop")
  most_bad = config.get("max_nonfinite", 100 if nonfinite == "skip" else 3)
  tally_lib.check_policy(nonfinite)
  weight_stats = config.get("weight_stats", "global")
  metrics.check_detail(weight_stats)

  def makes_row(step: Any) -> Any:
    """Whether a row is written after `step`, on the device and the host."""
    return (step == 1) | (step % log_steps == 0) | (step == total_steps)

  def gradients(state: dict[str, Any], batch: Any) -> Any:
    """(gradients, metric pairs, mutable) of the step after `state`."""
    _, step_rng = jax.random.split(jax.random.key(seed))
    return train_step.gradients(
      loss_fn,
      state["params"],
      state.get("mutable", {}),
      batch,
      jax.random.fold_in(step_rng, state["step"]),
      trainable=optimizer.trainable,
      microbatches=microbatches,
      mesh=mesh,
    )

  def update_fn(
    state: dict[str, Any], tally: tally_lib.Tally, batch: Any
  ) -> tuple[dict[str, Any], tally_lib.Tally]:
    """One step: the next state, and the tally with this step in it."""
    done = state["step"]
    grads, pairs, mutable = gradients(state, batch)
    trained, frozen = trees.partition(state["params"], optimizer.trainable)
    updates, opt = optimizer.tx.update(grads, state["opt"], trained, step=done)
    params = trees.merge(optax.apply_updates(trained, updates), frozen)
    new_state = {"params": params, "opt": opt, "step": done + 1}
    if "mutable" in state:
      new_state["mutable"] = mutable
    if "ema" in state:
      new_state["ema"] = ema_update(state["ema"], params, done)
    # Norms of everything cost a pass over it, so only rows have them.
    norms = metrics.only_if(
      makes_row(done + 1),
      lambda: metrics.norms(params, grads, updates, weight_stats),
    )
    rates = {name: rate(done) for name, rate in optimizer.schedules.items()}
    tally, good = tally_lib.count(
      tally,
      step=done + 1,
      new_row=makes_row(done),
      pairs=pairs,
      grad_norm=metrics.global_norm(grads),
      last={**rates, **norms},
      policy=nonfinite,
    )
    return tally_lib.select(good, new_state, state, nonfinite), tally

  tally_spec = jax.eval_shape(update_fn, state_spec, None, batch_spec)[1]

  # What is evaluated: checked now, built when it is first due.
  console = writers.Console(total_steps, process_index=jax.process_index())

  def evaluation_progress(done: int, batches: int) -> None:
    """After each batch of an evaluation."""
    dog.beat()
    console.evaluation_progress(done, batches)
    if cluster.preempted():
      raise cluster.Preempted(f"evaluating step {step}, which is saved")

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
      progress=evaluation_progress,
    ),
    weights=("params", "ema") if ema_update else ("params",),
  )
  run_hooks = hooks.from_config(config, workdir)

  # What remains of the config. After this, a key that nobody knows is told.
  origin = start_lib.read(config)
  saving: dict[str, Any] = dict(
    keep=settings.whole_number(config, "keep_ckpts", 2, least=1),
    keep_every_steps=settings.steps(config, "keep_ckpt", units),
    config_digest=settings.digest(config.to_dict()),
  )
  writing = dict(
    tensorboard=config.get("tensorboard", True),
    wandb=config.kwargs("wandb") if config.get("wandb") else None,
  )
  peak = config.get("peak_flops_per_device") or flops.peak_flops(
    mesh.devices.flat[0]
  )
  step_flops = flops.of_step(loss_fn, state_spec, batch_spec)
  unknown = config.unread()
  if unknown:
    raise settings.ConfigError(" ".join(unknown))

  # From here on files are written, and the workdir is this job's alone.
  checkpoint.check_writable(workdir)
  held = lease.acquire(workdir) if jax.process_index() == 0 else None
  at_end.callback(held.release if held else lambda: None)
  cluster.at_abrupt_end(held.release if held else lambda: None)
  at_end.callback(console.close)
  console.status("starting")
  clock = chrono.Chrono(
    batch_size=batch_size,
    total_steps=total_steps,
    last_step=last_step,
    examples_per_epoch=units.examples_per_epoch,
    tokens_per_example=units.tokens_per_example,
    flops_per_step=step_flops,
    peak_flops_per_device=peak,
    num_devices=mesh.size,
  )

  # The update compiles while the state is read or made.
  compiling = cluster.Background(
    jax.jit(
      update_fn,
      donate_argnums=0,
      out_shardings=(state_sharding, sharding.replicated(mesh)),
    )
    .lower(state_spec, tally_spec, batch_spec)
    .compile
  )
  begun = start_lib.begin(
    origin, workdir, config.to_dict(), state_spec, init_state, model_module
  )
  state, step = begun.state, begun.step
  record.write(workdir, config.to_dict(), record.run_info(mesh))
  total = record.parameters(workdir, params_spec, optimizer.trainable)
  logging.info("%s; the table is in parameters.txt.", total)
  logging.info("Step %d of %d, %s.", step, total_steps, begun.how)
  # Rolling back passes over batches: from then on they run ahead of the steps.
  ahead = begun.host.get("batches_ahead", 0)
  ahead += sum(e.step - step for e in rollbacks if e.restart == step)
  batches = train_input.start(step + ahead, last_step + ahead)
  at_end.callback(batches.close)
  writer = writers.Writers(
    workdir,
    restored_step=step if begun.resumed else None,
    process_index=jax.process_index(),
    console=console,
    **writing,
  )
  at_end.callback(writer.close)
  checkpointer = checkpoint.Checkpointer(
    workdir, guard=held.check if held else None, **saving
  )
  at_end.callback(checkpointer.close)
  if "clock" in begun.host:
    clock.restore(begun.host["clock"], writer.last_alive)
  run_hooks.restore(begun.host.get("hooks", {}))
  tally = jax.device_put(
    tally_lib.from_host(begun.host.get("tally", {}), tally_spec),
    sharding.replicated(mesh),
  )
  dog.enter("compile", step)
  console.status("compiling")
  with clock.account("compile"):
    update = compiling.result()
  record.update(workdir, **record.compiled(update, step_flops))

  # What the loop does at some steps.
  newest: dict[str, Any] = {}
  stop: hooks.Stop | None = None
  row_due: tuple[int, Any] | None = None
  saved_step = step if begun.resumed else None
  built: dict[str, evaluators.Evaluator] = {}

  def write(row: dict[str, Any]) -> None:
    """Gives a row to the writers and to the hooks, which may stop the run."""
    nonlocal stop
    newest.update(row)
    writer.write(row)
    stop = stop or run_hooks.after_step(row["step"], row)

  def write_row() -> None:
    """Writes the row that is due, waiting for its step if need be."""
    nonlocal row_due
    if row_due:
      at, values = row_due
      row_due, values = None, jax.device_get(values)
      check_finite(values)
      write({"step": at, **tally_lib.row(values), **clock.row(at)})

  def check_finite(values: tally_lib.Tally) -> None:
    """Raises if the guard kept more steps out of the state than it may."""
    bad_step = int(values["bad_step"])
    if nonfinite == "skip":
      guard.check_skipped(int(values["skipped"]), bad_step, most_bad)
    elif bad_step:
      index = bad_step - 1 + ahead
      error = guard.explain(bad_step, index, state, train_input, gradients)
      if nonfinite == "rollback" and len(rollbacks) < most_bad and saved_step:
        raise guard.Rollback(error, bad_step, saved_step)
      raise error

  def wait_for_save() -> None:
    """Waits until no save is in flight, and notes how long it took."""
    checkpointer.wait()
    if checkpointer.last_saved_step is not None:
      clock.ckpt_written(checkpointer.last_write_secs)

  def save() -> None:
    """Starts to save; what the host knows goes along."""
    nonlocal saved_step
    dog.enter("save", step)
    console.status("saving")
    values = jax.device_get(tally)
    check_finite(values)
    writer.flush()  # The rows up to here must outlive the checkpoint.
    with clock.account("save"):
      wait_for_save()
      host = {
        "config": record.as_json(config.to_dict()),
        "tally": tally_lib.to_host(values),
        "clock": clock.state(),
        "hooks": run_hooks.state(),
        "batches_ahead": ahead,
      }
      checkpointer.save(step, state, host)
    saved_step = step
    console.status("training")

  def evaluate(evaluation: evaluators.Evaluation) -> None:
    """Runs one evaluation on the present state and writes its results."""
    dog.enter("evaluation", step)
    console.status(f"evaluating {evaluation.name}")
    began = time.monotonic()
    # Waits for the step; and if that was not finite, the state is older.
    check_finite(jax.device_get(tally))
    with clock.account("eval"):
      if evaluation.name not in built:
        built[evaluation.name] = evaluation.build()
      variables = {
        "params": state[evaluation.weights],
        **state.get("mutable", {}),
      }
      results = built[evaluation.name].run(variables, step)
      results["secs"] = time.monotonic() - began
    names = {f"{evaluation.name}/{k}": v for k, v in results.items()}
    write({"step": step, **names})
    console.status("training")

  # A run that was cut off in its evaluations finishes them first. Results
  # that are there came after the checkpoint, so the hooks forgot them.
  due = [e for e in evaluations if begun.resumed and e.due(step, total_steps)]
  rows = {row["step"]: row for row in writers.read_rows(workdir)}
  for row in rows.values():
    newest.update(row)
  for evaluation in due:
    row = rows.get(step, {})
    results = {k: v for k, v in row.items() if evaluation.owns(k)}
    if results:
      stop = stop or run_hooks.after_step(step, {"step": step, **results})
    else:
      evaluate(evaluation)

  # The loop: update, log, save, evaluate, decide. The device is waited for
  # where its results are needed, and else only to stay a few steps ahead.
  clock.start(step)
  console.status("training")
  first_step = step
  run_hooks.call("before_train", step)
  in_flight: collections.deque[Any] = collections.deque()
  interrupted = False
  while step < last_step and not stop and not interrupted:
    dog.enter("step", step + 1)
    run_hooks.call("before_step", step + 1)
    waiting = time.monotonic()
    batch = next(batches)
    clock.data_wait(time.monotonic() - waiting)
    state, tally = update(state, tally, batch)
    cluster.dispatched()
    step += 1
    console.step(step)
    if step == first_step + 1:
      jax.block_until_ready(tally)
      clock.warm(step)
    in_flight.append(tally["skipped"])
    if len(in_flight) > _STEPS_IN_FLIGHT:
      in_flight.popleft().block_until_ready()

    write_row()  # That of an earlier step, now that the next is under way.
    if makes_row(step):
      row_due = step, tally
    saves = step % ckpt_steps == 0 or step == last_step
    due = [e for e in evaluations if e.due(step, total_steps)]
    if saves or due:
      write_row()
    if saves:
      save()
    try:
      for evaluation in due:
        evaluate(evaluation)
      interrupted = cluster.preempted() and step < last_step
    except cluster.Preempted:
      interrupted = True  # The next start finds what results are missing.
    checkpointer.check()

  write_row()
  if stop and stop.failure:
    raise RuntimeError(stop.reason)
  if saved_step != step:
    save()
  dog.enter("save", step)
  with clock.account("save"):
    wait_for_save()
  run_hooks.call("after_train", step)
  if makes_row(step):  # Else an undisturbed run has no such row.
    writer.write({"step": step, **clock.summary()})
  writer.flush()
  if interrupted:
    raise cluster.Preempted(f"saved step {step} of {total_steps}")
  logging.info("%s at step %d.", stop.reason if stop else "Done", step)
  return newest


if __name__ == "__main__":
  command.run(train)
