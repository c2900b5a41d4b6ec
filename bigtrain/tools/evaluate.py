"""Evaluates a run's checkpoint with the run's evaluations.

  python -m bigtrain.tools.evaluate --workdir=runs/digits
  python -m bigtrain.tools.evaluate --workdir=runs/digits --step=600 \\
      --config.evals.val.batch_size=64 --config.mesh.fsdp=1
  python -m bigtrain.tools.evaluate --workdir=runs/digits --follow

The config is the workdir's config.json, with the changes of the command line.
The last line on standard output has the results as JSON. Files of evaluators go
to the folder `evaluate` of the workdir, or to --output; the run's own files are
not changed. The tool reads neither training data nor optimizer state. On the
same devices its results equal the run's, bit for bit. (config.eval_only
evaluates within main, which can also start from config.model_init.)

--all_checkpoints evaluates each checkpoint, in order. --follow also waits for
new ones until the run is finished; start it as a separate job. Both append the
results to metrics.jsonl in the output folder, and skip steps that are already
there.

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 otherwise.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from absl import logging

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import averages, folders, manifest, restore, start
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.cluster import process
from bigtrain.config import lengths, loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.objective import (
  building,
  initial,
  task_functions,
  task_sum,
  teacher,
  trained_adapters,
)
from bigtrain.reports import log_entries, media, run_files
from bigtrain.runtime import compiler_options, jax_flags, programs
from bigtrain.tools import arguments, exits, runs

# Folder in the workdir for the evaluators' files, because the run itself writes
# files of the same names into the workdir.
_FOLDER = "evaluate"
_POLL_SECS = 10.0  # Between looks for new checkpoints.


def evaluate(
  workdir: str,
  step: int | None = None,
  changes: Sequence[str] = (),
  output: str = "",
  evals: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Runs config.evals, or others in place of them, on a checkpoint.

  Returns {"step": ..., "<evaluation>/<metric>": ...}. Images, texts, tables and
  histograms are paths of files in `output`, which also gets what evaluators
  write.
  """
  workdir, output = _folders(workdir, output)
  config, added = _read_config(workdir, changes)
  if evals is not None:
    config = settings.Config({**config.to_dict(), "evals": dict(evals)})
  directory = folders.find_named(workdir, step, "--workdir")
  evaluate_checkpoint = _evaluator(config, directory, output, added)
  return evaluate_checkpoint(directory)


def evaluate_all(
  workdir: str,
  changes: Sequence[str] = (),
  output: str = "",
  follow: bool = False,
) -> Iterator[dict[str, Any]]:
  """Yields the results of each checkpoint for which `output` has none.

  The results are like those of `evaluate`. With `follow`, this waits for new
  checkpoints until the run is finished.
  """
  workdir, output = _folders(workdir, output)
  config, added = _read_config(workdir, changes)
  if not follow and not folders.steps(workdir):
    raise ConfigError(f"--workdir={workdir}: there are no checkpoints.")
  done = {results["step"] for results in log_entries.read(output)}
  evaluate_checkpoint = None
  while True:
    # In this order: once the run has ended, the list of steps is complete.
    has_ended = not follow or _is_finished(workdir)
    steps = [s for s in folders.steps(workdir) if s not in done]
    # All processes do what the first one sees.
    has_ended, steps = process.broadcast([has_ended, steps])
    if not steps:
      if has_ended:
        return
      time.sleep(_POLL_SECS)
      continue
    step = steps[0]
    done.add(step)
    try:
      directory = folders.find(workdir, step)
      if evaluate_checkpoint is None:
        evaluate_checkpoint = _evaluator(config, directory, output, added)
      results = evaluate_checkpoint(directory)
    except (CheckpointError, OSError):
      # The run removes old checkpoints, as config.keep_ckpts says.
      if step in folders.steps(workdir):
        raise
      logging.warning("Step %d: its checkpoint is gone; skipped.", step)
      continue
    if jax.process_index() == 0:
      file = log_entries.EntryFile(
        os.path.join(output, log_entries.FILE_NAME), sys.maxsize
      )
      file.add(results)
      file.close()
    yield results


