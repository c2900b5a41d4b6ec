"""Experts that begin as the MLPs of a dense model."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from support import any_mesh

import bigtrain
from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import upcycling, warm_start
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder, t5
from bigtrain.objective import building, published_sizes

PUBLISHED = pathlib.Path(__file__).parents[1] / "golden/published"
SIZES = dict(variant="llama", vocab_size=19, width=8, depth=4, num_heads=2)
SIZES |= dict(mlp_dim=6, init_std=0.5)
TOKENS = np.random.default_rng(0).integers(1, 19, (2, 7))
E = 4


def sizes(module):
  if module is decoder:
    return SIZES
  small = {n: x for n, x in SIZES.items() if n != "init_std"}
  return small | dict(variant="t5_1_1")


def args_of(module):
  return (TOKENS,) if module is decoder else (TOKENS, TOKENS)


@functools.cache
def dense_file(module, scan, folder):
  """(path, logits) of a dense model's parameters in a file."""
  model = module.Model(**sizes(module), scan=scan)
  args = args_of(module)
  variables = jax.jit(model.init)(jax.random.key(0), *args)
  path = folder / f"{module.__name__}-{scan}.npz"
  np.savez(path, **dict(trees.flatten_with_names(variables["params"])))
  return str(path), np.asarray(jax.jit(model.apply)(variables, *args)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("dense")


def upcycled(module, model, source, devices=1):
  """The variables of a model with experts; new arrays are of another seed."""
  args = args_of(module)
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  init = functools.partial(model.init, jax.random.key(7), *args)
  shapes = jax.eval_shape(init)
  rules = ((".*", "fsdp(min_size=1)"),)
  places, _ = sharding.state_shardings(shapes, mesh, rules)
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    dict(shapes),
    dict(places),
  )
  return warm_start.load_variables(
    source, like, init=jax.jit(init), module=module
  )


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
  (decoder, False, True, dict(top_k=2)),
  (decoder, True, True, dict(top_k=2, every=2, score="sigmoid")),
  (decoder, True, False, dict(top_k=1, normalize=True, selection_bias=True)),
  slow(decoder, True, True, dict(top_k=3, score="softmax_of_top")),
  slow(t5, True, True, dict(top_k=2, every=2)),
]


@pytest.mark.parametrize("module, dense_scan, scan, experts", CASES)
def test_the_model_begins_as_the_dense_one(
  folder, module, dense_scan, scan, experts
):
  path, want = dense_file(module, dense_scan, folder)
  moe = dict(num_experts=E, router_init_std=1.0) | experts
  model = module.Model(**sizes(module), scan=scan, moe=moe)
  source = dict(path=path, upcycle=True)
  variables = upcycled(module, model, source)
  logits, out = jax.jit(model.apply)(variables, *args_of(module))
  np.testing.assert_allclose(logits, want, atol=1e-5, rtol=0)
  assert np.ptp(out["moe"]["load"]) > 0  # A router of random numbers.
  assert upcycling.differences(model, upcycling.Upcycling()) == []
  kernels = dict(trees.flatten_with_names(variables["params"]))
  up = next(x for n, x in kernels.items() if n.endswith("moe/up/kernel"))
  assert up.shape[-3] == E and (up == up[..., :1, :, :]).all()


@pytest.mark.parametrize(
  "moe, reason",
  [
    (dict(top_k=1), "do not add up to 1"),
    (dict(top_k=2, scale=2.5), "do not add up to 1"),
    (dict(top_k=2, capacity_factor=1.0), "may drop tokens"),
    (dict(top_k=2, shared_experts=1), "shared experts are new"),
  ],
)
def test_what_makes_another_function_is_said(moe, reason):
  model = decoder.Model(**SIZES, moe=dict(num_experts=E) | moe)
  text = upcycling.describe_start(model, upcycling.Upcycling())
  assert "does not compute the function" in text and reason in text


def test_a_published_folder_becomes_a_model_with_experts():
  folder = PUBLISHED / "qwen3"
  moe = dict(num_experts=E, top_k=2, router_init_std=1.0)
  config = settings.Config(
    dict(
      model_name="decoder",
      model=dict(published=str(folder), moe=moe),
      model_init=dict(path=str(folder), upcycle=True),
    )
  )
  config = published_sizes.with_published_sizes(config)
  module, model = building.model(config)
  source = config.kwargs("model_init")
  warm_start.check_published(source, module, model)
  variables = upcycled(module, model, source)
  with np.load(folder / "reference.npz") as reference:
    logits, _ = jax.jit(model.apply)(variables, reference["tokens"])
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-5)
  wrong = model.clone(norm_eps=1e-3)
  with pytest.raises(ConfigError, match="norm_eps=0.001"):
    warm_start.check_published(source, module, wrong)


