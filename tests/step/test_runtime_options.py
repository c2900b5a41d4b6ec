"""Options of losses and models that are arguments of the update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import parts, settings, sharding, trees
from bigtrain.losses import linear_xent
from bigtrain.models.layers import dropout
from bigtrain.step import gradients, hparams, initial

SMALL = dict(width=16, depth=2, num_heads=2)
PATCHES = dict(SMALL, patch_size=4, mlp_dim=32)
RATES = dict(dropout=0.1, drop_path=0.2)
TOKENS = dict(SMALL, vocab_size=31)
EXPERTS = dict(num_experts=4, top_k=2, dropout=0.3)
XENT = dict(label_smoothing=0.1, z_loss=1e-3)
# Task, model, config.model, config.loss, number of arguments.
CASES = {
  "vit": (
    *("classification", "vit"),
    dict(
      PATCHES,
      **RATES,
      num_classes=5,
      head_zeroinit=False,
      scan=True,
      remat_policy="nothing_saveable",
    ),
    dict(label_smoothing=0.1, mixup_alpha=0.2),
    4,
  ),
  "experts": (
    *("language_modeling", "decoder"),
    dict(TOKENS, max_len=8, dropout=0.1, moe=dict(EXPERTS, axis="fsdp")),
    dict(XENT, chunk=3, load_balance=0.02, router_z=0.002),
    6,
  ),
  "experts of every second layer": (
    *("language_modeling", "decoder"),
    dict(TOKENS, max_len=8, dropout=0.1, scan=True)
    | dict(moe=dict(EXPERTS, every=2, capacity_factor=1.5)),
    dict(z_loss=1e-3),
    3,
  ),
  "t5": (
    *("seq2seq", "t5"),
    dict(TOKENS, num_buckets=8, max_distance=16, dropout=0.1),
    XENT,
    3,
  ),
  "cappa": (
    *("captioning", "cappa"),
    dict(PATCHES, **RATES, vocab_size=31, max_len=8, decoder_dropout=0.3),
    XENT,
    5,
  ),
  "towers": (
    *("contrastive", "two_towers"),
    dict(out_dim=8, image=dict(PATCHES, **RATES))
    | dict(text=dict(TOKENS, mlp_dim=32, dropout=0.2)),
    {},
    3,
  ),
}


def batch_of(task):
  rng = np.random.default_rng(0)
  image = rng.normal(size=(8, 8, 8, 3)).astype(np.float32)
  tokens = rng.integers(1, 31, (8, 8)).astype(np.int32)
  text = {"inputs": tokens, "targets": tokens}
  return {
    "classification": {"image": image, "labels": tokens[:, 0] % 5},
    "language_modeling": {"tokens": tokens, "targets": tokens},
    "seq2seq": text,
  }.get(task, {"image": image, "labels": tokens})


def config_of(name, factor=1.0):
  """The config of a case, with its numbers times a factor."""
  task, model_name, model, loss, _ = CASES[name]
  plain = dict(task=task, model_name=model_name, model=model, loss=loss)
  plain |= dict(input=dict(batch_size=8), microbatches=2)
  values = hparams.Hparams(settings.Config(plain), *[NoNumbers] * 3).values
  for key in ("loss", "model"):
    scaled = {path: x * factor for path, x in values[key].items()}
    plain[key] = trees.with_entries(plain[key], scaled)
  return plain


class NoNumbers:
  values = {}


def gradients_of(plain, ways, as_arguments):
  """Returns (lowered gradients, their arguments)."""
  config = settings.Config(plain)
  mesh = sharding.make_mesh(fsdp=ways, devices=jax.devices()[:ways])
  with jax.set_mesh(mesh):
    task, (_, model) = parts.task(config), parts.model(config)
    batch = batch_of(config.task)
    spec = sharding.batch_spec(jax.eval_shape(lambda: batch), mesh)
    variables = jax.jit(initial.variables_fn(task, model, spec, 0))()
    params = variables.pop("params")
    loss_fn = jax.jit(parts.loss_fn(config, task, model))
    trainable = jax.tree.map(lambda _: True, params)
    fn = gradients.from_config(
      config, task, model, loss_fn, trainable=trainable, mesh=mesh
    )
    values = hparams.Hparams(config, *[NoNumbers] * 3).values
    values = jax.tree.map(hparams.as_array, values)
    if not as_arguments:
      values |= {"loss": {}, "model": {}}
    state = {"params": params, "step": jnp.int32(3), "mutable": variables}
    state["hparams"] = values
    args = (
      jax.device_put(state, sharding.replicated(mesh)),
      jax.device_put(batch, sharding.batch(mesh)),
    )
    return jax.jit(fn).lower(*args), args


def same_program_and_results(name, ways):
  plain = config_of(name)
  values = hparams.Hparams(settings.Config(plain), *[NoNumbers] * 3).values
  assert len(values["loss"] | values["model"]) == CASES[name][-1]
  other = config_of(name, 2.0)
  assert plain != other
  assert hparams.traced_config(plain) == hparams.traced_config(other)
  lowered, args = gradients_of(plain, ways, True)
  doubled, other_args = gradients_of(other, ways, True)
  assert lowered.as_text() == doubled.as_text()
  compiled = lowered.compile()
  got = jax.block_until_ready(compiled(*args))
  changed = jax.block_until_ready(compiled(*other_args))
  constants, own_args = gradients_of(plain, ways, False)
  assert constants.as_text() != lowered.as_text()
  want = jax.block_until_ready(constants.compile()(*own_args))
  np.testing.assert_allclose(got[1]["loss"], want[1]["loss"], rtol=1e-6)
  assert got[1]["loss"][0] != changed[1]["loss"][0]
  top = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(want[0]))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * top),
    *(got[0], want[0]),
  )


@pytest.mark.parametrize("name", ["experts"])
def test_numbers_are_arguments_and_act_as_constants_do(name):
  same_program_and_results(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_all_models_are_arguments_on_two_devices(name):
  same_program_and_results(name, 2)


def test_a_rate_of_zero_is_structure():
  base = config_of("t5")
  none = base | {"model": base["model"] | {"dropout": 0.0}}
  placed = hparams.traced_config(none)["model"]
  assert placed["dropout"] == 0.0
  assert placed != hparams.traced_config(base)["model"]


@pytest.mark.parametrize(
  "path, rate", [("dropout", 1.0), ("moe.dropout", -0.1)]
)
def test_a_rate_out_of_range_is_refused_before_a_trace(path, rate):
  plain = config_of("experts")
  plain["model"] = trees.with_entries(plain["model"], {path: rate})
  message = f"config.model.{path}: expected .* at least 0 and below 1"
  with pytest.raises(settings.ConfigError, match=message):
    parts.model(settings.Config(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.1, 0.58])
def test_dropout_is_flaxs_for_constants_and_arguments(rate, dtype):
  x = jax.random.normal(jax.random.key(0), (64, 33), dtype)
  rngs = {"dropout": jax.random.key(1)}
  flaxs = dropout.nn.Dropout(rate, deterministic=False)
  want = jax.jit(lambda x: flaxs.apply({}, x, rngs=rngs))(x)

  def ours(x, rate):
    return dropout.Dropout(rate).apply({}, x, train=True, rngs=rngs)

  np.testing.assert_array_equal(jax.jit(ours)(x, np.float32(rate)), want)
  np.testing.assert_array_equal(jax.jit(lambda x: ours(x, rate))(x), want)


def test_arguments_of_a_loss_have_no_gradient():
  hidden = jnp.ones((2, 8, 4))
  kernel = jnp.ones((4, 16))

  def total(z_loss):
    targets = jnp.zeros((2, 8), int)
    return linear_xent.linear_softmax_xent(
      hidden, kernel, targets, z_loss=z_loss
    ).total

  assert jax.grad(total)(0.1) == 0
