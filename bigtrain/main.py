"""Trains the model that a config describes.

  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits

It reads top to bottom: devices, input, model, optimizer, update, evaluations,
start, loop. A config names the rest: tasks, models, evaluators, data and hooks.
"""

from bigtrain.cluster import process

if __name__ == "__main__":
  process.catch_signals()  # Before the imports below, which take a second.

import collections
import contextlib
import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging

from bigtrain import command, parts, settings, sharding, trees
from bigtrain import lengths as lengths_lib
from bigtrain import teacher as teacher_lib
from bigtrain.checkpoints import checkpointer as checkpointer_lib
from bigtrain.checkpoints import finished, folders
from bigtrain.checkpoints import start as start_lib
from bigtrain.checkpoints.manifest import HostState
from bigtrain.cluster import lease
from bigtrain.cluster import watchdog as watchdog_lib
from bigtrain.evaluation import evaluations as evaluations_lib
from bigtrain.files import paths
from bigtrain.inputs import pipeline
from bigtrain.optim import chain, views
from bigtrain.optim import ema as ema_lib
from bigtrain.reports import chrono, flops, footprint, record, writers
from bigtrain.runtime import (
  debugging,
  device_memory,
  host_memory,
  jax_flags,
  metrics_log,
  phases,
)
from bigtrain.runtime import hooks as hooks_lib
from bigtrain.runtime import interactive as interactive_lib
from bigtrain.runtime import programs as programs_lib
from bigtrain.step import gradients as gradients_lib
from bigtrain.step import guard as guard_lib
from bigtrain.step import hparams, initial, small_arrays
from bigtrain.step import norms as norms_lib
from bigtrain.step import tally as tally_lib

# Steps queued on the device: enough to keep it busy, few enough to stop soon.
_STEPS_IN_FLIGHT = 4


