"""The delta rule's kernel, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from models.layers import test_delta_rule as rule

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import delta_rule, delta_rule_kernel, triangular
from bigtrain.reports import flops


@pytest.fixture(autouse=True)
def small_interpreted_chunks(monkeypatch):
  monkeypatch.setattr(delta_rule_kernel, "_INTERPRET", True)
  monkeypatch.setattr(delta_rule_kernel, "_CHUNK", 16)
  # Blocks of one head of keys.
  monkeypatch.setattr(delta_rule_kernel, "_HEADS", 2)


def single(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def inputs(length, documents=False):
  """In float32, but whether a position starts a document."""
  given = rule.inputs(length, documents)
  return delta_rule.Inputs(*single(given[:5]), given.starts_BL)


@pytest.mark.parametrize(
  ("length", "documents"), [(1, False), (16, True), (37, True), (50, False)]
)
def test_the_kernel_is_the_recurrence(length, documents):
  given, state = inputs(length, documents), single(rule.state())
  expected = rule.results(rule.recurrent, given, state)
  actual = rule.results(delta_rule_kernel.chunked, given, state)
  rule.assert_close(actual, expected, 1e-5)


def test_strong_decays_neither_overflow_nor_give_nan():
  given = inputs(20)
  given = given._replace(log_decay=jnp.full_like(given.log_decay, -1e4))
  state = single(rule.state())
  outputs = rule.results(delta_rule_kernel.chunked, given, state)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(outputs))


def test_equal_keys_lose_no_digits(float64):
  given = rule.inputs(48, equal_keys=True)
  expected = rule.recurrent(given, rule.state())
  rounded = single((given, rule.state()))
  actual = jax.jit(delta_rule_kernel.chunked)(*rounded)
  rule.assert_close(actual, expected, 1e-5)


def test_inverse_by_masks_and_its_gradient(float64):
  rng = np.random.default_rng(0)
  lower = jnp.asarray(np.tril(rng.normal(size=(3, 16, 16)), -1))

  def inverse_and_gradient(inverse):
    total = lambda x: jnp.sum(jnp.sin(inverse(x)))
    return inverse(lower), jnp.tril(jax.grad(total)(lower), -1)

  expected = inverse_and_gradient(lambda x: jnp.linalg.inv(x + jnp.eye(16)))
  actual = inverse_and_gradient(triangular.unit_inverse_by_masks)
  rule.assert_close(actual, expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_devices_pass_the_state_on(documents):
  given, state = inputs(40, documents), single(rule.state())
  empty = jnp.zeros_like(state)
  mesh = sharding.make_mesh(sequence=2, devices=jax.devices()[:2])
  split = PartitionSpec(None, "sequence")

  def over_devices(given, state):
    run = jax.shard_map(
      lambda x: delta_rule.over_devices(x, "sequence", "pallas"),
      in_specs=(jax.tree.map(lambda x: split, given),),
      out_specs=split,
      check_vma=False,
    )
    return run(given), state

  with jax.set_mesh(mesh):
    actual = rule.results(over_devices, given, empty)
  one_device = lambda x, same: (rule.recurrent(x, empty)[0], same)
  expected = rule.results(one_device, given, empty)
  rule.assert_close(actual, expected, 1e-5)


CALL = delta_rule_kernel.Call("tpu", True, 4096, 128, 128, "float32", False)


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    (dict(platform="gpu"), "it needs a TPU, not a gpu"),
    (dict(by_channel=True), "its states decay by head, not by channel"),
    (dict(dtype="float64"), "it computes in float32, not float64"),
    (dict(splits=False), "the mesh does not split the batch"),
  ],
)
def test_what_the_kernel_cannot_compute_is_one_clear_line(changes, reason):
  call = CALL._replace(**changes)
  assert delta_rule_kernel.choose("auto", call) == "xla"
  with pytest.raises(ConfigError, match=reason) as error:
    delta_rule_kernel.choose("pallas", call)
  assert "config.model.deltanet.backend='pallas'" in str(error.value)
  assert "\n" not in str(error.value)


def test_auto_takes_the_kernel_for_whole_chunks():
  assert delta_rule_kernel.choose("auto", CALL) == "pallas"
  assert delta_rule_kernel.choose("auto", CALL._replace(length=15)) == "xla"
  assert delta_rule_kernel.choose("xla", CALL) == "xla"


def test_its_flops_are_almost_those_of_plain_jax(monkeypatch):
  """Of a published layer. The kernel needs no w, see delta_rule._Chunks."""
  monkeypatch.setattr(delta_rule_kernel, "_CHUNK", 64)
  monkeypatch.setattr(delta_rule_kernel, "_HEADS", 8)
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  q, positions = shape(1, 512, 16, 128), shape(1, 512, 16, 2)
  arrays = q, q, shape(1, 512, 16, 2, 128), positions, positions

  def count(backend):
    def outputs(*arrays):
      given = delta_rule.Inputs(*arrays)
      return delta_rule.chunked(given, delta_rule.empty_state(given), backend)

    return flops.forward_flops(outputs, *arrays)

  assert 0.85 < count("pallas") / count("xla") < 1
