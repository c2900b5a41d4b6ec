"""Trains what a config describes, from the first flag to the last row.

  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits

One flat function, `train`, reads top to bottom: where it runs, what goes in,
the model, the optimizer, update_fn, what is evaluated, where it starts, the
loop. What differs between experiments stands in the config and behind seams
(tasks, models, evaluators, data sources, preprocessing ops, hooks), all found
by name. Nothing here knows any of them.
"""

from bigtrain.cluster import process

if __name__ == "__main__":
  process.catch_signals()  # The imports below take a second or two.

import collections
import contextlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from bigtrain import command, parts, settings, sharding, trees
from bigtrain import lengths as lengths_lib
from bigtrain.checkpoints import checkpointer as checkpointer_lib
from bigtrain.checkpoints import start as start_lib
from bigtrain.cluster import lease, watchdog
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.inputs import pipeline
from bigtrain.optim import chain
from bigtrain.reports import chrono, flops, footprint, record, row_log, writers
from bigtrain.runtime import debugging, hooks, host_memory
from bigtrain.runtime import programs as programs_lib
from bigtrain.step import gradients as gradients_lib
from bigtrain.step import guard
from bigtrain.step import tally as tally_lib

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
  plain = config.to_dict()
  host_memory.keep_freed()
  record.use_compile_cache(config.get("compile_cache", True))
  dog = watchdog.Watchdog(watchdog.read_limits(config), workdir)
  at_end.callback(dog.close)

  # Where it runs.
  process.join(config)
  process.require_same_run(lambda: record.identity(plain))
  mesh = sharding.from_config(config)
  at_end.enter_context(jax.set_mesh(mesh))
  logging.info("%s", record.topology(mesh))
  programs = programs_lib.from_config(config)
  at_end.enter_context(jax.debug_nans(programs.mode == "checked"))

  # What goes in. The batch of step s is a function of the config and s alone.
  seed = settings.whole_number(config, "seed", 0, least=0)
  batch_size = config.input.batch_size
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  microbatches = gradients_lib.read_microbatches(config, batch_size, mesh)
  pp_modules = config.get("pp_modules", ())
  train_input = pipeline.make_train(
    config.input, seed=seed, mesh=mesh, pp_modules=pp_modules
  )
  batch_spec = sharding.batch_spec(train_input.spec, mesh)
  lengths = lengths_lib.read(
    config,
    lengths_lib.Units(
      batch_size=batch_size,
      examples_per_epoch=train_input.num_examples,
      tokens_per_example=pipeline.tokens_per_example(batch_spec),
    ),
  )
  units = lengths.units

  # Task and model.
  task = parts.task(config)
  model_module, model = parts.model(config)
  vocab_sizes = parts.vocab_sizes(task, model)
  pipeline.check_vocab_sizes(
    train_input.vocab_sizes, vocab_sizes, "config.input"
  )
  loss_fn = parts.loss_fn(config, task, model)
  if config.get("debug_shapes", False):
    loss_fn = debugging.with_shapes(loss_fn)
  loss_fn = jax.jit(loss_fn)  # Is traced once, wherever it is called.
  in_two = gradients_lib.two_passes(task, model, config.kwargs("loss"))

  @jax.jit
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
  optimizer = chain.make(config, params_spec, units)
  ema_update = chain.make_ema(config, units)
  # How steps are guarded, and summed up in the tally, until there is a row.
  rules = tally_lib.from_config(config, lengths.makes_row)

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
      state["ema"] = chain.ema_init(params)
    if rules.loss_scale:
      state["loss_scale"] = rules.loss_scale.start()
    return state

  # How the state lies on the devices.
  state_spec = sharding.state_spec(
    jax.eval_shape(init_state),
    mesh,
    config.get("sharding", sharding.DEFAULT_RULES),
  )

  # The update.
  def gradients(state: dict[str, Any], batch: Any) -> Any:
    """(gradients, metric pairs, mutable) of the step after `state`."""
    _, step_rng = jax.random.split(jax.random.key(seed))
    return gradients_lib.gradients(
      loss_fn,
      state["params"],
      state.get("mutable", {}),
      batch,
      jax.random.fold_in(step_rng, state["step"]),
      trainable=optimizer.trainable,
      microbatches=microbatches,
      mesh=mesh,
      loss_scale=state.get("loss_scale", {}).get("scale"),
      in_two=in_two,
    )

  def update_fn(
    state: dict[str, Any], tally: tally_lib.Tally, batch: Any
  ) -> tuple[dict[str, Any], tally_lib.Tally]:
    """One step: the next state, and the tally with this step in it."""
    done = state["step"]
    grads, pairs, mutable = gradients(state, batch)

    def advance() -> tuple[dict[str, Any], Any]:
      """(the state after an optimizer's step, what that has added)."""
      trained, frozen = trees.partition(state["params"], optimizer.trainable)
      added, opt = optimizer.tx.update(grads, state["opt"], trained, step=done)
      params = trees.merge(optax.apply_updates(trained, added), frozen)
      new_state = {"params": params, "opt": opt, "step": done + 1}
      if "mutable" in state:
        new_state["mutable"] = mutable
      if "ema" in state:
        new_state["ema"] = ema_update(state["ema"], params, done)
      return new_state, added

    rates = {name: rate(done) for name, rate in optimizer.schedules.items()}
    return rules.settle(state, advance, tally, grads, pairs=pairs, rates=rates)

  loss_args = gradients_lib.loss_args(state_spec, batch_spec, mesh)
  pairs_spec, _ = jax.eval_shape(loss_fn, *loss_args)
  trained_spec, _ = trees.partition(params_spec, optimizer.trainable)
  tally_spec = rules.spec(
    state_spec, trained_spec, pairs=pairs_spec, rates=optimizer.schedules
  )

  # What is evaluated: checked now, built when it is first due.
  console = writers.Console(lengths.total, process_index=jax.process_index())

  def evaluation_progress(done: int, batches: int) -> None:
    """After each batch of an evaluation."""
    dog.beat()
    console.evaluation_progress(done, batches)
    if process.preempted():
      raise process.Preempted(f"evaluating step {step}, which is saved")

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
      vocab_sizes=vocab_sizes,
      compile=programs.compile,
    ),
    weights=start_lib.evaluated(state_spec),
  )
  run_hooks = hooks.from_config(config, workdir)

  # What remains of the config. After this, a key that nobody knows is told.
  origin = start_lib.read(config)
  saving: dict[str, Any] = dict(
    keep=settings.whole_number(config, "keep_ckpts", 2, least=1),
    keep_every_steps=lengths.keep_ckpt,
    config_digest=settings.digest(plain),
  )
  writing = dict(
    tensorboard=config.get("tensorboard", True),
    wandb=config.kwargs("wandb") if config.get("wandb") else None,
  )
  peak = config.get("peak_flops_per_device") or flops.peak_flops(
    mesh.devices.flat[0]
  )
  eval_only = config.get("eval_only", False)
  compile_only = config.get("compile_only", False)
  step_flops = flops.train_flops(flops.forward_flops(loss_fn, *loss_args))
  unknown = config.unread()
  if unknown:
    raise settings.ConfigError(" ".join(unknown))

  # From here on files are written, and the workdir is this job's alone.
  checkpointer_lib.check_writable(workdir)
  held = lease.acquire(workdir) if jax.process_index() == 0 else None
  at_end.callback(held.release if held else lambda: None)
  process.at_abrupt_end(held.release if held else lambda: None)
  at_end.callback(console.close)
  console.status("starting")
  clock = chrono.Chrono(
    **lengths.about(),
    flops_per_step=step_flops,
    peak_flops_per_device=peak,
    num_devices=mesh.size,
  )

  # The update compiles while the state is read or made.
  dog.enter("compile", 0)
  state_sharding = jax.tree.map(lambda x: x.sharding, state_spec)
  compiling = process.Background(
    programs.lower(
      "update",
      update_fn,
      *(state_spec, tally_spec, batch_spec),
      donate_argnums=0,
      out_shardings=(state_sharding, sharding.replicated(mesh)),
    )
    if not eval_only
    else lambda: None
  )

  def write_record() -> None:
    """What is known of the run before its first step."""
    record.start(workdir, plain, mesh, params_spec, optimizer.trainable)

  facts: dict[str, Any] = {"model_flops_per_step": step_flops}
  if compile_only:
    write_record()
    update = compiling.result()
    facts["programs"] = {"update": programs.facts("update")}
    facts["footprint"] = footprint.measure(
      update, update_fn, state_spec, tally_spec, batch_spec, lengths
    )
    record.update(workdir, **facts)
    return {"step": 0}
  begun = start_lib.start(
    *(origin, workdir, plain, state_spec, init_state, model_module),
    fingerprints=train_input.fingerprints,
  )
  state, step = begun.state, begun.step
  recording = process.Background(write_record)
  logging.info("Step %d of %d, %s.", step, lengths.total, begun.how)
  # Rolling back passes over batches: from then on they run ahead of the steps.
  ahead = begun.host.get("batches_ahead", 0)
  ahead += sum(e.step - step for e in rollbacks if e.restart == step)
  batches = train_input.start(step + ahead, lengths.last + ahead)
  at_end.callback(batches.close)
  writer = writers.Writers(
    workdir,
    restored_step=step if begun.resumed else None,
    process_index=jax.process_index(),
    console=console,
    **writing,
  )
  at_end.callback(writer.close)
  checkpointer = checkpointer_lib.Checkpointer(
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
    recording.result()

  # What the loop does at some steps.
  saved_step = step if begun.resumed else None
  builder = programs_lib.Builder({e.name: e.build for e in evaluations}, mesh)
  at_end.callback(builder.close)

  def check_finite(values: tally_lib.Tally) -> None:
    """Raises if the guard kept more steps out of the state than it may."""
    bad_step = int(values["bad_step"])
    if rules.policy == "skip":
      guard.check_skipped(int(values["skipped"]), bad_step, rules.most_bad)
    elif bad_step:
      index = bad_step - 1 + ahead
      error = guard.explain(bad_step, index, state, train_input, gradients)
      again = rules.policy == "rollback" and len(rollbacks) < rules.most_bad
      if again and saved_step is not None:
        raise guard.Rollback(error, bad_step, saved_step)
      raise error

  books = row_log.RowLog(
    workdir,
    writer,
    run_hooks,
    clock,
    programs,
    check_finite,
    facts=facts,
  )

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
    run_hooks.call("before_save", step)
    with clock.account("save"):
      wait_for_save()
      host = {
        "config": record.as_json(plain),
        "tally": tally_lib.to_host(values),
        "clock": clock.state(),
        "hooks": run_hooks.state(),
        "batches_ahead": ahead,
        "fingerprints": train_input.fingerprints,
      }
      checkpointer.save(step, state, host, keep_steps=run_hooks.keep_steps())
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
      evaluator = builder.get(evaluation.name)
      variables = start_lib.evaluated(state)[evaluation.weights]
      results = evaluator.run(variables, step)
      results["secs"] = time.monotonic() - began
    books.note(evaluation.name)
    names = {f"{evaluation.name}/{k}": v for k, v in results.items()}
    books.write({"step": step, **names})
    if run_hooks.wants_save(step) and saved_step != step and not eval_only:
      save()
    console.status("training")

  if lengths.save_at_start and step == 0 and not (begun.resumed or eval_only):
    save()
  # A run that was cut off in its evaluations finishes them first. Results
  # that are there came after the checkpoint, so the hooks forgot them.
  begins = begun.resumed or step == 0
  due = [e for e in evaluations if begins and e.due(step, lengths.total)]
  rows = {row["step"]: row for row in writers.read_rows(workdir)}
  books.take_over(rows.values())
  for evaluation in evaluations if eval_only else due:
    row = {} if eval_only else rows.get(step, {})
    if results := {k: v for k, v in row.items() if evaluation.owns(k)}:
      books.show({"step": step, **results})
    else:
      evaluate(evaluation)
  if eval_only:
    writer.flush()
    return books.newest

  # The loop: update, log, save, evaluate, decide. The device is waited for
  # where its results are needed, and else only to stay a few steps ahead.
  clock.start(step)
  console.status("training")
  first_step = step
  run_hooks.call("before_train", step)
  in_flight: collections.deque[Any] = collections.deque()
  interrupted = False
  while step < lengths.last and not run_hooks.stopped and not interrupted:
    dog.enter("step", step + 1)
    run_hooks.call("before_step", step + 1)
    waiting = time.monotonic()
    batch = next(batches)
    clock.data_wait(time.monotonic() - waiting)
    process.dispatches()
    state, tally = update(state, tally, batch)
    step += 1
    console.step(step)
    if step == first_step + 1:
      jax.block_until_ready(tally)
      clock.warm(step)
      last, total = lengths.last, lengths.total
      builder.start(e.name for e in evaluations if e.due_later(step, last, total))
    in_flight.append(tally["skipped"])
    if len(in_flight) > _STEPS_IN_FLIGHT:
      in_flight.popleft().block_until_ready()

    books.flush_row()  # That of an earlier step: the next is under way.
    if lengths.makes_row(step):
      books.queue_row(step, tally)
      clock.completes(step, tally["skipped"].block_until_ready)
    saves = lengths.saves(step)
    due = [e for e in evaluations if e.due(step, lengths.total)]
    if saves or due:
      books.flush_row()
    if saves:
      save()
    try:
      for evaluation in due:
        evaluate(evaluation)
      interrupted = process.preempted() and step < lengths.last
    except process.Preempted:
      interrupted = True  # The next start finds what results are missing.
    checkpointer.check()
    builder.check()

  books.flush_row()
  stop = run_hooks.stopped
  if stop and stop.failure:
    raise RuntimeError(stop.reason)
  if saved_step != step:
    save()
  dog.enter("save", step)
  console.status("saving")
  with clock.account("save"):
    wait_for_save()
  run_hooks.call("after_train", step)
  if lengths.makes_row(step):  # Else an undisturbed run has no such row.
    writer.write({"step": step, **clock.summary()})
  writer.flush()
  if interrupted:
    raise process.Preempted(f"saved step {step} of {lengths.total}")
  logging.info("%s at step %d.", stop.reason if stop else "Done", step)
  return books.newest


if __name__ == "__main__":
  command.run(train)
