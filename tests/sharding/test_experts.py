"""The dimension of experts' kernels that `fsdp` splits, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.models.layers import layer_dims, mlp, moe
from bigtrain.tools.plan import collectives, hlo

B, L, D, E = 8, 4, 16, 8


def _specs(shapes, sizes, layout="fsdp", **options):
  """{name: spec} of parameters, on a mesh of these sizes."""
  mesh = sharding.make_mesh(**sizes)
  table = layer_dims.LAYERS
  if options:
    table = layer_dims.with_experts(table, moe.Options(E, **options))
  rules = sharding.Rules(
    [(".*", layout)], sharding.place(table, shapes, mesh.shape)
  )
  arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
  shardings, notes = sharding.state_shardings(arrays, mesh, rules)
  assert notes == []
  return {name: tuple(x.spec) for name, x in shardings.items()}


@pytest.mark.parametrize(
  "shape, spec",
  [
    ((8, 16, 64), ("fsdp",)),
    ((3, 8, 16, 64), (None, "fsdp")),  # Three layers.
    ((4, 16, 64), (None, "fsdp")),  # 8 does not divide the experts.
    ((3, 4, 16, 64), (None, None, "fsdp")),
    ((4, 12, 64), (None, None, "fsdp")),  # Nor the rows.
    ((8, 4, 12, 64), (None, None, None, "fsdp")),  # The layers would, too.
    ((8, 8, 8), ()),  # Fewer elements than min_size.
  ],
)
def test_fsdp_splits_experts_or_else_rows_if_they_divide(shape, spec):
  name = "blocks/moe/down/kernel"
  assert _specs({name: shape}, dict(fsdp=8)) == {name: spec}


def test_other_arrays_are_split_at_their_largest_dimension():
  shapes = {
    "mlp/down/kernel": (16, 64),
    "query/kernel": (16, 8, 64),
    "moe/router/kernel": (16, 64),
    "moe/up/bias": (16, 64),
  }
  specs = _specs(shapes, dict(fsdp=8))
  assert all(spec[-1] == "fsdp" for spec in specs.values())


def test_rows_over_tensor_are_not_split_again():
  shapes = {"moe/up/kernel": (6, 16, 64), "moe/down/kernel": (6, 64, 16)}
  assert _specs(shapes, dict(fsdp=4, tensor=2)) == {
    "moe/up/kernel": (None, "fsdp", "tensor"),
    "moe/down/kernel": (None, "tensor", "fsdp"),
  }


@pytest.mark.parametrize(
  "sizes, axis, spec",
  [
    (dict(fsdp=8), "fsdp", ("fsdp",)),
    (dict(replica=2, fsdp=4), "replica", ("replica", "fsdp")),
  ],
)
def test_experts_keep_their_own_axis(sizes, axis, spec):
  name = "moe/down/kernel"
  assert _specs({name: (8, 16, 64)}, sizes, axis=axis) == {name: spec}


@pytest.mark.parametrize(
  "layout, spec",
  [
    ("fsdp(-1)", (None, None, "fsdp")),
    ("replicated", ()),
    ("tensor(0), fsdp", ("tensor", "fsdp")),
    ("fsdp(min_size=100000)", ()),
  ],
)
def test_a_layout_of_the_config_decides(layout, spec):
  name = "moe/down/kernel"
  sizes = dict(replica=2, fsdp=4)
  assert _specs({name: (8, 16, 64)}, sizes, layout) == {name: spec}


# 8 divides 8 experts, and not 4. It divides 24 rows of `down`, and not 20.
@pytest.mark.parametrize("num_experts, hidden", [(8, 24), (4, 24), (4, 20)])
def test_layers_gather_the_dimension_that_the_state_is_split_by(
  num_experts, hidden
):
  layer = moe.Moe(
    moe.Options(num_experts, top_k=2, router_init_std=1.0),
    mlp.Options(hidden, "swiglu", init_std=0.25, out_init_std=0.2),
  )
  x = np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)
  params = layer.init(jax.random.key(0), x, None, False)["params"]
  state = {"moe": params}
  shapes = {n: a.shape for n, a in trees.flatten_with_names(state)}

  @jax.jit
  def gradients(state, x):
    def loss(state):
      y, _ = layer.apply({"params": state["moe"]}, x, None, False)
      return jnp.sum(jnp.sin(y))

    return jax.grad(loss)(state)

  want = gradients(state, x)
  mesh = sharding.make_mesh(fsdp=8)
  rules = sharding.Rules(
    of_model=sharding.place(layer_dims.LAYERS, shapes, mesh.shape)
  )
  places, _ = sharding.state_shardings(state, mesh, rules)
  with jax.set_mesh(mesh):
    args = (
      jax.device_put(state, places),
      jax.device_put(x, sharding.batch(mesh)),
    )
    program = jax.jit(gradients, out_shardings=places).lower(*args).compile()
    got = program(*args)
  sent = collectives.sent(hlo.Module(program.as_text()))[0]
  # Another dimension would be exchanged for this one.
  kinds = {one.kind for one in sent}
  assert {"all-gather", "reduce-scatter"} <= kinds
  assert not kinds & {"all-to-all", "collective-permute"}
  for name, x in trees.flatten_with_names(want):
    np.testing.assert_allclose(
      dict(trees.flatten_with_names(got))[name], x, 0, 1e-5 * np.abs(x).max()
    )