LAYER = dict(num_experts=E, top_k=2)


def experts_of(path, devices=1, **options):
  model = decoder.Model(**SIZES, scan=True, moe=LAYER)
  source = dict(path=path, upcycle=options or True)
  variables = upcycled(decoder, model, source, devices)
  moe = jax.device_get(variables["params"]["blocks"]["moe"])
  return {name: moe[name]["kernel"] for name in ("up", "gate", "down")}


def test_noise_is_relative_and_differs_between_experts(folder):
  path, _ = dense_file(decoder, True, folder)
  plain, noisy = experts_of(path), experts_of(path, noise=0.1)
  for name, x in plain.items():
    change = noisy[name] - x
    deviation = x.std(axis=(1, 2, 3), keepdims=True)
    assert (change / deviation).std() == pytest.approx(0.1, rel=0.15)
    assert abs(change[:, 0] - change[:, 1]).max() > 0
  other = experts_of(path, noise=0.1, seed=1)
  assert (other["up"] != noisy["up"]).all()


def test_a_part_of_the_hidden_units_begins_anew(folder):
  path, _ = dense_file(decoder, True, folder)
  plain, new = experts_of(path), experts_of(path, reinit_fraction=0.5)
  changed = {name: new[name] != plain[name] for name in plain}
  units = changed["up"].all(axis=2)  # (layers, experts, hidden units).
  np.testing.assert_array_equal(units.sum(-1), 3)
  assert (units[:, 0] != units[:, 1]).any()
  # A unit is new as a whole: in both kernels before it, and in the one after.
  np.testing.assert_array_equal(changed["gate"].all(axis=2), units)
  np.testing.assert_array_equal(changed["down"].all(axis=3), units)
  np.testing.assert_array_equal(changed["up"].any(axis=2), units)


@pytest.mark.parametrize("options", [{}, dict(noise=0.1, reinit_fraction=0.5)])
def test_devices_do_not_change_the_experts(folder, options):
  path, _ = dense_file(decoder, True, folder)
  jax.tree.map(
    np.testing.assert_array_equal,
    experts_of(path, devices=8, **options),
    experts_of(path, **options),
  )


@pytest.mark.parametrize(
  "changes, upcycle, message",
  [
    (dict(moe=None), True, "the model has no experts"),
    (
      dict(moe=LAYER | dict(mlp_dim=5)),
      True,
      r"(?s)reshaped +blocks/mlp/up/kernel +expected float32\[4,8,5\], found "
      r"float32\[4,8,6\].*config.model.moe.mlp_dim is their width",
    ),
    (
      dict(moe=LAYER | dict(shared_experts=1)),
      True,
      "missing +blocks/shared_experts/up/kernel",
    ),
    (
      dict(moe=LAYER, use_bias=("experts",)),
      True,
      "missing +blocks/mlp/up/bias",
    ),
    (dict(moe=LAYER | dict(beside_mlp=True)), True, "not beside it"),
    (dict(moe=LAYER), "yes", "upcycle: expected True or a dict, got 'yes'"),
    (dict(moe=LAYER), dict(noisy=1), "noisy"),
    (dict(moe=LAYER), dict(reinit_fraction=2), "reinit_fraction"),
  ],
)
def test_mistakes_are_one_clear_line(folder, changes, upcycle, message):
  path, _ = dense_file(decoder, True, folder)
  model = decoder.Model(**SIZES | changes, scan=True)
  with pytest.raises(ConfigError, match=message):
    upcycled(decoder, model, dict(path=path, upcycle=upcycle))


@pytest.mark.slow
def test_a_run_continues_as_experts(tmp_path, caplog):
  """As in docs/experts.md; the optimizer begins anew."""
  config = any_mesh.load("pydoc_lm:runlocal", dropout=0.0)
  config |= dict(total_steps=2, log_steps=1, ckpt_steps=2, lr=0.05)
  main.train(config, str(tmp_path / "dense"))
  moe = dict(num_experts=E, top_k=2)
  config |= dict(model=config["model"] | dict(moe=moe), lr=0.0)
  config |= dict(model_init=dict(path=str(tmp_path / "dense"), upcycle=True))
  with caplog.at_level("INFO"):
    main.train(config, str(tmp_path / "experts"))
  assert "computes the same function as the dense one" in caplog.text
  pairs = [([1, 2, 3], [4, 5]), ([9], [8, 7, 6])]
  want = bigtrain.load(str(tmp_path / "dense")).score_ids(pairs)
  got = bigtrain.load(str(tmp_path / "experts")).score_ids(pairs)
  for one, other in zip(got, want, strict=True):
    assert one == pytest.approx(other, abs=1e-4)
