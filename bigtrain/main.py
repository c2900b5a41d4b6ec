"""Trains the model that a config describes.

  python -m bigtrain.main --config=configs/digits.py --workdir=runs/digits

`_train` reads top to bottom, in the order in which things happen: devices,
input, objective, optimizer, update, evaluations, start, loop. Everything that
differs between experiments is in modules that a config names: tasks, models,
evaluators, data sources and hooks. The objective is all that a config says
about learning: the task, the model, and whatever their gradients need
(objective/objective.py).
"""

from bigtrain.cluster import process

if __name__ == "__main__":
  process.catch_signals()  # Before the imports below, which take a second.

import collections
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from bigtrain import command, metrics, sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, TrainState, Variables
from bigtrain.checkpoints import checkpointer, finished, folders, start
from bigtrain.checkpoints.manifest import HostState
from bigtrain.cluster import lease, watchdog
from bigtrain.config import lengths, settings
from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.inputs import pipeline
from bigtrain.objective import new_rows, published_sizes
from bigtrain.objective import objective as objectives
from bigtrain.optim import chain, ema
from bigtrain.reports import loggers, record, run_files, writers
from bigtrain.runtime import (
  debugging,
  hooks,
  host_memory,
  interactive,
  jax_flags,
  metrics_log,
  no_workdir,
  phases,
  programs,
)
from bigtrain.runtime.run import Run
from bigtrain.step import frozen, guard, keys, norms, running_metrics
from bigtrain.step.norms import NamedScalars
from bigtrain.step.running_metrics import RunningMetrics

# Steps that the loop dispatches before it waits for the first of them: enough
# to keep the device busy, few enough to stop soon after a signal.
_STEPS_IN_FLIGHT = 4

# What may be called in place of the training, with (the run, update_fn, specs
# of update_fn's arguments, a function that compiles it).
OnUpdate = Callable[[Run, Callable[..., Any], Any, Callable[[], Any]], Any]


def train(
  config: Any,
  workdir: str | os.PathLike[str] | None = None,
  *,
  on_update: OnUpdate | None = None,
) -> Any:
  """Trains, evaluates and saves; resumes a run that was interrupted.

  Args:
    config: what a config file's get_config returns.
    workdir: folder of the run's files; without one, it keeps none.
    on_update: called in place of the training, as soon as the update is
      defined; the run then writes no files. tools.plan and the benchmarks look
      at the update in this way.

  Returns:
    The newest value of every metric, and "step"; or the result of `on_update`.

  Raises:
    ConfigError: a mistake in the config or the data.
    Preempted, Interrupted: a signal or Ctrl-C ended the run after a save.
    NotFinite, Spike: a step that config.nonfinite or config.spikes rejects.
    OutOfMemory: on a device; the message has the command that finds what fits.
  """
  if workdir is None:
    with no_workdir.folder(config) as (config, folder):
      return train(config, folder, on_update=on_update)
  workdir = paths.absolute(workdir)
  rollbacks: list[guard.Rollback] = []
  while True:  # Once, and again after each rollback.
    try:
      with contextlib.ExitStack() as at_end:
        at_end.enter_context(interactive.session())
        return _train(config, workdir, at_end, rollbacks, on_update)
    except guard.Rollback as e:
      logging.error("%s", e)
      e.add_to(rollbacks)


