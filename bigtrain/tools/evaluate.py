"""Evaluates a checkpoint of a run with the evaluations of the run.

  python -m bigtrain.tools.evaluate --workdir=runs/digits
  python -m bigtrain.tools.evaluate --workdir=runs/digits --step=600 \\
      --config.evals.val.batch_size=64 --config.mesh.fsdp=1
  python -m bigtrain.tools.evaluate --workdir=runs/digits --follow

The config is config.json of the workdir, with the changes of the command line.
The last line on standard output is a row of results as JSON. Files of
evaluators go to the folder `evaluate` of the workdir, or to --output; those of
the run stay as they are. It reads neither training data nor optimizer state.
On the same devices its results equal the run's, bit for bit. config.eval_only
evaluates inside of main, which can also start from config.model_init.

--all_checkpoints evaluates each checkpoint, in order, and --follow also waits
for new ones until the run is finished, as a job beside it. They append rows to
metrics.jsonl in the output folder, and skip steps that have one.

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
from bigtrain.objective import building, initial, teacher, trained_adapters
from bigtrain.reports import log_entries, media, record
from bigtrain.runtime import compiler_options, jax_flags, programs
from bigtrain.tools import arguments, exits, runs

# Folder in the workdir for the files of evaluators: the run has its own ones of
# the same names.
_FOLDER = "evaluate"
_POLL_SECS = 10.0


def evaluate(
  workdir: str,
  step: int | None = None,
  changes: Sequence[str] = (),
  output: str = "",
) -> dict[str, Any]:
  """Runs config.evals on a checkpoint.

  Returns {"step": ..., "<evaluation>/<metric>": ...}. Images, texts, tables and
  histograms are paths of files in `output`, which also gets what evaluators
  write.
  """
  workdir, output = _folders(workdir, output)
  config = _read_config(workdir, changes)
  directory = folders.find_named(workdir, step, "--workdir")
  return _judge(config, directory, output)[0]


def evaluate_all(
  workdir: str,
  changes: Sequence[str] = (),
  output: str = "",
  follow: bool = False,
) -> Iterator[dict[str, Any]]:
  """Yields a row, as `evaluate`, of each checkpoint without one in `output`.

  With `follow`, waits for new checkpoints until the run is finished.
  """
  workdir, output = _folders(workdir, output)
  config = _read_config(workdir, changes)
  if not follow and not folders.steps(workdir):
    raise ConfigError(f"--workdir={workdir}: there are no checkpoints.")
  judged = {row["step"] for row in log_entries.read(output)}
  judge = None
  while True:
    # In this order: checkpoints before the end of the run are found after it.
    newest = {k: v for row in log_entries.read(workdir) for k, v in row.items()}
    ended = not follow or runs.state(workdir, newest) == "finished"
    steps = [s for s in folders.steps(workdir) if s not in judged]
    ended, steps = process.broadcast([ended, steps])
    if not steps:
      if ended:
        return
      time.sleep(_POLL_SECS)
      continue
    judged.add(steps[0])
    try:
      directory = folders.find(workdir, steps[0])
      if judge is None:
        row, judge = _judge(config, directory, output)
      else:
        row = judge(directory)
    except (CheckpointError, OSError):
      # The run may have removed it since, as config.keep_ckpts says.
      if steps[0] in folders.steps(workdir):
        raise
      logging.warning("Step %d: its checkpoint is gone; skipped.", steps[0])
      continue
    if jax.process_index() == 0:
      file = log_entries.EntryFile(
        os.path.join(output, log_entries.FILE_NAME), sys.maxsize
      )
      file.add(row)
      file.close()
    yield row


def _folders(workdir: str, output: str) -> tuple[str, str]:
  workdir = paths.absolute(workdir)
  output = paths.absolute(output or os.path.join(workdir, _FOLDER))
  if output == workdir:
    raise ConfigError(f"--output={output}: has the files of the run.")
  return workdir, output


def _judge(
  config: settings.Config, directory: str, output: str
) -> tuple[dict[str, Any], Callable[[str], dict[str, Any]]]:
  """Evaluates a checkpoint; returns its row, and what evaluates others."""
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
      vocab_sizes=building.vocab_sizes(task, model),
      class_names=saved.host_state.data.get("class_names", {}),
      compile=programs.Programs("compiled", xla_options).compile,
    )
    state = restore.read_tree(directory, saved, state_spec)
    frozen = {}
    if config.get("adapters"):
      about, plain = saved.host_state.base, config.to_dict()
      frozen["base"] = trained_adapters.load_base(
        plain, about, state["params"], mesh
      )
    teaching = _teacher(config, task, model, context)
    enabled = evaluations.from_config(
      config,
      building.predict_fns(config, task, model, teaching.model),
      lengths.Units(context.batch_size),
      context,
      weights=start.evaluated(
        {**state_spec, **sharding.with_shardings(frozen), **teaching.spec}
      ),
    )
    if not enabled:
      raise ConfigError("config.evals: empty; expected evaluations.")
    frozen |= teaching.load()
    built = [(each, each.build()) for each in enabled]

    def row_of(state: Any, step: int) -> dict[str, Any]:
      variables = start.evaluated({**state, **frozen})
      row: dict[str, Any] = {"step": step}
      for evaluation, evaluator in built:
        logging.info("Evaluating %s at step %d.", evaluation.name, step)
        results = evaluator.run(variables[evaluation.weights], step)
        row |= {f"{evaluation.name}/{k}": v for k, v in results.items()}
      row, shown = media.split(row)
      if jax.process_index() == 0:
        media.save(output, step, shown)
      return row

    def judge(directory: str) -> dict[str, Any]:
      saved = folders.read_manifest(directory)
      with jax.set_mesh(mesh):
        state = restore.read_tree(directory, saved, state_spec)
        return row_of(state, saved.step)

    return row_of(state, saved.step), judge


def _read_config(workdir: str, changes: Sequence[str]) -> settings.Config:
  plain = record.read_config(workdir, "--workdir=")
  for change in changes:
    loading.override(plain, change)
  # Schedules are ignored here: without training data, epochs have no length.
  for entry in (plain.get("evals") or {}).values():
    for unit in lengths.UNITS:
      entry.pop(f"log_{unit}", None)
  return settings.Config(plain)


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
  iterates = averages.averaged(arrays)
  others = {*iterates.values(), *averages.STATE} if iterates else set()
  weights = trees.from_flat(
    {
      name: jax.ShapeDtypeStruct(array.shape, manifest.dtype_of(array.dtype))
      for name, array in arrays.items()
      if name.split("/")[0] in ("params", "ema", "mutable") or name in others
    }
  )
  return sharding.state_spec(weights, mesh, rules)


def _teacher(
  config: settings.Config,
  task: ModuleType,
  model: Any,
  context: evaluations.Context,
) -> teacher.Teacher:
  """Reads config.teacher if an evaluation needs it.

  The first such evaluation gives the shapes of the teacher's inputs.
  """
  without = building.predict_fns(config, task, model)
  for name, entry in (config.to_dict().get("evals") or {}).items():
    if not config.get("teacher") or not entry.get("enabled", True):
      continue
    preds = entry.get("pred", ())
    preds = {preds} if isinstance(preds, str) else {*preds}
    if preds <= {*without} or "data" not in entry:
      continue
    fields = ("data", "pp", "batch_size")
    batches = evaluations.Batches(
      context._replace(name=name),
      **{field: entry[field] for field in fields if field in entry},
    )
    batch_spec = sharding.batch_spec(batches.input.spec, context.mesh)
    seed = config.get("seed", 0)
    return teacher.from_config(config, task, batch_spec, context.mesh, seed)
  return teacher.Teacher(None, {}, dict)


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  parser = arguments.Parser("evaluate", __doc__, changes_config=True)
  args, changes = parser.parse(argv)
  process.join_job(settings.Config({}))
  several = args.all_checkpoints or args.follow
  if several and args.step is not None:
    raise ConfigError("--step: not together with --all_checkpoints.")
  if several:
    found = evaluate_all(args.workdir, changes, args.output, args.follow)
  else:
    found = iter([evaluate(args.workdir, args.step, changes, args.output)])
  for row in found:
    if jax.process_index() == 0:
      print(settings.to_json(row), flush=True)
  return process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
