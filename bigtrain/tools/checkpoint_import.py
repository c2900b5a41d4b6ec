"""Converts checkpoints of other programs: `tools.checkpoint import`."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer, folders, warm_start
from bigtrain.checkpoints.foreign import parameter_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.inputs import pipeline
from bigtrain.objective import building, initial, published_sizes
from bigtrain.reports import run_files


def run(
  path: str, out: str, config: str = "", step: int | None = None
) -> tuple[str, int]:
  """Writes what config.model_init can read as a checkpoint of a new workdir.

  Without a config, all arrays keep their names. With one, the parameters get
  the names and shapes of its model, for batches of config.input, and the
  workdir gets a config.json. Returns (directory of the checkpoint, number of
  arrays).
  """
  if os.path.isdir(out) and folders.steps(out):
    raise ConfigError(f"{out}: already has checkpoints; give another folder.")
  opened = parameter_files.open_file(path, step=step, prefix="", key="import")
  host = HostState()
  if config:
    plain = loading.load(config)
    state = _model_state(plain, dict(path=path, step=step))
    host = HostState(config=run_files.as_json(plain))
  else:
    arrays = opened.read(list(opened.specs))
    state = trees.from_flat({n: value[...] for n, value in arrays.items()})
  state["step"] = jnp.int32(opened.step)
  saver = checkpointer.Checkpointer(out)
  saver.save(opened.step, state, host, block=True)
  saver.close()
  if config:
    run_files.write_json(os.path.join(out, "config.json"), plain)
  count = len(trees.flatten_with_names(state))
  return folders.find(out, opened.step), count


def _model_state(plain: dict[str, Any], source: dict[str, Any]) -> Any:
  """The variables of the config's model, read from `source`."""
  config = published_sizes.with_published_sizes(settings.Config(plain))
  mesh = sharding.from_config(config)
  with jax.set_mesh(mesh):
    train_input = pipeline.from_config(config, config.get("seed", 0), mesh)
    batch_spec = sharding.batch_spec(train_input.spec, mesh)
    task = building.task(config)
    module, model = building.model(config)
    init = initial.variables_fn(task, model, batch_spec, config.get("seed", 0))
    rules = initial.sharding_rules(config, init, module, model)
    spec = sharding.state_spec(jax.eval_shape(init), mesh, rules)
    shardings = jax.tree.map(lambda x: x.sharding, spec)
    given = config.get("model_init")
    if isinstance(given, settings.Config):
      # It may also have options, such as `renames` and `convert`.
      source = {**config.kwargs("model_init"), **source}
    variables = warm_start.load_variables(
      source, spec, init=jax.jit(init, out_shardings=shardings), module=module
    )
  state = {"params": variables.pop("params")}
  if variables:  # Such as batch statistics.
    state["mutable"] = variables
  return state
