"""Rows of a table whose parts are on eight simulated devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.losses import linear_xent

_B, _L, _D = 8, 4, 16


def _loss(table_VD, ids_BL, scale_BLD, dtype):
  x_BLD = sharding.lookup(table_VD, ids_BL, dtype)
  return jnp.sum(x_BLD.astype(jnp.float32) * scale_BLD), x_BLD


@pytest.mark.parametrize(
  "sizes, rows",
  [
    (dict(replica=2, fsdp=4), 64),  # Fewer tokens than rows: exchanged.
    (dict(replica=2, fsdp=4), 4),  # The table is gathered.
    (dict(replica=2, fsdp=4), 7),  # Split by columns.
    (dict(replica=2, fsdp=2, sequence=2), 17),
    (dict(fsdp=2, tensor=4), 64),
    (dict(fsdp=2, sequence=2, tensor=2), 9),  # No rows over `tensor`.
    (dict(replica=8, fsdp=1), 64),
  ],
)
def test_rows_and_gradients_are_those_of_the_whole_table(sizes, rows):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(rows, _D)).astype(np.float32)
  ids = rng.integers(-rows, rows, (_B, _L)).astype(np.int32)
  scale = rng.normal(size=(_B, _L, _D)).astype(np.float32)
  want = np.zeros_like(table)
  np.add.at(want, ids, scale)
  grad = jax.value_and_grad(_loss, has_aux=True)
  with jax.set_mesh(sharding.make_mesh(**sizes)):
    (_, x), got = jax.jit(grad, static_argnums=3)(table, ids, scale, "float32")
  np.testing.assert_array_equal(x, table[ids])
  np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_numbers_that_have_no_row_give_nan():
  ids = np.full((_B, _L), 1, np.int32)
  ids[0, :2] = 64, -65
  for sizes in (dict(fsdp=8), dict(fsdp=2, tensor=4)):
    with jax.set_mesh(sharding.make_mesh(**sizes)):
      look_up = jax.jit(lambda *args: sharding.lookup(*args, "float32"))
      x = np.asarray(look_up(np.ones((64, _D), np.float32), ids))
    assert np.isnan(x[0, :2]).all() and not np.isnan(x[0, 2:]).any()


def test_embedding_and_head_are_sent_in_the_dtype_of_the_computation():
  """No array of a table's size is sent in float32."""

  def loss(table_VD, ids_BL):
    x_BLD = sharding.lookup(table_VD, ids_BL, "bfloat16")
    losses = linear_xent.linear_softmax_xent(x_BLD, table_VD.T, ids_BL)
    return losses.total

  with jax.set_mesh(sharding.make_mesh(replica=2, fsdp=4)):
    lowered = jax.jit(jax.grad(loss)).lower(
      jnp.zeros((512, 64)), jnp.zeros((_B, _L), jnp.int32)
    )
  sent = re.findall(
    r'"stablehlo\.(all_to_all|all_gather|reduce_scatter|all_reduce)".*?'
    r"\) -> tensor<([\dx]*)x(\w+)>",
    lowered.as_text(),
    re.DOTALL,
  )
  large = {
    (kind, dtype)
    for kind, shape, dtype in sent
    if np.prod([int(n) for n in shape.split("x")]) > 4000
  }
  kinds = "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
  assert large == {(kind, "bf16") for kind in kinds}
