"""Numbers of the config are arguments of the update, and not a part of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optim import small_training

from bigtrain import main, sharding, trees
from bigtrain.runtime import programs
from bigtrain.settings import Config
from bigtrain.step import hparams

COSINE = dict(decay_type="cosine", warmup_steps=4, cooldown_steps=2)
STAIR = dict(decay_type="stair", stair_steps=[4, 8], mults=[0.5, 0.1])
PIECES = [dict(COSINE, length_steps=8, scale=0.5), dict(decay_type="constant")]
KERNELS, REST = ".*kernel", ".*"
BASE = dict(
  lr=0.1,
  wd=0.01,
  lr_mults=[(KERNELS, 0.5)],
  wd_mults=[(KERNELS, 1.0), (REST, 0.5)],
  grad_mults=[(KERNELS, 0.5)],
  grad_clip_norm=1.0,
  grad_clip_value=1.0,
  grad_clip_groups=[(KERNELS, 0.5)],
  schedule=COSINE,
)
# Each changes one number, or the few of one key.
NUMBERS = {
  "lr": dict(lr=0.3),
  "lr of 0": dict(lr=0.0),
  "wd": dict(wd=0.2),
  "lr_mults": dict(lr_mults=[(KERNELS, 0.1)]),
  "wd_mults": dict(wd_mults=[(KERNELS, 2.0), (REST, 1.0)]),
  "grad_mults": dict(grad_mults=[(KERNELS, 2.0)]),
  "grad_clip_norm": dict(grad_clip_norm=0.1),
  "grad_clip_value": dict(grad_clip_value=0.1),
  "grad_clip_groups": dict(grad_clip_groups=[(KERNELS, 0.1)]),
  "warm-up": dict(schedule=dict(COSINE, warmup_steps=5)),
  "cool-down": dict(schedule=dict(COSINE, cooldown_steps=5)),
}
# Each changes the program.
STRUCTURE = {
  "no weight decay": dict(wd=0.0, wd_mults=[]),
  "weight decay of fewer": dict(wd_mults=[(KERNELS, 1.0), (REST, 0.0)]),
  "no multiplier": dict(grad_mults=[(KERNELS, 1.0)]),
  "no clipping": dict(grad_clip_value=None),
  "no warm-up": dict(schedule=dict(COSINE, warmup_steps=0)),
  "another schedule": dict(schedule=dict(COSINE, decay_type="linear")),
}


def optimizer_of(**changes):
  """(jitted (gradients, state, parameters, step, values) -> ..., values)."""
  config = {**BASE, **changes}
  optimizer = small_training.make(**config)

  @jax.jit
  def update(grads, state, params, step, values):
    updates, state = optimizer.tx.update(
      grads, state, params, step=step, values=values
    )
    return updates, state, optimizer.rates(step, values)

  return optimizer, update


def arguments(optimizer, step=18):
  params = small_training.tree(0)
  values = jax.tree.map(hparams.as_array, optimizer.values)
  state = jax.jit(optimizer.tx.init)(params)
  return small_training.tree(1), state, params, jnp.int32(step), values


@functools.cache
def base():
  """(optimizer, its update, the program's text)."""
  optimizer, update = optimizer_of()
  return optimizer, update, update.lower(*arguments(optimizer)).as_text()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_no_part_of_the_program(name):
  text = base()[-1]
  other, own_update = optimizer_of(**NUMBERS[name])
  assert own_update.lower(*arguments(other)).as_text() == text
  same = hparams.traced_config({**BASE, **NUMBERS[name]})
  assert same == hparams.traced_config(BASE)


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_is_a_part_of_the_program(name):
  text = base()[-1]
  other, own_update = optimizer_of(**STRUCTURE[name])
  assert own_update.lower(*arguments(other)).as_text() != text
  changed = hparams.traced_config({**BASE, **STRUCTURE[name]})
  assert changed != hparams.traced_config(BASE)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_acts_as_in_a_program_of_its_own(name):
  optimizer, update, _ = base()
  other = small_training.make(**{**BASE, **NUMBERS[name]})
  updates, _, rates = update(*arguments(other))
  before, _, _ = update(*arguments(optimizer))
  assert rates["lr"] == pytest.approx(other.schedules["lr"](18), rel=1e-5)
  grads, state, params, step, _ = arguments(other)
  expected, _ = other.tx.update(grads, state, params, step=step)
  small_training.assert_close(updates, expected, rtol=1e-5, atol=1e-7)
  assert any(
    (x != y).any()
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(before))
  )


