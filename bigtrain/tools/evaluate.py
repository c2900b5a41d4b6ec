"""Evaluates a checkpoint of a run with the evaluations of the run.

  python -m bigtrain.tools.evaluate --workdir=runs/digits
  python -m bigtrain.tools.evaluate --workdir=runs/digits --step=600 \\
      --config.evals.val.batch_size=64 --config.mesh.fsdp=1

The config is config.json of the workdir, with the changes of the command line.
The last line on standard output is a row of results as JSON. Files of
evaluators go to the folder `evaluate` of the workdir, or to --output; those of
the run stay as they are. It reads neither training data nor optimizer state.
On the same devices its results equal the run's, bit for bit. config.eval_only
evaluates inside of main, which can also start from config.model_init.

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 otherwise.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from absl import logging

from bigtrain import lengths, parts, settings, sharding, teacher, trees
from bigtrain.adapters import trained
from bigtrain.checkpoints import averages, folders, manifest, restore, start
from bigtrain.cluster import process
from bigtrain.evaluation import evaluations
from bigtrain.files import paths
from bigtrain.reports import media, record
from bigtrain.runtime import compiler_options, jax_flags, programs
from bigtrain.settings import ConfigError
from bigtrain.step import initial
from bigtrain.tools import arguments, exits

# Folder in the workdir for the files of evaluators: the run has its own ones of
# the same names.
_FOLDER = "evaluate"


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
  workdir = paths.absolute(workdir)
  output = paths.absolute(output or os.path.join(workdir, _FOLDER))
  config = _read_config(workdir, changes)
  jax_flags.use_compile_cache(config.get("compile_cache", True))
  mesh = sharding.from_config(config)
  with jax.set_mesh(mesh):
    steps = folders.find_all(workdir)
    if step is not None and step not in steps:
      raise ConfigError(
        f"--step={step}: no such checkpoint; {workdir} has "
        f"{', '.join(map(str, steps))}."
      )
    directory = folders.find(workdir, step)
    saved = folders.read_manifest(directory)
    xla_options = compiler_options.read(config, mesh)
    task = parts.task(config)
    module, model = parts.model(config)
    state_spec = _state_spec(config, module, model, saved.arrays, mesh)
    context = evaluations.Context(
      name="",
      workdir=output,
      mesh=mesh,
      batch_size=config.input.batch_size,
      pp_modules=config.get("pp_modules", ()),
      progress=lambda done, batches: None,
      vocab_sizes=parts.vocab_sizes(task, model),
      class_names=saved.host_state.data.get("class_names", {}),
      compile=programs.Programs("compiled", xla_options).compile,
    )
    specs = dict(trees.flatten_with_names(state_spec))
    arrays = restore.load(directory, saved, dict(zip(specs, specs)), specs)
    state = trees.from_flat(arrays)
    if config.get("adapters"):
      about, plain = saved.host_state.base, config.to_dict()
      base = trained.load_base(plain, about, state["params"], mesh)
      state["base"], state_spec["base"] = base, _specs_of(base)
    teaching = _teacher(config, task, model, context)
    enabled = evaluations.from_config(
      config,
      parts.predict_fns(config, task, model, teaching.model),
      lengths.Units(context.batch_size),
      context,
      weights=start.evaluated({**state_spec, **teaching.spec}),
    )
    if not enabled:
      raise ConfigError("config.evals: empty; expected evaluations.")
    variables = start.evaluated({**state, **teaching.load()})
    row: dict[str, Any] = {"step": saved.step}
    for evaluation in enabled:
      logging.info("Evaluating %s.", evaluation.name)
      weights = variables[evaluation.weights]
      results = evaluation.build().run(weights, saved.step)
      row |= {f"{evaluation.name}/{k}": v for k, v in results.items()}
  row, shown = media.split(row)
  if jax.process_index() == 0:
    media.save(output, saved.step, shown)
  return row


def _read_config(workdir: str, changes: Sequence[str]) -> settings.Config:
  plain = record.read_json(os.path.join(workdir, "config.json"))
  if plain is None:
    raise ConfigError(
      f"--workdir={workdir}: expected the folder of a run, with a config.json."
    )
  for change in changes:
    settings.override(plain, change)
  # Schedules are ignored here: without training data, epochs have no length.
  for entry in plain.get("evals", {}).values():
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


def _specs_of(arrays: Any) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    arrays,
  )


def _teacher(
  config: settings.Config,
  task: ModuleType,
  model: Any,
  context: evaluations.Context,
) -> teacher.Teacher:
  """Reads config.teacher if an evaluation needs it.

  The first such evaluation gives the shapes of the teacher's inputs.
  """
  without = parts.predict_fns(config, task, model)
  for name, entry in config.to_dict().get("evals", {}).items():
    if not config.get("teacher") or not entry.get("enabled", True):
      continue
    if entry.get("pred") in without or "data" not in entry:
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
  add = parser.add
  add("--workdir", "folder of the run", required=True)
  add("--step", "step of the checkpoint (default: the newest)", type=int)
  files = (
    "folder for the files of evaluators (default: evaluate in the workdir)"
  )
  add("--output", files, "")
  args, changes = parser.parse(argv)
  process.join_job(settings.Config({}))
  row = evaluate(args.workdir, args.step, changes, args.output)
  if jax.process_index() == 0:
    print(settings.to_json(row))
  return process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
