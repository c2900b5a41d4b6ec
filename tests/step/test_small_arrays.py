"""Small arrays that are updated as one vector."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import trees
from bigtrain.step import joined, small_arrays

SHAPES = {
  "kernel": (32, 32),  # Too large to be joined.
  "bias": (100,),
  "heads": (4, 25),
  "norm": {"scale": (7,), "bias": (7,)},
}


def random(seed, shapes=SHAPES):
  keys = iter(jax.random.split(jax.random.key(seed), 100))
  return jax.tree.map(
    lambda shape: jax.random.normal(next(keys), shape),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def spec_of(state, layouts=None):
  """Specs with layouts: replicated, unless given by key of the parameters."""
  mesh = jax.make_mesh((8,), ("fsdp",))

  def spec(path, x):
    names = set(map(trees.key_name, path))
    axis = next((a for name, a in (layouts or {}).items() if name in names), ())
    layout = NamedSharding(mesh, PartitionSpec(*axis))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

  return jax.tree_util.tree_map_with_path(spec, state)


def advance_of(tx, state, grads, after=lambda params: params):
  """One step as main has it: (new state, updates)."""

  def advance():
    updates, opt = tx.update(grads, state["opt"], state["params"])
    params = after(optax.apply_updates(state["params"], updates))
    return {"params": params, "opt": opt, "step": state["step"] + 1}, updates

  return advance


def start(tx):
  params = random(0)
  return {"params": params, "opt": tx.init(params), "step": jnp.int32(3)}


def run(tx, *, layouts=None, after=lambda params: params):
  """Three joined and three plain steps: (states, states, first result)."""
  small = small_arrays.SmallArrays(spec_of(start(tx), layouts))
  first = []

  def joined_step(state, grads):
    result = small.joined(state)(advance_of(tx, state, grads, after))()
    first.append(jax.eval_shape(lambda: result))
    return joined.split(result)

  def plain_step(state, grads):
    return advance_of(tx, state, grads, after)()

  results = []
  for step in (joined_step, plain_step):
    state, step = start(tx), jax.jit(step)
    for i in range(3):
      state, updates = step(state, random(i + 1))
    results.append((state, updates))
  return (*results, first[0])


def assert_close(ours, plain):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
    *(ours, plain),
  )


@pytest.mark.parametrize(
  "tx, arrays_of_state",
  [
    (optax.sgd(0.1, momentum=0.9, nesterov=True), 2),
    (optax.adamw(0.1, weight_decay=0.1), 3),
    (optax.adamw(0.1, mask={**dict.fromkeys(SHAPES, True), "norm": False}), 3),
    (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), 3),
    (optax.chain(optax.clip(0.1), optax.nadam(0.1)), 3),
  ],
)
def test_steps_of_optimizers_are_the_same_on_one_vector(tx, arrays_of_state):
  ours, plain, (state, updates) = run(tx)
  assert_close(ours, plain)
  assert [x.size for x in state["params"].alone] == [1024]
  assert sum(x.size for x in state["params"].vectors) == 100 + 100 + 7 + 7
  assert len(updates.alone) == 1
  vectors = [x for part in state.values() for x in part.vectors]
  assert sum(x.size for x in vectors) == 214 * arrays_of_state


@pytest.mark.parametrize("tx", [optax.lamb(0.1), optax.adafactor(0.1)])
def test_optimizers_of_whole_arrays_give_the_same_updates(tx):
  ours, plain, _ = run(tx)
  assert_close(ours, plain)


def test_chains_with_different_numbers_are_not_merged():
  def after(params):
    return {**params, "bias": 2 * params["bias"], "heads": 3 * params["heads"]}

  ours, plain, (state, _) = run(optax.adam(0.1), after=after)
  assert_close(ours, plain)
  assert [x.size for x in state["params"].vectors] == [14]


def test_arrays_that_devices_share_stay_alone():
  layouts = {"heads": ("fsdp",)}
  ours, plain, (state, updates) = run(optax.adam(0.1), layouts=layouts)
  assert_close(ours, plain)
  assert [x.size for x in state["params"].vectors] == [114]
  assert sorted(x.size for x in updates.alone) == [100, 1024]


def test_arrays_whose_moments_devices_share_stay_alone():
  *_, (state, _) = run(optax.adam(0.1), layouts={"mu": ("fsdp",)})
  assert not any(part.vectors for part in state.values())


def test_what_mixes_positions_is_done_to_each_array():
  after = functools.partial(jax.tree.map, lambda x: 2 * jnp.flip(x) + x[0])
  ours, plain, (state, updates) = run(optax.adam(0.1), after=after)
  assert_close(ours, plain)
  assert not state["params"].vectors
  assert [x.size for x in updates.vectors] == [214]


def test_chains_that_need_each_other_are_computed_apart():
  def after(params):
    heads = 2 * (params["heads"] + jnp.flip(params["heads"]))
    bias = 2 * (params["bias"] + jnp.flip(heads.reshape(-1)))
    return {**params, "heads": heads, "bias": bias}

  ours, plain, (state, _) = run(optax.sgd(0.1), after=after)
  assert_close(ours, plain)
  assert not state["params"].vectors


def test_a_tree_is_joined_like_another():
  *_, (state, _) = run(optax.adam(0.1))
  params = random(9)
  again = state["params"].like(params)
  jax.tree.map(np.testing.assert_array_equal, again.split(), params)
  whole = {"params": params, "step": 5}
  back = joined.split(joined.like({"params": again, "step": 0}, whole))
  jax.tree.map(np.testing.assert_array_equal, back, whole)


def test_norm_is_of_all_arrays():
  state = start(optax.sgd(0.1))
  small = small_arrays.SmallArrays(spec_of(state))
  tree = random(4)
  some = {"bias": tree["bias"], "norm": {"scale": tree["norm"]["scale"]}}
  for part in (tree, some):
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(part)])
    norm = np.linalg.norm(flat.astype(np.float64))
    np.testing.assert_allclose(small.norm(part), norm, rtol=1e-6)