def train(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """Trains, evaluates and saves; resumes a run that was interrupted.

  Returns:
    The newest value of every metric, and "step".

  Raises:
    ConfigError: a mistake in the config or the data.
    Preempted, Interrupted: a signal or Ctrl-C ended the run after a save.
    NotFinite, Spike: a step that config.nonfinite or config.spikes rejects.
    OutOfMemory: of a device; the message has settings that fit.
  """
  workdir = paths.absolute(workdir)
  rollbacks: list[guard_lib.Rollback] = []
  while True:
    try:
      with contextlib.ExitStack() as at_end:
        at_end.enter_context(interactive_lib.session())
        return _train(config, workdir, at_end, rollbacks)
    except guard_lib.Rollback as e:
      logging.error("%s", e)
      e.add_to(rollbacks)
    except device_memory.OutOfMemory as e:
      device_memory.raise_with_advice(e, config, train)


def _train(
  config: Any,
  workdir: str,
  at_end: contextlib.ExitStack,
  rollbacks: list[guard_lib.Rollback],
) -> dict[str, Any]:
  """The program; `at_end` closes what it opens."""
  config = parts.with_published_sizes(settings.Config(config))
  plain = config.to_dict()
  host_memory.keep_freed()
  jax_flags.use_compile_cache(config.get("compile_cache", True))
  watchdog = watchdog_lib.Watchdog(watchdog_lib.read_limits(config), workdir)
  at_end.callback(watchdog.close)

  # Processes and devices.
  process.join_job(config)
  process.require_same_run(lambda: record.identity(plain))
  mesh = sharding.from_config(config)
  at_end.enter_context(jax.set_mesh(mesh))
  logging.info("%s", record.topology(mesh))
  programs = at_end.enter_context(programs_lib.of_run(config, mesh))

  # Input. The batch of step s is a function of the config and s alone.
  seed = settings.whole_number(config, "seed", 0, least=0)
  batch_size = config.input.batch_size
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  pp_modules = config.get("pp_modules", ())
  train_input = pipeline.make_train(
    config.input, seed=seed, mesh=mesh, pp_modules=pp_modules, run=config
  )
  batch_spec = sharding.batch_spec(train_input.spec, mesh)
  lengths = lengths_lib.read(
    config, batch_size, train_input.num_examples, train_input.tokens_per_example
  )

  # Task and model.
  task, (model_module, model) = parts.task(config), parts.model(config)
  vocab_sizes = parts.vocab_sizes(task, model)
  train_input.limit_ids(vocab_sizes)
  teacher = teacher_lib.from_config(config, task, batch_spec, mesh, seed)
  loss_fn = parts.loss_fn(config, task, model, teacher.model)
  loss_fn = jax.jit(debugging.instrument(config, loss_fn))  # Traced only once.
  init_variables = initial.variables_fn(task, model, batch_spec, seed)

  # Optimizer. It has no state for frozen parameters.
  params_spec = init_variables.spec()["params"]
  param_views = views.of_model(model_module, model, params_spec)
  optimizer = chain.make(config, params_spec, lengths.units, param_views)
  ema_update = ema_lib.from_config(config, lengths.units)
  numbers = hparams.Hparams(config, lengths, optimizer, ema_update)
  fixed_spec = {**teacher.spec, **numbers.spec(mesh)}
  guard = guard_lib.from_config(config, mesh)

  def init_state(seed: Any = seed) -> dict[str, Any]:
    """The train state of step 0: everything that a checkpoint holds."""
    variables = init_variables(seed)
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
      state["ema"] = ema_lib.init(params)
    if guard.loss_scale:
      state["loss_scale"] = guard.loss_scale.start()
    return state

  rules = initial.sharding_rules(config, init_variables, model_module, model)
  state_spec = sharding.state_spec(jax.eval_shape(init_state), mesh, rules)

  # The update.
  gradients = gradients_lib.from_config(
    config, task, model, loss_fn, trainable=optimizer.trainable, mesh=mesh
  )
  row_norms = norms_lib.from_config(config, params_spec, optimizer.trainable)
  small = small_arrays.SmallArrays(state_spec)

  def update_fn(
    state: dict[str, Any], tally: tally_lib.Tally, batch: Any, fixed: Any
  ) -> tuple[dict[str, Any], tally_lib.Tally]:
    """One step: the next state, and the tally with this step in it."""
    step = state["step"]  # Number of updates before this one.
    values = fixed["hparams"]
    makes_row = lengths.makes_row(step + 1, values["lengths"])

    # Gradients of the mean loss, and whether the step may change the state.
    grads, pairs, mutable = gradients({**state, **fixed}, batch)
    grad_norm = small.norm(grads)
    verdict = guard.judge(state, tally, pairs["loss"], grad_norm)

    @small.joined(state)  # The optimizer. Traced once for two calls.
    def advance() -> tuple[dict[str, Any], Any]:
      """(the next state, the updates of the trainable parameters)."""
      trained, frozen = trees.partition(state["params"], optimizer.trainable)
      extra = dict(step=step, values=values["optimizer"], grad_norm=grad_norm)
      extra["loss"] = pairs["loss"]
      updates, opt = optimizer.tx.update(grads, state["opt"], trained, **extra)
      params = trees.merge(optax.apply_updates(trained, updates), frozen)
      new_state = {"params": params, "opt": opt, "step": step + 1}
      if "mutable" in state:
        new_state["mutable"] = mutable
      if "ema" in state:
        new_state["ema"] = ema_update(state["ema"], params, step, values["ema"])
      return new_state, updates

    # Norms of the row, before the state changes in place.
    norms, verdict = row_norms.compute_if(
      makes_row, verdict, state["params"], grads, advance
    )

    # The new state after a good step, else the old one. The tally.
    new_state = guard.select(verdict, state, lambda: advance()[0])
    return new_state, tally_lib.add_step(
      *(tally, verdict),
      step=step + 1,
      new_row=lengths.makes_row(step, values["lengths"]),
      pairs=pairs,
      grad_norm=grad_norm,
      last=optimizer.rates(step, values["optimizer"]) | guard.row(new_state),
      norms=norms,
    )

  with_fixed = {**state_spec, **fixed_spec}
  loss_args = gradients_lib.loss_args(with_fixed, batch_spec, mesh)
  pairs_spec, _ = jax.eval_shape(loss_fn, *loss_args)
  last = [*optimizer.schedules, *guard.row(state_spec)]
  tally_spec = tally_lib.spec(pairs_spec, last, row_norms.spec(), guard.spikes)

  # Where the time goes, and who shows and limits it.
  step_flops = flops.step_flops(loss_fn, *loss_args)
  clock = chrono.Chrono(
    **lengths.about() | train_input.about(),
    flops_per_step=step_flops,
    peak_flops_per_device=flops.read_peak_flops(config, mesh.devices.flat[0]),
    num_devices=mesh.size,
  )
  console = writers.Console(lengths.total, process_index=jax.process_index())
  phase = phases.Phases(watchdog, console, clock)

  # Evaluations: checked now, built when they are first due. And hooks.
  predict_fns = parts.predict_fns(task, model, teacher.model)
  evaluations = evaluations_lib.from_config(
    config,
    predict_fns,
    lengths.units,
    evaluations_lib.Context(
      *("", workdir, mesh, batch_size, pp_modules, phase.evaluation_progress),
      vocab_sizes=vocab_sizes,
      class_names=train_input.saved["data"].get("class_names", {}),
      compile=programs.compile,
    ),
    weights=start_lib.evaluated(with_fixed),
  )
  hooks = hooks_lib.from_config(config, workdir, mesh, predict_fns, evaluations)

  # The rest of the config. Keys still unread at this point are errors.
  start_options = start_lib.read(config).check(workdir, model_module, model)
  saving = checkpointer_lib.read_options(config, lengths, workdir)
  loggers = writers.read_options(config)
  eval_only = config.get("eval_only", False)
  compile_only = config.get("compile_only", False)
  transfer_guard = debugging.transfer_guard(config)
  config.check_all_read()

  # From here on the run writes files, and the workdir is this job's alone.
  folders.check_writable(workdir)
  check_lease = at_end.enter_context(lease.hold(workdir))
  at_end.callback(console.close)
  console.status("starting")

  inputs = train_input.fingerprints
  results = finished.read(workdir, plain, inputs)
  if results and not (eval_only or compile_only):  # Nothing is left to do.
    return results

  # The update compiles while the state is read or initialised.
  watchdog.enter("compile", 0)
  specs = state_spec, tally_spec, batch_spec, fixed_spec
  state_sharding = jax.tree.map(lambda x: x.sharding, state_spec)
  compiled = process.Background(
    programs.lower(
      *("update", update_fn, *specs),
      donate_argnums=0,
      out_shardings=(state_sharding, sharding.replicated(mesh)),
    )
    if not eval_only
    else lambda: None
  )
  known = workdir, plain, mesh, optimizer.trainable
  facts: dict[str, Any] = {"model_flops_per_step": step_flops}
  if compile_only:
    record.start(*known, state_spec)()
    facts["footprint"] = footprint.measure(update_fn, *specs, lengths)
    record.update(workdir, **facts)  # Also if the program does not fit.
    record.compiled_update(workdir, compiled.result(), programs.facts("update"))
    return {"step": 0}

  # The start: resumed, continued from elsewhere, warm, or from scratch.
  start = start_lib.start(
    *(start_options, workdir, plain, state_spec, init_state, model_module),
    *(
      seed,
      train_input.fingerprints,
      functools.partial(programs.lower, limited=False),
      saving["local"],
    ),
    from_local=not rollbacks,
  )
  state, step, saved_step = start.state, start.step, start.saved_step
  fixed = {**teacher.load(), **numbers.arrays(mesh)}
  recording = process.Background(record.start(*known, state, start.how))
  logging.info("Step %d of %d, %s.", step, lengths.total, start.how)
  # A rollback skips batches for good, so from then on the batch index leads
  # the step by `ahead`.
  ahead = start.host.batches_ahead
  ahead += sum(e.step - step for e in rollbacks if e.restart == step)
  batches = train_input.start(step + ahead, lengths.last + ahead)
  at_end.callback(batches.close)
  writer = writers.Writers(
    *(workdir, start.restored_step, jax.process_index(), console), **loggers
  )
  at_end.callback(writer.close)
  checkpointer = checkpointer_lib.Checkpointer(workdir, check_lease, **saving)
  at_end.callback(checkpointer.close)
  clock.restore(start.host.clock, writer.last_alive)
  hooks.restore(start.host.hooks, step, state)
  tally = tally_lib.from_host(start.host.tally, tally_spec, mesh)
  with phase("compile", step):
    update, _ = compiled.result(), recording.result()

  # What the loop does at some steps: check, save, evaluate.
  builder = programs_lib.Builder({e.name: e.build for e in evaluations}, mesh)
  at_end.callback(builder.close)

  def check_finite(values: tally_lib.Tally) -> None:
    """Raises if the tally has a bad step, or too many skipped ones."""
    if bad_step := guard.bad_step(values):
      now = {**state, **fixed}
      details = bad_step, bad_step - 1 + ahead, now, train_input, gradients
      error = guard.spike(values) or guard_lib.explain(*details)
      raise guard.failure(error, bad_step, saved_step, len(rollbacks))

  log = metrics_log.MetricsLog(
    *(workdir, writer, hooks, clock, programs, check_finite), facts
  )

  def save(shared: bool = True) -> None:
    """Starts to save the state and the host's side of the run."""
    nonlocal saved_step
    log.flush()
    values = jax.device_get(tally)
    check_finite(values)
    with phase("save", step):
      writer.flush()  # The rows up to here must outlive the checkpoint.
      hooks.before_save(step)
      clock.ckpt_written(checkpointer.wait())
      host = HostState(
        config=record.as_json(plain),
        tally=tally_lib.to_host(values),
        clock=clock.state(),
        hooks=hooks.state(),
        batches_ahead=ahead,
        **train_input.saved,
      )
      saved = checkpointer.save(step, state, host, hooks.keep_steps(), shared)
      saved_step = saved if shared else saved_step

  def evaluate(evaluation: evaluations_lib.Evaluation) -> None:
    """Runs one evaluation on the present state and writes its results."""
    log.flush()
    began = time.monotonic()
    # Also waits for the step. After a bad step the state would be older.
    check_finite(jax.device_get(tally))
    with phase("evaluation", step, evaluation.name):
      evaluator = builder.get(evaluation.name)
      variables = start_lib.evaluated({**state, **fixed})[evaluation.weights]
      results = evaluator.run(variables, step)
      results["secs"] = time.monotonic() - began
    log.write_results(evaluation.name, step, results)
    if hooks.wants_save(step) and saved_step != step and not eval_only:
      save()

  def due() -> list[evaluations_lib.Evaluation]:
    """The evaluations of the present step, also those that hooks ask for."""
    total, asked = lengths.total, hooks.evaluations
    return [e for e in evaluations if e.due(step, total) or e.name in asked]

  if lengths.save_at_start and not (start.resumed or eval_only):
    save()
  # Finish the evaluations during which the run was interrupted. Results already
  # on disk are only replayed to the hooks, whose restored state is older.
  first = due() if start.resumed else [e for e in evaluations if e.at_start]
  for evaluation in evaluations if eval_only else first:
    if eval_only or not log.replay(step, evaluation.owns):
      evaluate(evaluation)
  if eval_only:
    writer.flush()
    return log.newest

  # The loop: update, log, save, evaluate, decide. It waits for the device only
  # where it needs results, and otherwise stays a few steps ahead.
  clock.start(step)
  at_end.push(hooks.after_train)
  at_end.enter_context(transfer_guard)
  hooks.before_train()
  in_flight, interrupted = collections.deque[Any](), False
  while step < lengths.last and not hooks.stopped and not interrupted:
    phase.step(step + 1)
    hooks.before_step(step + 1)
    with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
      with clock.account("data_wait"):
        batch = next(batches)
      process.host_work_done()
      state, tally = hooks.update(step + 1, update, state, tally, batch, fixed)
    step += 1
    hooks.after_step(step, state, tally)
    console.step(step)
    if step == start.step + 1:
      jax.block_until_ready(tally)
      clock.warm(step)
      ends = lengths.last, lengths.total
      builder.start(e.name for e in evaluations if e.due_later(step, *ends))
    in_flight.append(tally["skipped"])
    if len(in_flight) > _STEPS_IN_FLIGHT:
      in_flight.popleft().block_until_ready()

    # Writes the previous step's row while the device runs the next step.
    log.flush()
    if lengths.makes_row(step):
      log.queue(step, tally)
      clock.completes(step, tally["skipped"].block_until_ready)
    shared = lengths.saves(step) or hooks.wants_save(step)
    if shared or checkpointer.due_locally(step):
      save(shared)
    try:
      for evaluation in due():
        evaluate(evaluation)
      interrupted = process.preempted() and step < lengths.last
    except process.Preempted:
      interrupted = True  # The next start runs the missing evaluations.
    checkpointer.check()
    builder.check()

  # The end: a last row, and a checkpoint of the last step.
  log.flush()
  hooks.raise_failure()
  if saved_step != step:
    save()
  with phase("save", step):
    clock.ckpt_written(checkpointer.wait())
  if lengths.makes_row(step):  # Otherwise an undisturbed run has no such row.
    writer.write({"step": step, **clock.summary()})
  writer.flush()
  if interrupted:
    done = "saved" if saved_step == step else "stopped, with nothing saved, at"
    raise process.Preempted(f"{done} step {step} of {lengths.total}")
  checkpointer.remove_local()
  logging.info("%s at step %d.", hooks.stop_reason or "Done", step)
  if jax.process_index() == 0:
    results = log.newest | {"step": step}
    finished.write(workdir, plain, inputs, results, hooks.stop_reason)
  return log.newest


if __name__ == "__main__":
  command.run(train)