def _is_finished(workdir: str) -> bool:
  newest = {}
  for entry in log_entries.read(workdir):
    newest.update(entry)
  return runs.state(workdir, newest) == "finished"


def _folders(workdir: str, output: str) -> tuple[str, str]:
  workdir = paths.absolute(workdir)
  output = paths.absolute(output or os.path.join(workdir, _FOLDER))
  if output == workdir:
    raise ConfigError(f"--output={output}: has the files of the run.")
  return workdir, output


def _evaluator(
  config: settings.Config, directory: str, output: str, added: Sequence[str]
) -> Callable[[str], dict[str, Any]]:
  """Returns a function from a checkpoint's directory to its results.

  All checkpoints of a run have the same arrays as `directory`, so the programs
  are compiled once.
  """
  jax_flags.use_compile_cache(config.get("compile_cache", True))
  mesh = sharding.from_config(config)
  with jax.set_mesh(mesh):
    saved = folders.read_manifest(directory)
    xla_options = compiler_options.read(config, mesh)
    task = building.task(config)
    module, model = building.model(config)
    state_spec = _state_spec(config, module, model, saved.arrays, mesh)
    context = evaluations.Context(
      name="",
      workdir=output,
      mesh=mesh,
      batch_size=config.input.batch_size,
      pp_modules=config.get("pp_modules", ()),
      progress=lambda done, batches: None,
      vocab_sizes=task_functions.vocab_sizes(task, model),
      class_names=saved.host_state.data.get("class_names", {}),
      compile=programs.Programs("compiled", xla_options).compile,
    )
    frozen = {}
    if config.get("adapters"):
      state = restore.read_tree(directory, saved, state_spec)
      frozen["base"] = trained_adapters.load_base(
        config.to_dict(), saved.host_state.base, state["params"], mesh
      )
    teaching = _teacher(config, task, model, context)
    enabled = evaluations.from_config(
      config,
      task_functions.predict_fns(config, task, model, teaching.model),
      lengths.Units(context.batch_size),
      context,
      weights=start.evaluated(
        {**state_spec, **sharding.with_shardings(frozen), **teaching.spec}
      ),
    )
    if not enabled:
      raise ConfigError("config.evals: empty; expected evaluations.")
    _check_added(config, added)
    frozen |= teaching.load()
    evaluators = [(evaluation, evaluation.build()) for evaluation in enabled]

  def evaluate_checkpoint(directory: str) -> dict[str, Any]:
    saved = folders.read_manifest(directory)
    step = saved.step
    all_results: dict[str, Any] = {"step": step}
    with jax.set_mesh(mesh):
      state = restore.read_tree(directory, saved, state_spec)
      variables = start.evaluated({**state, **frozen})
      for evaluation, evaluator in evaluators:
        logging.info("Evaluating %s at step %d.", evaluation.name, step)
        results = evaluator.run(variables[evaluation.weights], step)
        for name, value in results.items():
          all_results[f"{evaluation.name}/{name}"] = value
      all_results, files = media.split(all_results)
      if jax.process_index() == 0:
        media.save(output, step, files)
    return all_results

  return evaluate_checkpoint


def _read_config(
  workdir: str, changes: Sequence[str]
) -> tuple[settings.Config, list[str]]:
  """Returns the changed config, and the keys that the changes have added."""
  plain = run_files.read_config(workdir, "--workdir=")
  known = settings.flatten(plain)
  added = []
  for change in changes:
    loading.override(plain, change)
    key = change.partition("=")[0]
    if not any(f"{name}.".startswith(f"{key}.") for name in known):
      added.append(f"config.{key}")
  # Schedules are ignored here: without training data, epochs have no length.
  for entry in (plain.get("evals") or {}).values():
    for unit in lengths.UNITS:
      entry.pop(f"log_{unit}", None)
  return settings.Config(plain), added


