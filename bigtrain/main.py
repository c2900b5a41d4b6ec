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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from bigtrain import command, metrics, sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import Batch, TrainState, Variables
from bigtrain.checkpoints import checkpointer, finished, folders, start
from bigtrain.checkpoints.manifest import HostState
from bigtrain.cluster import lease, watchdog
from bigtrain.config import lengths, settings
from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.inputs import pipeline
from bigtrain.objective import (
  activations,
  building,
  frozen_base,
  gradients,
  initial,
  published_sizes,
  rollouts,
  teacher,
)
from bigtrain.optim import chain, ema, views
from bigtrain.reports import chrono, flops, loggers, record, writers
from bigtrain.runtime import (
  debugging,
  hooks,
  host_memory,
  interactive,
  jax_flags,
  metrics_log,
  phases,
  programs,
)
from bigtrain.runtime.run import Run
from bigtrain.step import frozen, guard, keys, norms, running_metrics
from bigtrain.step.norms import NamedScalars
from bigtrain.step.running_metrics import RunningMetrics

# Steps queued on the device: enough to keep it busy, few enough to stop soon.
_STEPS_IN_FLIGHT = 4

# (run, update_fn, specs of its arguments, a function that compiles it) -> any.
OnUpdate = Callable[[Run, Callable[..., Any], Any, Callable[[], Any]], Any]


