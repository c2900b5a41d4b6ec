"""Trees by name: flattening, mapping, partition and merge."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.arrays import trees


class _Pair(NamedTuple):
  first: int
  second: int


@struct.dataclass
class _Data:
  count: int


def test_leaves_of_every_container_have_names():
  tree = {
    "p": _Pair(1, 2),
    "d": _Data(3),
    "l": [4, {"x": 5}],
    "t": (6,),
    "n": None,
  }
  assert trees.flatten_with_names(tree) == [
    ("d/count", 3),
    ("l/0", 4),
    ("l/1/x", 5),
    ("p/first", 1),
    ("p/second", 2),
    ("t/0", 6),
  ]
  assert trees.flatten_with_names(3) == [("", 3)]


def test_names_are_in_jax_order_of_the_leaves():
  state = optax.adam(1e-3).init({"b": jnp.zeros(2), "a": {"c": jnp.zeros(3)}})
  flat = trees.flatten_with_names(state)
  leaves = jax.tree.leaves(state)
  assert all(leaf is other for (_, leaf), other in zip(flat, leaves))
  assert trees.names(state) == [name for name, _ in flat]
  assert trees.names(state) == [
    "0/count",
    "0/mu/a/c",
    "0/mu/b",
    "0/nu/a/c",
    "0/nu/b",
  ]


def test_map_with_names_passes_the_name_first():
  tree = {"a": {"b": 1}, "c": [2, 3]}
  seen = trees.map_with_names(lambda name, x, y: (name, x + y), tree, tree)
  assert seen == {"a": {"b": ("a/b", 2)}, "c": [("c/0", 4), ("c/1", 6)]}


_keys = st.text("abc_0", min_size=1, max_size=3)
_nested = st.recursive(
  st.integers(),
  lambda children: st.dictionaries(_keys, children, min_size=1, max_size=4),
  max_leaves=12,
).filter(lambda tree: isinstance(tree, dict))


@given(_nested)
def test_from_flat_is_the_inverse_of_flattening(tree):
  assert trees.from_flat(dict(trees.flatten_with_names(tree))) == tree


@pytest.mark.parametrize(
  "names", [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")]
)
def test_from_flat_rejects_a_leaf_that_is_also_a_parent(names):
  with pytest.raises(ValueError, match="'a"):
    trees.from_flat({name: np.zeros(1) for name in names})


@given(_nested, st.randoms(use_true_random=False))
def test_merge_is_the_inverse_of_partition(tree, random):
  mask = jax.tree.map(lambda _: random.random() < 0.5, tree)
  chosen, others = trees.partition(tree, mask)
  for part, in_part in [(chosen, True), (others, False)]:
    assert trees.flatten_with_names(part) == [
      leaf
      for leaf, flag in zip(
        trees.flatten_with_names(tree), jax.tree.leaves(mask)
      )
      if flag is in_part
    ]
  merged = trees.merge(chosen, others)
  assert merged == tree
  assert list(merged) == sorted(tree)
  assert jax.tree.structure(merged) == jax.tree.structure(tree)


def test_partition_rejects_a_mask_of_another_structure():
  with pytest.raises(ValueError, match=r"differ in structure: \['b', 'c'\]"):
    trees.partition({"a": 1, "b": 2}, {"a": True, "c": False})


def test_merge_rejects_a_leaf_in_both():
  with pytest.raises(ValueError, match="'b'"):
    trees.merge({"a": {"b": 1}}, {"a": {"b": 1}})
  with pytest.raises(ValueError, match="'a'"):
    trees.merge({"a": {"b": 1}}, {"a": 1})


def test_gradients_of_one_part_of_a_partition():
  params = {"frozen": jnp.ones(3), "head": {"w": jnp.ones(2)}}
  mask = {"frozen": False, "head": {"w": True}}

  @jax.jit
  def grads(params):
    chosen, others = trees.partition(params, mask)

    def loss(chosen):
      return sum(
        jnp.sum(x**2) for x in jax.tree.leaves(trees.merge(chosen, others))
      )

    return jax.grad(loss)(chosen)

  assert trees.names(grads(params)) == ["head/w"]
  np.testing.assert_array_equal(grads(params)["head"]["w"], [2.0, 2.0])


def test_num_bytes_of_arrays_and_specs():
  leaves = [
    np.zeros((3, 2), np.float32),
    jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    jnp.zeros((), jnp.int32),
  ]
  assert trees.num_bytes(leaves) == 24 + 10 + 4
  assert trees.num_bytes([]) == 0