def _train(
  config: Any,
  workdir: str,
  at_end: contextlib.ExitStack,
  rollbacks: list[guard.Rollback],
  on_update: OnUpdate | None,
) -> Any:
  """One attempt of `train`; `at_end` closes everything that it opens."""
  config = published_sizes.with_published_sizes(settings.Config(config))
  host_memory.keep_freed()  # Before jax uses a device.
  limits = watchdog.Watchdog(watchdog.read_limits(config), workdir)
  at_end.callback(limits.close)

  # ======================= Processes and devices ==============================

  process.join_job(config)
  jax_flags.use_compile_cache(config.get("compile_cache", True))
  # Processes that differ in config or code would wait for each other for ever.
  process.require_same_run(lambda: record.identity(config.to_dict()))
  mesh = sharding.from_config(config)
  at_end.enter_context(jax.set_mesh(mesh))
  replicated = sharding.replicated(mesh)
  logging.info("%s", record.topology(mesh))

  # ================================ Input =====================================
  # The batch of step s is a function of the config and s alone.

  seed = settings.whole_number(config, "seed", 0, least=0)
  train_input = pipeline.from_config(config, seed, mesh)
  # If the data has more tokens than config.model_init, the model gets more
  # rows.
  config = new_rows.with_new_rows(config, train_input)
  run = Run(
    config=config,
    plain=config.to_dict(),
    workdir=workdir,
    mesh=mesh,
    programs=at_end.enter_context(programs.of_run(config, mesh)),
    seed=seed,
    batch_size=train_input.batch_size,
    lengths=lengths.read(
      config,
      train_input.batch_size,
      train_input.num_examples,
      train_input.tokens_per_example,
    ),
  )

  # ============================== Objective ===================================
  # The tasks, the model, and everything else that the gradients need, such as a
  # teacher or the frozen base of adapters.

  objective = objectives.from_config(
    config, train_input, mesh, seed, run.lengths.units
  )

  # ============================== Optimizer ===================================
  # Gradients, optimizer state and updates exist for the trainable parameters
  # only, which `optimizer.trainable` says.

  optimizer = chain.make(
    config,
    objective.params_spec,
    run.lengths.units,
    objective.param_views,
    mask=objective.trained_rows.masked,
    qk_clip=objective.qk_clip and objective.qk_clip.clipped,
  )
  ema_update = ema.from_config(config, run.lengths.units)
  step_guard = guard.from_config(config, mesh)

  def init_state(seed: Any = seed) -> TrainState:
    """The train state of step 0: everything that a checkpoint holds."""
    variables = objective.init(seed)
    params = variables.pop("params")  # The rest are mutable collections.
    trained, _ = trees.partition(params, optimizer.trainable)
    state = {
      "params": params,
      "opt": optimizer.tx.init(trained),
      "step": jnp.zeros((), jnp.int32),
    }
    if variables:
      state["mutable"] = variables
    state |= objective.init_task_state(params)
    if ema_update:
      state["ema"] = ema.init(params)
    if step_guard.loss_scale:
      state["loss_scale"] = step_guard.loss_scale.start()
    return state

  state_spec = sharding.state_spec(
    jax.eval_shape(init_state), mesh, objective.sharding_rules
  )

  def hparams_of(step: int) -> dict[str, Any]:
    """What differs between steps besides the data: scalars, for the update.

    Everything else in a config is a constant of the compiled update.
    """
    return {
      "seed": keys.seed_word(seed),
      "log_step": np.bool_(run.lengths.is_log_step(step + 1)),
      "after_log_step": np.bool_(run.lengths.is_log_step(step)),
      **optimizer.hparams(step),
      **objective.hparams(step),
    }

  # =============================== Update =====================================

  compute_gradients = objective.gradients_fn(optimizer.trainable)
  log_norms = norms.from_config(
    config, objective.params_spec, optimizer.trainable
  )

  def update_fn(
    state: TrainState,
    running: RunningMetrics,
    batch: Batch,
    hparams: dict[str, Any],
    frozen_state: Mapping[str, Variables],
  ) -> tuple[TrainState, RunningMetrics]:
    """One step: the next state, and the metrics since the last log step.

    `frozen_state` holds variables that never change: a teacher's, or a base.
    """
    step = state["step"]  # Number of updates before this one.
    with_norms = log_norms.due(hparams["log_step"])
    no_norms = log_norms.zeros()

    # Gradients of the mean loss over the global batch, in microbatches or not.
    grads, step_metrics, mutable = compute_gradients(
      {**state, **frozen_state, **hparams}, batch
    )
    grad_norm = metrics.global_norm(grads)

    # The verdict: whether this step may change the state. It may not if loss or
    # gradients are not finite, or if it is a spike that config.spikes refuses.
    loss = step_metrics["loss"]
    verdict = step_guard.judge(state, running, loss, grad_norm)

    # The optimizer, as a function, so that the guard can leave it out of a bad
    # step. `with_norms` is static here.
    def advance(with_norms: bool) -> tuple[TrainState, NamedScalars]:
      trained, frozen = trees.partition(state["params"], optimizer.trainable)
      updates, opt = optimizer.tx.update(
        grads,
        state["opt"],
        trained,
        step=step,
        hparams=hparams,
        loss=loss,
        grad_norm=grad_norm,
        logits=mutable.get("step_largest"),
      )
      params = trees.merge(optax.apply_updates(trained, updates), frozen)
      new_state = {"params": params, "opt": opt, "step": step + 1}
      new_state |= objective.next_variables(state, mutable, params, hparams)
      if ema_update:
        new_state["ema"] = ema_update(state["ema"], params, step)
      if not with_norms:
        return new_state, no_norms
      return new_state, log_norms(state["params"], params, grads, updates)

    # The new state after a good step, or else the old one.
    new_state, step_norms = step_guard.run(
      verdict, state, advance, log_norms=with_norms, no_norms=no_norms
    )

    # The metrics since the last log step.
    return new_state, running_metrics.add_step(
      running,
      verdict,
      step=step + 1,
      after_log=hparams["after_log_step"],
      step_metrics=step_metrics,
      grad_norm=grad_norm,
      last=hparams["lr"] | step_guard.log_values(new_state),
      log_norms=with_norms,
      step_norms=step_norms,
    )

  # Log entries have means of the metrics, and the newest learning rates and
  # loss scale.
  running_spec = running_metrics.spec(
    objective.metrics_spec(),
    [*optimizer.hparams(0)["lr"], *step_guard.log_values(state_spec)],
    log_norms,
    step_guard.spikes,
  )

  # The update is compiled once for each combination of tasks and batch size
  # that steps have; the largest is the last.
  update_specs = [
    (state_spec, running_spec, batch_spec, hparams_spec, objective.frozen_spec)
    for batch_spec, hparams_spec in objective.step_specs(hparams_of)
  ]
  # Traces the update for some of these specs, and returns a function that
  # compiles it. The new state takes the memory of the old one, which is
  # donated.
  lower_update = functools.partial(
    run.programs.lower_each,
    "update",
    update_fn,
    argnums=(2, 3),
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda x: x.sharding, state_spec), replicated),
  )

  # ======================= Evaluations and hooks ==============================
  # Their part of the config is checked now. Evaluators are built later: in the
  # background while the run trains, or at the latest when they are due.

  phase = phases.from_run(
    run, limits, train_input.about(), objective.flops_per_step
  )
  run_evaluations = evaluations.from_config(
    config,
    objective.predict_fns,
    run.lengths.units,
    evaluations.Context(
      name="",
      workdir=workdir,
      mesh=mesh,
      batch_size=run.batch_size,
      pp_modules=config.get("pp_modules", ()),
      progress=phase.evaluation_progress,
      vocab_sizes=objective.vocab_sizes,
      class_names=train_input.saved["data"].get("class_names", {}),
      compile=run.programs.compile,
    ),
    weights=start.evaluated({**state_spec, **objective.frozen_spec}),
  )
  run_hooks = hooks.from_config(
    config,
    workdir,
    mesh,
    objective.predict_fns,
    run_evaluations,
    objective.checks,
  )

  # The rest of the config. Keys still unread at this point are errors.
  start_options = start.read(config)
  start_options.check(workdir, objective.model_module, objective.model)
  saving = checkpointer.read_options(config, run.lengths, workdir)
  run_loggers = loggers.from_config(config)
  log_parameters = config.get("log_parameters", False)
  eval_only = config.get("eval_only", False)
  transfers = debugging.Transfers.read(config)
  config.check_all_read()
  if on_update:
    return on_update(
      run,
      update_fn,
      update_specs[-1],
      lambda: lower_update(update_specs[-1:])(),
    )

  # ================================ Start =====================================
  # From here on the run writes files. The lease keeps other jobs from using the
  # same workdir.

  record.log_summary(run.plain, run.lengths.units)
  folders.check_writable(workdir)
  check_lease = at_end.enter_context(lease.hold(workdir))
  at_end.callback(phase.console.close)
  phase.console.status("starting")

  results = finished.read(workdir, run.plain, train_input.fingerprints)
  if results and not eval_only:  # The run has finished before.
    return results

  # The update compiles in a thread while the state is read or initialised.
  limits.enter("compile", 0)
  compiled = process.Background(
    (lambda: None) if eval_only else lower_update(update_specs),
    "compile",
  )

  # The state comes from the first of these that exists: the newest checkpoint
  # of this workdir, config.resume, config.model_init, the seed.
  frozen_state = objective.load_frozen()
  started = start.start(
    start_options,
    workdir,
    run.plain,
    state_spec={**state_spec, **objective.rollout.saved_spec},
    init_state=lambda seed: {**init_state(seed), **objective.rollout.no_set()},
    model_module=objective.model_module,
    seed=seed,
    fingerprints=train_input.fingerprints,
    lower=functools.partial(run.programs.lower, limited=False),
    local=saving["local"],
    from_local=not rollbacks,
    base=objective.base.saved,
    begin=objective.base.begin,
    init_tasks=objective.init_task_state,
  )
  state, step, saved_step = started.state, started.step, started.saved_step
  state = objective.rollout.restore(state)
  recording = process.Background(
    record.start(
      workdir,
      run.plain,
      mesh,
      optimizer.trainable,
      state,
      origin=started.how,
      log_table=log_parameters,
      first_example=train_input.saved["data"].get("first_example", ()),
      param_dims=objective.param_dims,
    ),
    "record",
  )
  logging.info("Step %d of %d, %s.", step, run.lengths.total, started.how)
  # The update of step s + 1 uses batch s + `ahead`. A rollback skips batches
  # for good, so `ahead` is the number of batches that rollbacks have skipped:
  # those known to the checkpoint, and those of a rollback to this very step.
  ahead = started.host.batches_ahead
  ahead += sum(e.step - step for e in rollbacks if e.restart == step)
  batches = objective.rollout.start(
    step + ahead, run.lengths.last + ahead, ahead
  )
  at_end.callback(batches.close)
  writer = writers.Writers(
    workdir,
    started.restored_step,
    jax.process_index(),
    phase.console,
    run_loggers,
  )
  at_end.callback(writer.close)
  saver = checkpointer.Checkpointer(workdir, check_lease, **saving)
  at_end.callback(saver.close)
  phase.clock.restore(started.host.clock, writer.last_alive)
  run_hooks.restore(started.host.hooks, step, state, frozen_state)
  running = running_metrics.from_host(started.host.tally, running_spec, mesh)
  with phase("compile", step):
    recording.result()
    objective.rollout.compile(run.programs)
    update = compiled.result()

  # What the loop does at some steps: check, save, evaluate. Evaluators are
  # built in the background, one after the other.
  builder = programs.Builder({e.name: e.build for e in run_evaluations}, mesh)
  at_end.callback(builder.close)

  def variables() -> Variables:
    """The model's variables after the current step."""
    return frozen.model_variables({**state, **frozen_state})

  def check_finite(fetched: RunningMetrics) -> None:
    """Raises if the guard has seen a bad step, or has skipped too many."""
    bad_step = step_guard.bad_step(fetched)
    if not bad_step:
      return
    error = step_guard.spike(fetched) or guard.explain(
      bad_step,
      bad_step - 1 + ahead,
      {**state, **frozen_state, **hparams_of(bad_step - 1)},
      train_input,
      compute_gradients,
      objective.rollout,
      variables(),
    )
    alike = sum(type(e.error) is type(error) for e in rollbacks)
    raise step_guard.failure(error, bad_step, saved_step, alike)

  log = metrics_log.MetricsLog(
    workdir,
    writer,
    run_hooks,
    phase.clock,
    run.programs,
    check_finite,
    facts={"model_flops_per_step": objective.flops_per_step},
  )

  def save(shared: bool = True) -> None:
    """Starts to save the state and the host's side of the run."""
    nonlocal saved_step
    log.flush()
    fetched = jax.device_get(running)
    check_finite(fetched)
    with phase("save", step):
      writer.flush()  # The entries up to here must outlive the checkpoint.
      run_hooks.before_save(step)
      phase.clock.ckpt_written(saver.wait())
      host = HostState(
        config=run_files.as_json(run.plain),
        tally=running_metrics.to_host(fetched),
        clock=phase.clock.state(),
        hooks=run_hooks.state(),
        batches_ahead=ahead,
        base=objective.base.saved,
        **train_input.saved,
      )
      tree = {**state, **objective.rollout.saved}
      saved = saver.save(step, tree, host, run_hooks.keep_steps(), shared)
      saved_step = saved if shared else saved_step

  def evaluate(evaluation: evaluations.Evaluation) -> None:
    """Runs one evaluation on the present state and writes its results."""
    log.flush()
    began = time.monotonic()
    # This also waits for the step. After a bad step, the guard has kept an
    # older state, whose results must not count as this step's.
    check_finite(jax.device_get(running))
    with phase("evaluation", step, evaluation.name):
      evaluator = builder.get(evaluation.name)
      variables = start.evaluated({**state, **frozen_state})
      results = evaluator.run(variables[evaluation.weights], step)
      results["secs"] = time.monotonic() - began
    log.write_results(evaluation.name, step, results)
    if run_hooks.wants_save(step) and saved_step != step and not eval_only:
      save()

  def due() -> list[evaluations.Evaluation]:
    """The evaluations of the present step, also those that hooks ask for."""
    if eval_only:
      return run_evaluations
    begins = step == started.step and not started.resumed
    return [
      e
      for e in run_evaluations
      if (e.at_start if begins else e.due(step, run.lengths.total))
      or e.name in run_hooks.evaluations
    ]

  if run.lengths.save_at_start and not (started.resumed or eval_only):
    save()
  # Finish the evaluations during which the run was interrupted. Results already
  # on disk are only replayed to the hooks, whose restored state is older.
  for evaluation in due():
    if eval_only or not log.replay(step, evaluation.owns):
      evaluate(evaluation)
  if eval_only:
    writer.flush()
    return log.newest

  # ================================= Loop =====================================
  # Update, log, save, evaluate, decide. The loop waits for the device only
  # where it needs results, and otherwise dispatches a few steps ahead.

  phase.clock.start(step)
  at_end.push(run_hooks.after_train)  # Called with the exception, if any.
  at_end.enter_context(transfers.guard())
  run_hooks.before_train()
  in_flight, interrupted = collections.deque[Any](), False
  while step < run.lengths.last and not run_hooks.stopped and not interrupted:
    phase.step(step + 1)
    run_hooks.before_step(step + 1)
    with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
      if objective.rollout.writes(step + ahead):
        # The rollout needs the weights after the last step. Waiting for them
        # here keeps this time out of the wait for data.
        jax.block_until_ready(running)
      with phase.batch(step + 1, objective.rollout.writes(step + ahead)):
        batch = objective.rollout(variables(), batches, step + ahead)
      process.host_work_done()
      state, running = run_hooks.update(
        step + 1,
        update,
        state,
        running,
        batch,
        transfers.place(hparams_of(step), replicated),
        frozen_state,
      )
    step += 1
    run_hooks.after_step(step, state, running)
    phase.console.step(step)
    if step == started.step + 1:  # Speeds do not include this first step.
      jax.block_until_ready(running)
      phase.clock.warm(step)
      builder.start(
        e.name
        for e in run_evaluations
        if e.due_later(step, run.lengths.last, run.lengths.total)
      )
    # Any result of a step says when the step is done; this one is a scalar.
    in_flight.append(running["skipped"])
    if len(in_flight) > _STEPS_IN_FLIGHT:
      in_flight.popleft().block_until_ready()

    # Writes the previous log entry while the device runs the next step.
    log.flush()
    if run.lengths.is_log_step(step):
      log.queue(step, running, objective.rollout.report())
      phase.clock.completes(step, running["skipped"].block_until_ready)
    shared = run.lengths.saves(step) or run_hooks.wants_save(step)
    if shared or saver.due_locally(step):
      save(shared)
    try:
      for evaluation in due():
        evaluate(evaluation)
      interrupted = process.preempted() and step < run.lengths.last
    except process.Preempted:
      interrupted = True  # The next start runs the missing evaluations.
    saver.check()
    builder.check()

  # The end: a last log entry, and a checkpoint of the last step.
  log.flush()
  run_hooks.raise_failure()
  if saved_step != step:
    save()
  with phase("save", step):
    phase.clock.ckpt_written(saver.wait())
  if run.lengths.is_log_step(step):  # Other steps have no log entry.
    writer.write({"step": step, **phase.clock.summary()})
  writer.flush()
  if interrupted:
    raise process.Preempted(
      f"{'saved' if saved_step == step else 'stopped, with nothing saved, at'} "
      f"step {step} of {run.lengths.total}"
    )
  saver.remove_local()
  logging.info("%s at step %d.", run_hooks.stop_reason or "Done", step)
  if jax.process_index() == 0:
    finished.write(
      workdir,
      run.plain,
      train_input.fingerprints,
      log.newest | {"step": step},
      run_hooks.stop_reason,
    )
  return log.newest


if __name__ == "__main__":
  command.run(train)
