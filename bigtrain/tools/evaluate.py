"""Evaluates a checkpoint of a run, as the run itself does.

  python -m bigtrain.tools.evaluate --workdir=runs/digits
  python -m bigtrain.tools.evaluate --workdir=runs/digits --step=600 \\
      --config.evals.val.batch_size=64 --config.mesh.fsdp=1

The config is that of the workdir, config.json, with the changes of the command
line. The last line on standard output is a row of results, JSON; nothing is
written to the run's own files. On the same devices the numbers are those of
the run, bit for bit. Neither the training data nor the optimizer's state is
read. config.eval_only does the same inside of main, which can also begin with
config.model_init.

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 for the rest.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging

from bigtrain import lengths, parts, settings, sharding, trees
from bigtrain.checkpoints import folders, manifest, restore, start
from bigtrain.cluster import process
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.files import paths
from bigtrain.reports import record
from bigtrain.runtime import programs
from bigtrain.settings import ConfigError


def evaluate(
  workdir: str,
  step: int | None = None,
  changes: Sequence[str] = (),
) -> dict[str, Any]:
  """Runs config.evals on a checkpoint.

  Args:
    workdir: of a run, or a copy of its config.json and checkpoints.
    step: which checkpoint; the newest unless given.
    changes: to the config, as "evals.val.batch_size=64".

  Returns:
    {"step": ..., "<evaluation>/<metric>": ...}.

  Raises:
    ConfigError: no such run or checkpoint, or a mistake in the config.
    CheckpointError: the checkpoint is damaged.
  """
  workdir = paths.absolute(workdir)
  plain = record.read_json(os.path.join(workdir, "config.json"))
  if plain is None:
    raise ConfigError(f"--workdir={workdir}: there is no config.json in it.")
  for change in changes:
    settings.override(plain, change)
  # When they are due does not matter here, and epochs could not be converted.
  for entry in plain.get("evals", {}).values():
    for unit in lengths.UNITS:
      entry.pop(f"log_{unit}", None)
  config = settings.Config(plain)
  record.use_compile_cache(config.get("compile_cache", True))
  mesh = sharding.from_config(config)
  with jax.set_mesh(mesh):
    directory = _find(workdir, step)
    saved = folders.read_manifest(directory)
    state_spec = sharding.state_spec(
      _weights(saved.arrays),
      mesh,
      config.get("sharding", sharding.DEFAULT_RULES),
    )
    task = parts.task(config)
    _, model = parts.model(config)
    context = evaluators.Context(
      name="",
      workdir=workdir,
      mesh=mesh,
      batch_size=config.input.batch_size,
      pp_modules=config.get("pp_modules", ()),
      progress=lambda done, batches: None,
      vocab_sizes=parts.vocab_sizes(task, model),
      compile=programs.Programs().compile,
    )
    evaluations = evaluators.from_config(
      config,
      task.predict_fns(model),
      lengths.Units(context.batch_size),
      context,
      weights=start.evaluated(state_spec),
    )
    if not evaluations:
      raise ConfigError("config.evals: there is nothing to evaluate.")
    wanted = dict(trees.flatten_with_names(state_spec))
    arrays = restore.load(
      directory, saved, {name: name for name in wanted}, wanted
    )
    variables = start.evaluated(trees.from_flat(arrays))
    row: dict[str, Any] = {"step": saved.step}
    for evaluation in evaluations:
      logging.info("Evaluating %s.", evaluation.name)
      results = evaluation.build().run(
        variables[evaluation.weights], saved.step
      )
      row |= {f"{evaluation.name}/{k}": v for k, v in results.items()}
  return row


def _find(workdir: str, step: int | None) -> str:
  there = folders.find_all(workdir)
  if step is not None and step not in there:
    known = ", ".join(map(str, there))
    raise ConfigError(f"--step={step}: {workdir} has {known}.")
  return folders.find(workdir, step)


def _weights(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Specs of the arrays that evaluations need, as a tree."""
  return trees.from_flat(
    {
      name: jax.ShapeDtypeStruct(array.shape, manifest.dtype_of(array.dtype))
      for name, array in arrays.items()
      if name.split("/")[0] in ("params", "ema", "mutable")
    }
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  words = list(sys.argv if argv is None else argv)
  prefix = "--config."
  changes = [w.removeprefix(prefix) for w in words if w.startswith(prefix)]
  values = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "The run's folder.", flag_values=values)
  flags.DEFINE_integer("step", None, "Which checkpoint.", flag_values=values)
  try:
    try:
      left = values([w for w in words if not w.startswith(prefix)])[1:]
    except flags.Error as e:
      raise ConfigError(f"{e}.") from e
    if left:
      raise ConfigError(
        f"{left[0]!r}: unknown argument; expected --workdir=DIR, --step=N or "
        "--config.KEY=VALUE."
      )
    if not values["workdir"].value:
      raise ConfigError("--workdir is missing.")
    process.join_job(settings.Config({}))
    row = evaluate(values["workdir"].value, values["step"].value, changes)
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return process.EXIT_CONFIG
  except (manifest.CheckpointError, OSError) as e:
    print(f"error: {e}", file=sys.stderr)
    return process.EXIT_ERROR
  if jax.process_index() == 0:
    print(settings.to_json(row))
  return process.EXIT_OK


if __name__ == "__main__":
  sys.exit(main())
