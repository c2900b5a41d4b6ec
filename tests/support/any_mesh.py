"""Three updates of a config under a mesh, for test_any_mesh.py."""

import contextlib
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.config import lengths as lengths_lib
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.inputs import pipeline
from bigtrain.models.layers import options as model_options
from bigtrain.objective import building, initial, objective
from bigtrain.optim import chain
from bigtrain.step import keys

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
STEPS = 3

# In three steps, these make more than 1e-5 of rounding in float32.
_IN_DOUBLE = (
  *("clippo", "gemma3_1b", "gemma4_26b_a4b", "ijepa", "mixer", "moco_v3"),
  "vit_i1k",
)

# Adam divides by the gradient's size, also where the gradient is nothing but
# rounding, as that of a key's bias. Plain momentum keeps small errors small.
_SGD = dict(name="sgd", momentum=0.9)


def load(spec, *, vocab_size=None, packed=False, dropout=0.1, small=False):
  """Returns a config file's config for float32, or float64, and SGD.

  ReLU has a kink: where rounding changes the sign of its input, a gradient
  changes by much more than rounding. In float64 that is rare.

  Args:
    spec: "name:arguments" of a config file.
    vocab_size: least size of the vocabulary, which becomes a multiple of 8.
    packed: whether several documents share a row, where the data is text.
    dropout: in place of the model's rate.
    small: whether the model has one layer, outside of a loop, and neither
      remat nor mixup, which would take a third of the time to compile.
  """
  name, _, arguments = spec.partition(":")
  config = dict(loading.load(f"{CONFIGS / name}.py:{arguments}"))
  config["optimizer"] = _SGD
  config["schedule"] = {"decay_type": "constant"}
  config["lr"], config["wd"] = 0.1, 0.0
  config["evals"] = {}
  config["mesh"] = {}
  for key in ("grad_clip_norm", "ema", "lr_mults", "wd_mults", "microbatches"):
    config.pop(key, None)
  if config.pop("select", None):  # See tests/objective/test_selection.py.
    del config["teacher"]
  model = config["model"]
  models = [model[name] for name in ("image", "text") if name in model]
  models = models or [model]
  double = config["model_name"] == "resnet" or name in _IN_DOUBLE
  if teacher := config.get("teacher", {}).get("model"):
    teacher["dtype"] = "float32"
  for part in models:
    if config["model_name"] != "resnet":
      part["dropout"] = dropout
    if double or "dtype" in part:
      part["dtype"] = "float64" if double else "float32"
    if small:
      part["depth"] = 1
      if "scan" in part:
        part["scan"] = False
      part.pop("remat_policy", None)
  if config["model_name"] in ("cappa", "coca"):
    model["decoder_dropout"] = dropout
    if small:
      model["decoder_depth"] = 1
  if small:
    config.get("loss", {}).pop("mixup_alpha", None)
  if vocab_size and "vocab_size" in model:
    # Ids beyond the model's vocabulary would give NaN.
    model["vocab_size"] = max(vocab_size, model["vocab_size"] // 8 * 8 + 8)
  if packed and config["task"] == "language_modeling":
    data = config["input"]["data"]
    data["pack" if data["type"] == "supervised" else "packing"] = True
  return config


def is_double(config):
  model = config["model"]
  return model.get("image", model).get("dtype") == "float64"


@contextlib.contextmanager
def precision(config):
  """Lets models have float64 if the config says so, in place of any float32."""
  if not is_double(config):
    yield
    return
  names, float32 = model_options.DTYPES, jnp.float32
  model_options.DTYPES = (*names, "float64")
  jnp.float32 = jnp.float64
  try:
    with jax.enable_x64(True):
      yield
  finally:
    model_options.DTYPES, jnp.float32 = names, float32


def tensor_sizes(config):
  """Returns the sizes of `tensor` that divide the config's model."""
  with precision(config):
    return [n for n in (1, 2, 4, 8) if _divides(json.dumps(config), n)]


@functools.cache
def _divides(text, ways):
  config = settings.Config(json.loads(text))
  module, model = building.model(config)
  if not hasattr(module, "param_dims"):
    return ways == 1
  mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    task = building.task(config)
    spec = pipeline.make_train(config.input, seed=0, mesh=mesh, run=config).spec
    variables = initial.variables_fn(task, model, spec, 0)
    shapes = jax.eval_shape(variables)
  named = trees.flatten_with_names(shapes["params"])
  shapes = {name: tuple(x.shape) for name, x in named}
  try:
    sharding.place(module.param_dims(model), shapes, {"tensor": ways})
    devices = jax.devices()[:ways]
    with jax.set_mesh(sharding.make_mesh(fsdp=1, tensor=ways, devices=devices)):
      jax.eval_shape(variables)
  except ConfigError:
    return False
  return True


def expert_axes(config, sizes):
  """Returns the axes that can split the config's experts, and None."""
  with precision(config):
    _, model = building.model(settings.Config(config))
  moe = getattr(model, "moe", None)
  if moe is None:
    return [None]
  number = moe.num_experts
  return [None, *(a for a, n in sizes.items() if n > 1 and number % n == 0)]


def with_expert_axis(config, axis):
  """Returns the config with whole experts on the devices of an axis."""
  if axis is None:
    return config
  experts = {**config["model"].get("moe", {}), "axis": axis}
  return {**config, "model": {**config["model"], "moe": experts}}


def train(config, sizes, microbatches=1, steps=STEPS):
  """Returns (pairs of each step, gradients of the first, the last state).

  Args:
    config: from `load`.
    sizes: sizes of the mesh's axes.
    microbatches: number of microbatches.
    steps: number of updates.
  """
  number = int(np.prod([*sizes.values()]))
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:number])
  with precision(config):
    start = _start(json.dumps(config, sort_keys=True), steps)
    config = settings.Config({**config, "microbatches": microbatches})
    with jax.set_mesh(mesh):
      return _train(config, mesh, *start)