def train(
  config: Any,
  workdir: str | os.PathLike[str],
  *,
  on_update: OnUpdate | None = None,
) -> Any:
  """Trains, evaluates and saves; resumes a run that was interrupted.

  Args:
    config: what a config file's get_config returns.
    on_update: called in place of the training, once the update is known; then
      nothing is written. tools.plan and benchmarks look at the update so.

  Returns:
    The newest value of every metric, and "step"; or the result of `on_update`.

  Raises:
    ConfigError: a mistake in the config or the data.
    Preempted, Interrupted: a signal or Ctrl-C ended the run after a save.
    NotFinite, Spike: a step that config.nonfinite or config.spikes rejects.
    OutOfMemory: of a device; the message has the command that finds what fits.
  """
  workdir = paths.absolute(workdir)
  rollbacks: list[guard.Rollback] = []
  while True:
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
  """The program; `at_end` closes what it opens."""
  config = published_sizes.with_published_sizes(settings.Config(config))
  plain = config.to_dict()
  host_memory.keep_freed()
  jax_flags.use_compile_cache(config.get("compile_cache", True))
  limits = watchdog.Watchdog(watchdog.read_limits(config), workdir)
  at_end.callback(limits.close)

  # ======================= Processes and devices ==============================

  process.join_job(config)
  process.require_same_run(lambda: record.identity(plain))
  mesh = sharding.from_config(config)
  at_end.enter_context(jax.set_mesh(mesh))
  replicated = sharding.replicated(mesh)
  logging.info("%s", record.topology(mesh))
  compiler = at_end.enter_context(programs.of_run(config, mesh))

  # ================================ Input =====================================
  # The batch of step s is a function of the config and s alone.

  seed = settings.whole_number(config, "seed", 0, least=0)
  batch_size = config.input.batch_size
  sharding.check_batch(batch_size, mesh, "config.input.batch_size")
  pp_modules = config.get("pp_modules", ())
  train_input = pipeline.make_train(
    config.input, seed=seed, mesh=mesh, pp_modules=pp_modules, run=config
  )
  batch_spec = sharding.batch_spec(train_input.spec, mesh)
  run = Run(
    config=config,
    plain=plain,
    workdir=workdir,
    mesh=mesh,
    programs=compiler,
    seed=seed,
    batch_size=batch_size,
    lengths=lengths.read(
      config,
      batch_size,
      train_input.num_examples,
      train_input.tokens_per_example,
    ),
  )
  last_step, total_steps = run.lengths.last, run.lengths.total

  # ============================ Task and model ================================

  task, (model_module, model) = building.task(config), building.model(config)
  vocab_sizes = building.vocab_sizes(task, model)
  train_input.limit_ids(vocab_sizes)
  frozen_teacher = teacher.from_config(config, task, batch_spec, mesh, seed)
  variants = building.variants(config, model)
  loss_fns = []
  for variant in variants:
    loss_fn = building.loss_fn(
      config, task, variant.model, frozen_teacher.model
    )
    loss_fn = jax.jit(debugging.instrument(config, loss_fn))
    loss_fns.append(loss_fn)  # Traced only once.
  init_variables = initial.variables_fn(task, model, batch_spec, seed)

  # ============================== Optimizer ===================================
  # It has no state for frozen parameters.

  params_spec = init_variables.spec()["params"]
  param_views = views.of_model(model_module, model, params_spec)
  optimizer = chain.make(config, params_spec, run.lengths.units, param_views)
  ema_update = ema.from_config(config, run.lengths.units)
  step_guard = guard.from_config(config, mesh)

  def init_state(seed: Any = seed) -> TrainState:
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
      state["ema"] = ema.init(params)
    if step_guard.loss_scale:
      state["loss_scale"] = step_guard.loss_scale.start()
    return state

  rules = initial.sharding_rules(config, init_variables, model_module, model)
  state_spec = sharding.state_spec(jax.eval_shape(init_state), mesh, rules)
  base = frozen_base.from_config(
    config, model_module, model, init_variables, state_spec, rules, mesh
  )
  frozen_spec = {**frozen_teacher.spec, **base.spec}

  def hparams_of(step: int) -> dict[str, Any]:
    """Scalars of the update after `step` updates: learning rates and so on."""
    return {
      "seed": keys.seed_word(seed),
      "log_step": np.bool_(run.lengths.is_log_step(step + 1)),
      "after_log_step": np.bool_(run.lengths.is_log_step(step)),
      **optimizer.hparams(step),
    }

  # =============================== Update =====================================

  stats_fns = activations.loss_fns(config, task, variants, frozen_teacher.model)
  compute_gradients = gradients.from_config(
    config,
    task,
    variants,
    loss_fns,
    stats_fns=stats_fns,
    trainable=optimizer.trainable,
    mesh=mesh,
  )
  log_norms = norms.from_config(config, params_spec, optimizer.trainable)

  def update_fn(
    state: TrainState,
    running: RunningMetrics,
    batch: Batch,
    hparams: dict[str, Any],
    frozen_state: Mapping[str, Variables],
  ) -> tuple[TrainState, RunningMetrics]:
    """One step: the next state, and the metrics since the last log step."""
    step = state["step"]  # Number of updates before this one.
    with_norms = log_norms.due(hparams["log_step"])
    no_norms = log_norms.zeros()

    # Gradients of the mean loss over the global batch.
    grads, step_metrics, mutable = compute_gradients(
      {**state, **frozen_state, **hparams}, batch
    )
    grad_norm = metrics.global_norm(grads)

    # The verdict: whether this step may change the state.
    loss = step_metrics["loss"]
    verdict = step_guard.judge(state, running, loss, grad_norm)

    # The optimizer.
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
      )
      params = trees.merge(optax.apply_updates(trained, updates), frozen)
      new_state = {"params": params, "opt": opt, "step": step + 1}
      if "mutable" in state:
        new_state["mutable"] = mutable
      if ema_update:
        new_state["ema"] = ema_update(state["ema"], params, step)
      if not with_norms:
        return new_state, no_norms
      return new_state, log_norms(state["params"], params, grads, updates)

    # The new state after a good step, else the old one.
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
      last=hparams["lr"] | step_guard.row(new_state),
      log_norms=with_norms,
      step_norms=step_norms,
    )

  evaluated_spec = {**state_spec, **frozen_spec}

  def loss_args(batch_spec: Any) -> tuple[Any, ...]:
    return gradients.loss_args(state_spec, batch_spec, mesh, frozen_spec)

  rollout = rollouts.Rollout(
    config, task, model, train_input, loss_args(batch_spec)[0], mesh
  )
  for_row = (stats_fns or loss_fns)[0]
  metrics_spec, _ = jax.eval_shape(for_row, *loss_args(rollout.spec))
  hparams_spec = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    hparams_of(0),
  )
  running_spec = running_metrics.spec(
    metrics_spec,
    [*hparams_spec["lr"], *step_guard.row(state_spec)],
    log_norms,
    step_guard.spikes,
  )
  update_specs = (
    state_spec,
    running_spec,
    rollout.spec,
    hparams_spec,
    frozen_spec,
  )

  def lower_update(batch_specs: Sequence[Any]) -> Callable[[], Any]:
    """Traces the update; returns a function that compiles it."""
    state_shardings = jax.tree.map(lambda x: x.sharding, state_spec)
    return run.programs.lower_sizes(
      "update",
      update_fn,
      *update_specs,
      argnum=2,
      sizes=batch_specs,
      donate_argnums=0,
      out_shardings=(state_shardings, replicated),
    )

  # ======================= Evaluations and hooks ==============================
  # Checked now; evaluators are built when they are first due.

  all_flops = [
    variant.share * share * flops.step_flops(loss_fn, *loss_args(spec))
    for spec, share in rollout.drawn
    for variant, loss_fn in zip(variants, loss_fns)
  ]
  step_flops = round(sum(all_flops))
  clock = chrono.Chrono(
    **run.lengths.about() | train_input.about(),
    flops_per_step=step_flops,
    peak_flops_per_device=flops.read_peak_flops(config, mesh.devices.flat[0]),
    num_devices=mesh.size,
  )
  console = writers.Console(total_steps, process_index=jax.process_index())
  phase = phases.Phases(limits, console, clock)
  predict_fns = building.predict_fns(config, task, model, frozen_teacher.model)
  run_evaluations = evaluations.from_config(
    config,
    predict_fns,
    run.lengths.units,
    evaluations.Context(
      name="",
      workdir=workdir,
      mesh=mesh,
      batch_size=batch_size,
      pp_modules=pp_modules,
      progress=phase.evaluation_progress,
      vocab_sizes=vocab_sizes,
      class_names=train_input.saved["data"].get("class_names", {}),
      compile=run.programs.compile,
    ),
    weights=start.evaluated(evaluated_spec),
  )
  run_hooks = hooks.from_config(
    config, workdir, mesh, predict_fns, run_evaluations
  )

  # The rest of the config. Keys still unread at this point are errors.
  start_options = start.read(config).check(workdir, model_module, model)
  saving = checkpointer.read_options(config, run.lengths, workdir)
  run_loggers = loggers.from_config(config)
  log_parameters = config.get("log_parameters", False)
  eval_only = config.get("eval_only", False)
  transfer_guard = debugging.transfer_guard(config)
  place_hparams = debugging.hparams_placement(config, replicated)
  config.check_all_read()
  if on_update:
    compile_largest = lambda: lower_update([rollout.spec])()
    return on_update(run, update_fn, update_specs, compile_largest)

  # ================================ Start =====================================
  # From here on the run writes files, and the workdir is this job's alone.

  for line in record.summary(plain, run.lengths.units):
    logging.info("%s", line)
  folders.check_writable(workdir)
  check_lease = at_end.enter_context(lease.hold(workdir))
  at_end.callback(console.close)
  console.status("starting")

  results = finished.read(workdir, plain, train_input.fingerprints)
  if results and not eval_only:  # Nothing is left to do.
    return results

  # The update compiles while the state is read or initialised.
  limits.enter("compile", 0)
  compiled = process.Background(
    (lambda: None)
    if eval_only
    else lower_update([spec for spec, _ in rollout.drawn]),
    "compile",
  )
  facts: dict[str, Any] = {"model_flops_per_step": step_flops}

  # Resumed, continued from elsewhere, warm, or from scratch.
  frozen_state = {**frozen_teacher.load(), **base.load()}
  started = start.start(
    start_options,
    workdir,
    plain,
    state_spec=state_spec,
    init_state=init_state,
    model_module=model_module,
    seed=seed,
    fingerprints=train_input.fingerprints,
    lower=functools.partial(run.programs.lower, limited=False),
    local=saving["local"],
    from_local=not rollbacks,
    base=base.saved,
    begin=base.begin,
  )
  state, step, saved_step = started.state, started.step, started.saved_step
  write_record = record.start(
    workdir,
    plain,
    mesh,
    optimizer.trainable,
    state,
    origin=started.how,
    log_table=log_parameters,
    first_example=train_input.saved["data"].get("first_example", ()),
    param_dims=dims.of_model(model_module, model),
  )
  recording = process.Background(write_record, "record")
  logging.info("Step %d of %d, %s.", step, total_steps, started.how)
  # A rollback skips batches for good, so from then on the batch index leads
  # the step by `ahead`.
  ahead = started.host.batches_ahead
  ahead += sum(e.step - step for e in rollbacks if e.restart == step)
  batches = train_input.start(step + ahead, last_step + ahead)
  at_end.callback(batches.close)
  writer = writers.Writers(
    workdir,
    started.restored_step,
    jax.process_index(),
    console,
    run_loggers,
  )
  at_end.callback(writer.close)
  saver = checkpointer.Checkpointer(workdir, check_lease, **saving)
  at_end.callback(saver.close)
  clock.restore(started.host.clock, writer.last_alive)
  run_hooks.restore(started.host.hooks, step, state, frozen_state)
  running = running_metrics.from_host(started.host.tally, running_spec, mesh)
  with phase("compile", step):
    recording.result()
    rollout.compile(run.programs)
    update = compiled.result()

  # What the loop does at some steps: check, save, evaluate.
  builder = programs.Builder({e.name: e.build for e in run_evaluations}, mesh)
  at_end.callback(builder.close)

  def variables() -> Variables:
    mutable = state.get("mutable", {})
    fixed = frozen.variables({**state, **frozen_state})
    return {"params": state["params"], **mutable, **fixed}

  def check_finite(fetched: RunningMetrics) -> None:
    """Raises after a bad step, or after too many skipped ones."""
    if not (bad_step := step_guard.bad_step(fetched)):
      return
    error = step_guard.spike(fetched) or guard.explain(
      bad_step,
      bad_step - 1 + ahead,
      {**state, **frozen_state, **hparams_of(bad_step - 1)},
      train_input,
      compute_gradients,
      functools.partial(rollout, variables()),
    )
    alike = sum(type(e.error) is type(error) for e in rollbacks)
    raise step_guard.failure(error, bad_step, saved_step, alike)

  log = metrics_log.MetricsLog(
    workdir, writer, run_hooks, clock, run.programs, check_finite, facts
  )

  def save(shared: bool = True) -> None:
    """Starts to save the state and the host's side of the run."""
    nonlocal saved_step
    log.flush()
    fetched = jax.device_get(running)
    check_finite(fetched)
    with phase("save", step):
      writer.flush()  # The rows up to here must outlive the checkpoint.
      run_hooks.before_save(step)
      clock.ckpt_written(saver.wait())
      host = HostState(
        config=record.as_json(plain),
        tally=running_metrics.to_host(fetched),
        clock=clock.state(),
        hooks=run_hooks.state(),
        batches_ahead=ahead,
        base=base.saved,
        **train_input.saved,
      )
      saved = saver.save(step, state, host, run_hooks.keep_steps(), shared)
      saved_step = saved if shared else saved_step

  def evaluate(evaluation: evaluations.Evaluation) -> None:
    """Runs one evaluation on the present state and writes its results."""
    log.flush()
    began = time.monotonic()
    # Also waits for the step. After a bad step the state would be older.
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
    asked = run_hooks.evaluations
    return [
      e for e in run_evaluations if e.due(step, total_steps) or e.name in asked
    ]

  if run.lengths.save_at_start and not (started.resumed or eval_only):
    save()
  # Finish the evaluations during which the run was interrupted. Results already
  # on disk are only replayed to the hooks, whose restored state is older.
  first = (
    due() if started.resumed else [e for e in run_evaluations if e.at_start]
  )
  for evaluation in run_evaluations if eval_only else first:
    if eval_only or not log.replay(step, evaluation.owns):
      evaluate(evaluation)
  if eval_only:
    writer.flush()
    return log.newest

  # ================================= Loop =====================================
  # Update, log, save, evaluate, decide. It waits for the device only where it
  # needs results, and otherwise stays a few steps ahead.

  clock.start(step)
  at_end.push(run_hooks.after_train)
  at_end.enter_context(transfer_guard)
  run_hooks.before_train()
  in_flight, interrupted = collections.deque[Any](), False
  while step < last_step and not run_hooks.stopped and not interrupted:
    phase.step(step + 1)
    run_hooks.before_step(step + 1)
    with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
      if rollout.exists:  # It waits for the weights, which are no data.
        jax.block_until_ready(running)
      with clock.account("data_wait"):
        batch = rollout(variables(), next(batches), step + ahead)
      process.host_work_done()
      state, running = run_hooks.update(
        step + 1,
        update,
        state,
        running,
        batch,
        place_hparams(hparams_of(step)),
        frozen_state,
      )
    step += 1
    run_hooks.after_step(step, state, running)
    console.step(step)
    if step == started.step + 1:
      jax.block_until_ready(running)
      clock.warm(step)
      builder.start(
        e.name
        for e in run_evaluations
        if e.due_later(step, last_step, total_steps)
      )
    in_flight.append(running["skipped"])
    if len(in_flight) > _STEPS_IN_FLIGHT:
      in_flight.popleft().block_until_ready()

    # Writes the previous log step's row while the device runs the next step.
    log.flush()
    if run.lengths.is_log_step(step):
      log.queue(step, running)
      clock.completes(step, running["skipped"].block_until_ready)
    shared = run.lengths.saves(step) or run_hooks.wants_save(step)
    if shared or saver.due_locally(step):
      save(shared)
    try:
      for evaluation in due():
        evaluate(evaluation)
      interrupted = process.preempted() and step < last_step
    except process.Preempted:
      interrupted = True  # The next start runs the missing evaluations.
    saver.check()
    builder.check()

  # The end: a last row, and a checkpoint of the last step.
  log.flush()
  run_hooks.raise_failure()
  if saved_step != step:
    save()
  with phase("save", step):
    clock.ckpt_written(saver.wait())
  if run.lengths.is_log_step(step):  # An undisturbed run has no other rows.
    writer.write({"step": step, **clock.summary()})
  writer.flush()
  if interrupted:
    done = "saved" if saved_step == step else "stopped, with nothing saved, at"
    raise process.Preempted(f"{done} step {step} of {total_steps}")
  saver.remove_local()
  reason = run_hooks.stop_reason
  logging.info("%s at step %d.", reason or "Done", step)
  if jax.process_index() == 0:
    results = log.newest | {"step": step}
    finished.write(workdir, plain, train_input.fingerprints, results, reason)
  return log.newest


if __name__ == "__main__":
  command.run(train)