def _check_added(config: settings.Config, added: Sequence[str]) -> None:
  """Refuses keys that the command line adds and that nothing reads.

  Of the run's own keys, many are not read here: they are for training.
  """
  for line in config.unread():
    unread = line.partition(":")[0]
    if any(f"{key}.".startswith(f"{unread}.") for key in added):
      raise ConfigError(line)


def _state_spec(
  config: settings.Config,
  module: ModuleType,
  model: Any,
  arrays: Mapping[str, manifest.Array],
  mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
  """Specs of the arrays that evaluations need, sharded by the run's rules."""
  shapes = {
    name.removeprefix("params/"): tuple(array.shape)
    for name, array in arrays.items()
    if name.startswith("params/")
  }
  rules = sharding.Rules(
    config.get("sharding", sharding.DEFAULT_RULES),
    initial.tensor_axes(config, module, model, shapes),
  )
  # Some optimizers keep the weights to evaluate in their own state.
  in_opt_state: set[str] = set()
  if iterates := averages.averaged(arrays):
    in_opt_state = {*iterates.values(), *averages.STATE}
  specs = {}
  for name, array in arrays.items():
    tree = name.split("/")[0]
    if tree in ("params", "ema", "mutable", "tasks") or name in in_opt_state:
      dtype = manifest.dtype_of(array.dtype)
      specs[name] = jax.ShapeDtypeStruct(array.shape, dtype)
  return sharding.state_spec(trees.from_flat(specs), mesh, rules)


def _teacher(
  config: settings.Config,
  task: ModuleType,
  model: Any,
  context: evaluations.Context,
) -> teacher.Teacher:
  """The teacher of config.teacher, if an evaluation needs it.

  An evaluation needs it if its predict function exists only with a teacher. The
  shapes of the teacher's inputs are those of the first such evaluation.
  """
  no_teacher = teacher.Teacher(None, {}, dict)
  if not config.get("teacher"):
    return no_teacher
  preds_without_teacher = set(task_functions.predict_fns(config, task, model))
  for name, entry in (config.to_dict().get("evals") or {}).items():
    if not entry.get("enabled", True):
      continue
    preds = entry.get("pred", ())
    preds = {preds} if isinstance(preds, str) else set(preds)
    if preds <= preds_without_teacher:
      continue
    if "data" in entry:
      fields = ("data", "pp", "batch_size")
      batches = evaluations.Batches(
        context._replace(name=name),
        **{field: entry[field] for field in fields if field in entry},
      )
      spec = batches.input.spec
    else:  # Samples: an autoencoder takes images of any size.
      spec = {"image": jax.ShapeDtypeStruct((8, 8, 8, 3), "float32")}
    batch_spec = sharding.batch_spec(spec, context.mesh)
    # The evaluation's batches have the features that predict functions want.
    several = task_sum.entries(task, config)
    entries = [x._replace(features={}, has_input=False) for x in several]
    seed = config.get("seed", 0)
    return teacher.of_tasks(config, entries, batch_spec, context.mesh, seed)[0]
  return no_teacher


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("evaluate", __doc__, changes_config=True)
  parser.add_argument("--workdir", required=True, help="folder of the run")
  parser.add_argument(
    "--step", type=int, help="step of the checkpoint (default: the newest)"
  )
  parser.add_argument(
    "--output",
    default="",
    help="folder for the evaluators' files (default: evaluate in the workdir)",
  )
  parser.add_argument(
    "--all_checkpoints",
    action="store_true",
    help="evaluate, in order, each checkpoint that has no results yet",
  )
  parser.add_argument(
    "--follow",
    action="store_true",
    help="as --all_checkpoints, and wait for new ones until the run finishes",
  )
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args, changes = _parser().parse(argv)
  process.join_job(settings.Config({}))
  if args.all_checkpoints or args.follow:
    if args.step is not None:
      raise ConfigError("--step: not together with --all_checkpoints.")
    found = evaluate_all(args.workdir, changes, args.output, args.follow)
  else:
    found = iter([evaluate(args.workdir, args.step, changes, args.output)])
  for results in found:
    if jax.process_index() == 0:
      print(settings.to_json(results), flush=True)
  return process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