def objective_of(config, mesh):
  """(objective, units of its lengths) of a run; call it in the mesh's context.

  `config` is a settings.Config.
  """
  train_input = pipeline.from_config(config, 0, mesh)
  units = lengths_lib.read(
    config,
    train_input.batch_size,
    train_input.num_examples,
    train_input.tokens_per_example,
  ).units
  return objective.from_config(config, train_input, mesh, 0, units), units


def _parts(config, mesh):
  """(objective, optimizer) of a run, as in main."""
  learned, units = objective_of(config, mesh)
  optimizer = chain.make(
    config,
    learned.params_spec,
    units,
    learned.param_views,
    mask=learned.trained_rows.masked,
    qk_clip=learned.qk_clip and learned.qk_clip.clipped,
  )
  return learned, optimizer


@functools.cache
def _start(text, steps):
  """(first state, frozen variables, batches) of a run, from one device."""
  config = settings.Config(json.loads(text))
  mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    learned, optimizer = _parts(config, mesh)

    def init():
      variables = learned.init(0)
      params = variables.pop("params")
      trained, _ = trees.partition(params, optimizer.trainable)
      return {
        "params": params,
        "opt": optimizer.tx.init(trained),
        "step": jnp.zeros((), jnp.int32),
        **({"mutable": variables} if variables else {}),
        **learned.init_task_state(params),
      }

    state = jax.device_get(jax.jit(init)())
    if is_double(config):  # flax initialises in float32.
      is_float = lambda x: np.issubdtype(x.dtype, np.floating)
      state = jax.tree.map(
        lambda x: x.astype(np.float64) if is_float(x) else x, state
      )
    frozen = jax.device_get(learned.load_frozen())
    started = learned.train_input.start(0, steps)
    batches = [jax.device_get(next(started)) for _ in range(steps)]
    started.close()
  return state, frozen, batches


def _train(config, mesh, state, frozen, batches):
  learned, optimizer = _parts(config, mesh)
  compute_gradients = learned.gradients_fn(optimizer.trainable)

  def update(state, batch, frozen, hparams):
    grads, pairs, mutable = compute_gradients(
      {**state, **frozen, **hparams}, batch
    )
    trained, fixed = trees.partition(state["params"], optimizer.trainable)
    updates, opt = optimizer.tx.update(
      grads,
      state["opt"],
      trained,
      step=state["step"],
      hparams=hparams,
      loss=pairs["loss"],
      logits=mutable.get("step_largest"),
    )
    params = trees.merge(optax.apply_updates(trained, updates), fixed)
    new = {"params": params, "opt": opt, "step": state["step"] + 1}
    new |= learned.next_variables(state, mutable, params, hparams)
    pairs["grad_norm"] = metrics.global_norm(grads), jnp.ones(())
    return new, grads, dict(_as_pairs(pairs))

  places, _ = sharding.state_shardings(state, mesh, learned.sharding_rules)
  update = jax.jit(update, out_shardings=(places, None, None))
  state = jax.device_put(state, places)
  frozen = jax.device_put(frozen, sharding.replicated(mesh))
  all_pairs, first = [], None
  for step, batch in enumerate(batches):
    batch = jax.device_put(batch, sharding.batch(mesh))
    hparams = {
      "seed": keys.seed_word(0),
      **optimizer.hparams(step),
      **learned.hparams(step),
    }
    state, grads, pairs = update(state, batch, frozen, hparams)
    all_pairs.append(jax.device_get(pairs))
    first = jax.device_get(grads) if first is None else first
  return all_pairs, first, jax.device_get(state)


def _as_pairs(named):
  """Yields (name, (total, weight)) of metrics of all kinds."""
  for name, metric in named.items():
    if isinstance(metric, metrics.Sum):
      yield name, (metric.total, jnp.ones(()))
    elif isinstance(metric, metrics.Max | metrics.Largest):
      yield name, (metric.largest, jnp.ones(()))
    elif isinstance(metric, metrics.Occasional):
      yield from _as_pairs({name: metric.metric})
    elif not isinstance(metric, metrics.Loads):  # Also in "expert_load/...".
      yield name, metric


def check_same(got, want, least_tokens):
  """Asserts that two results of `train` on texts differ by rounding alone.

  Args:
    least_tokens: each step has more tokens with a loss than this.
  """
  pairs, *trees_of_got = got
  want_pairs, *trees_of_want = want
  for ours, theirs in zip(pairs, want_pairs, strict=True):
    number = ours["supervised_tokens"][0]
    assert number == theirs["supervised_tokens"][0] > least_tokens
    for key, pair in ours.items():
      np.testing.assert_allclose(pair, theirs[key], 1e-5, err_msg=key)
  for tree, want_tree in zip(trees_of_got, trees_of_want, strict=True):
    arrays = dict(trees.flatten_with_names(tree))
    want_arrays = dict(trees.flatten_with_names(want_tree))
    assert arrays.keys() == want_arrays.keys()
    for key, array in arrays.items():
      np.testing.assert_allclose(
        np.asarray(array, float),
        np.asarray(want_arrays[key], float),
        rtol=1e-4,
        atol=1e-5,
        err_msg=key,
      )