@pytest.mark.parametrize(
  "schedule, other",
  [
    (STAIR, dict(STAIR, stair_steps=[3, 9], mults=[0.3, 0.2])),
    (
      dict(decay_type="pieces", pieces=PIECES),
      dict(decay_type="pieces", pieces=[{**PIECES[0], "scale": 2}, PIECES[1]]),
    ),
    (
      dict(decay_type="rsqrt", timescale_steps=5),
      dict(decay_type="rsqrt", timescale_percent=90),
    ),
    (
      dict(decay_type="wsd", decay_steps=5, end=0.1),
      dict(decay_type="wsd", decay_steps=7, end=0.2),
    ),
    (
      dict(decay_type="one_cycle", div_factor=10),
      dict(decay_type="one_cycle", div_factor=5.0),
    ),
  ],
  ids=lambda x: x["decay_type"],
)
def test_schedules_of_a_type_share_one_program(schedule, other):
  texts, configs = set(), []
  for spec in (schedule, other):
    optimizer = small_training.make(schedule=spec)
    values = jax.tree.map(hparams.as_array, optimizer.values)
    rates = jax.jit(optimizer.rates)
    texts.add(rates.lower(jnp.int32(0), values).as_text())
    for step in (1, 8, 19):
      expected = optimizer.schedules["lr"](step)
      assert rates(jnp.int32(step), values)["lr"] == pytest.approx(expected)
    configs.append(hparams.traced_config({"schedule": spec}))
  assert len(texts) == 1
  if "timescale_steps" not in schedule:  # Units are compared as they are.
    assert configs[0] == configs[1]


def test_no_learning_rate_changes_nothing_and_twice_the_rate_changes_twice():
  optimizer, update, _ = base()
  *args, values = arguments(optimizer)
  updates = {}
  for factor in (0.0, 1.0, 2.0):
    scaled = {
      key: value * np.float32(factor)
      for key, value in values.items()
      if key.startswith(("lr", "wd"))
    }
    updates[factor], *_ = update(*args, {**values, **scaled})
  assert not any(x.any() for x in jax.tree.leaves(updates[0.0]))
  twice = jax.tree.map(lambda x: 2 * x, updates[1.0])
  small_training.assert_close(updates[2.0], twice, rtol=1e-5)


@pytest.mark.parametrize(
  "optimizer",
  [
    dict(name="prodigy"),
    dict(name="schedule_free", base_optimizer=dict(name="adam")),
    dict(name="adam", moment_dtype="bfloat16"),
  ],
  ids=lambda x: x["name"],
)
def test_optimizers_that_use_the_rate_or_the_seed_share_one_program(optimizer):
  texts = set()
  for lr, seed in ((0.1, 0), (0.2, 1)):
    own = dict(optimizer=optimizer, lr=lr, seed=seed, lr_mults=None)
    made, update = optimizer_of(**own)
    texts.add(update.lower(*arguments(made)).as_text())
  assert len(texts) == 1


def test_numbers_are_on_all_devices_and_seeds_of_any_size_are_the_same_key():
  mesh = sharding.make_mesh(replica=4, fsdp=2)
  for seed in (0, 7, 2**31 + 5, 2**40 + 3):
    array = hparams.as_array(seed)
    assert jax.random.key(array) == jax.random.key(seed)
  optimizer, _, _ = base()
  config = Config({"seed": 3})
  numbers = hparams.Hparams(config, optimizer, optimizer, None)
  for name, x in trees.flatten_with_names(numbers.arrays(mesh)):
    assert x.is_fully_replicated and len(x.devices()) == 8, name
  spec = numbers.spec(mesh)
  assert jax.tree.map(jax.typeof, numbers.arrays(mesh)) == jax.tree.map(
    lambda x: jax.typeof(jnp.zeros(x.shape, x.dtype, device=x.sharding)), spec
  )


class _Lowered(Exception):
  """Ends main.train once the update is lowered."""


def test_runs_that_differ_in_numbers_have_the_same_update(
  tiny_config, tmp_path, monkeypatch
):
  def lower(self, name, fn, *specs, **options):
    raise _Lowered(jax.jit(fn, **options).lower(*specs).as_text())

  monkeypatch.setattr(programs.Programs, "lower", lower)
  changes = [
    {"ema_decay": 0.9, "ema_start_steps": 1, "loss.label_smoothing": 0.1},
    {"ema_decay": 0.99, "ema_start_steps": 2, "loss.label_smoothing": 0.2}
    | {"seed": 5, "total_steps": 8, "log_steps": 4, "lr": 0.3},
  ]
  first, second = (hparams.traced_config(tiny_config(c)) for c in changes)
  assert first == second
  first = hparams.traced_config(tiny_config({"loss.label_smoothing": 0.0}))
  assert first["loss"] == {"label_smoothing": 0.0}
  texts = set()
  for change in changes:
    with pytest.raises(_Lowered) as lowered:
      main.train(tiny_config(change), str(tmp_path / "run"))
    texts.add(str(lowered.value))
  assert len(texts) == 1
