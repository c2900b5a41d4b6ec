"""Traffic of programs, compared with sizes calculated by hand."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.models import vit
from bigtrain.models.layers import attention, masks
from bigtrain.tools.plan import collectives, hlo

ROWS, D, F = 512, 64, 32
WHOLE = PartitionSpec()
BATCH = PartitionSpec(sharding.BATCH_AXES)
COLUMNS = PartitionSpec(None, "fsdp")


@pytest.fixture(autouse=True)
def no_compile_cache():
  """A program from the cache leaves no dump of its text."""
  folder = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_compilation_cache_dir", folder)
  compilation_cache.reset_cache()


def partitioned(lowered):
  """Collectives of a program after XLA's partitioner."""
  with tempfile.TemporaryDirectory() as folder:
    lowered.compile(
      compiler_options={
        "xla_dump_to": folder,
        "xla_dump_hlo_pass_re": "spmd-partitioning",
      }
    )
    (path,) = pathlib.Path(folder).glob("*.after_spmd-partitioning.*.txt")
    return collectives.sent(hlo.Module(path.read_text()))


def traffic(fn, *specs, replica=1, out=None, dtype=jnp.float32):
  """{(kind, group size, stride): (count, bytes)}."""
  mesh = sharding.make_mesh(replica, -1)
  named = lambda spec: NamedSharding(mesh, spec)
  args = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=named(spec))
    for shape, spec in specs
  ]
  out = out if out is None else named(out)
  found, unknown_loops = partitioned(
    jax.jit(fn, out_shardings=out).lower(*args)
  )
  assert not unknown_loops
  return {(c.kind, c.group_size, c.stride): (c.runs, c.nbytes) for c in found}


def loss(x, w):
  return jnp.sum((x @ w) ** 2)


def test_a_sharded_weight_is_gathered():
  assert traffic(
    lambda x, w: x @ w, ((ROWS, D), BATCH), ((D, F), COLUMNS), out=BATCH
  ) == {("all-gather", 8, 1): (1, D * F * 4)}


def test_a_weight_is_gathered_within_the_groups_of_fsdp():
  assert traffic(
    lambda x, w: x @ w,
    ((ROWS, D), BATCH),
    ((D, F), COLUMNS),
    out=BATCH,
    replica=2,
  ) == {("all-gather", 4, 1): (1, D * F * 4)}


def test_the_gradient_of_an_unsharded_weight_is_all_reduced():
  assert traffic(
    jax.grad(loss, argnums=1), ((ROWS, D), BATCH), ((D, F), WHOLE), out=WHOLE
  ) == {("all-reduce", 8, 1): (1, D * F * 4)}


def test_collectives_of_a_loop_count_once_per_iteration():
  def layers(x, w_NDD):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_NDD)[0]

  split = PartitionSpec(None, None, "fsdp")
  for depth in (3, 5):
    assert traffic(
      layers, ((ROWS, D), BATCH), ((depth, D, D), split), out=BATCH
    ) == {("all-gather", 8, 1): (depth, depth * D * D * 4)}


def test_the_slice_of_an_all_reduce_is_a_reduce_scatter():
  sums = traffic(
    jax.grad(loss, argnums=1), ((ROWS, D), BATCH), ((D, F), WHOLE), out=COLUMNS
  )
  assert sums == {("reduce-scatter", 8, 1): (1, D * F * 4)}


@pytest.mark.slow
def test_a_vit_sends_weights_but_no_activations():
  # Without constraints of the model on activations, XLA would shard them like
  # the weights and sum up partial products.
  model = vit.Model(
    width=64,
    depth=2,
    mlp_dim=256,
    num_heads=4,
    patch_size=4,
    num_classes=8,
    pool_type="tok",
    scan=True,
    remat_policy="nothing_saveable",
  )
  mesh = sharding.make_mesh()
  x = jax.ShapeDtypeStruct((512, 16, 16, 3), "float32")
  rng = jax.ShapeDtypeStruct((2,), "uint32")
  with jax.set_mesh(mesh):
    params = jax.eval_shape(model.init, rng, x)
    params = sharding.state_spec(params, mesh)
    out = jax.tree.map(lambda p: p.sharding, params)
    fn = jax.grad(lambda p, x: jnp.mean(model.apply(p, x, train=True)[0] ** 2))
    x = sharding.batch_spec({"x": x}, mesh)["x"]
    found, _ = partitioned(jax.jit(fn, out_shardings=out).lower(params, x))
  nbytes = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(params))
  sent = sum(c.nbytes for c in found)
  # Two gathers and one sum; a single activation would add twice the weights.
  assert 2 * nbytes < sent < 3.5 * nbytes


GPU = """\
HloModule jit_f, num_partitions=16

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%scatter (p: f32[64,32]) -> f32[8,32] {
  %p = f32[64,32]{1,0} parameter(0)
  ROOT %rs = f32[8,32]{1,0} reduce-scatter(%p), channel_id=4, \
replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, dimensions={0}, \
to_apply=%add
}

%inner (s: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %s = (s32[], bf16[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[16,8]{1,0} get-tuple-element(%s), index=1
  %start = (bf16[16,8]{1,0}, bf16[64,8]{1,0}) all-gather-start(%x), \
channel_id=1, replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
  %done = bf16[64,8]{1,0} all-gather-done(%start)
  ROOT %out = (s32[], bf16[16,8]{1,0}) tuple(%i, %x)
}

%outer (s.1: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %s.1 = (s32[], bf16[16,8]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[16,8]{1,0}) while(%s.1), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}
}

%c (s.2: (s32[], bf16[16,8])) -> pred[] {
  %s.2 = (s32[], bf16[16,8]{1,0}) parameter(0)
  ROOT %t = pred[] constant(true)
}

ENTRY %main (g: f32[64,32], t: (s32[], bf16[16,8])) -> bf16[4] {
  %g = f32[64,32]{1,0} parameter(0)
  %t.1 = (s32[], bf16[16,8]{1,0}) parameter(1)
  %rs-start = ((f32[64,32]{1,0}), f32[8,32]{1,0}) async-start(%g), \
calls=%scatter
  %w.1 = (s32[], /*index=1*/bf16[16,8]{1,0}) while(%t.1), condition=%c, \
body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %v = bf16[4]{0} constant({1, 2, 3, 4})
  %moved = bf16[4]{0} collective-permute(%v), channel_id=7, \
source_target_pairs={{0,8},{8,0}}
  %all = bf16[4]{0} all-to-all(%v), channel_id=8, replica_groups={}
  ROOT %r = bf16[4]{0} all-reduce(%moved), channel_id=9, \
replica_groups=[8,2]<=[16], to_apply=%add
}
"""


@pytest.mark.parametrize(
  ("implementation", "causal"),
  [
    ("auto", True),
    pytest.param("blockwise", False, marks=pytest.mark.slow),
    ("ring", True),
    pytest.param("ring", False, marks=pytest.mark.slow),
  ],
)
def test_attention_of_split_examples(implementation, causal):
  """Sends what docs/scaling.md says."""
  n, T, H, G, K, nbytes = 4, 2 * 64, 8, 2, 16, 2
  mesh = sharding.make_mesh(replica=1, fsdp=2, sequence=n)
  split = NamedSharding(
    mesh, PartitionSpec(sharding.BATCH_AXES, "sequence", None, None)
  )
  arrays = [
    jax.ShapeDtypeStruct((4, T // 2, heads, K), jnp.bfloat16, sharding=split)
    for heads in (H, G, G, H)
  ]
  mask = masks.Mask(causal=causal)
  attend = functools.partial(
    attention.attend, mask=mask, backend=implementation
  )

  def forward_and_backward(q, k, v, grad):
    out, backward = jax.vjp(attend, q, k, v)
    return out, *backward(grad)

  with jax.set_mesh(mesh):
    jitted = jax.jit(
      forward_and_backward, out_shardings=(split, split, split, split)
    )
    found, _ = partitioned(jitted.lower(*arrays))
  sent = dict.fromkeys(collectives.KINDS, 0.0)
  for collective in found:
    sent[collective.kind] += collective.sent_bytes
  keys, queries = 2 * T * G * K, T * H * K
  expected = dict.fromkeys(collectives.KINDS, 0.0)
  if implementation == "ring":
    expected["collective-permute"] += (
      keys / n * (2 * nbytes * (n - 1) + 4 * n + 2 * nbytes * causal)
    )
  else:
    share = keys * nbytes * (n - 1) / n
    expected |= {"all-gather": share, "reduce-scatter": share}
  expected["collective-permute"] += 4 * queries * nbytes / n * causal
  assert sent == pytest.approx(expected, rel=0.05)


def test_text_of_other_backends():
  found, unknown_loops = collectives.sent(hlo.Module(GPU))
  merged = {(c.kind, c.group_size, c.stride, c.runs, c.nbytes) for c in found}

  assert merged == {
    ("reduce-scatter", 8, 1, 1, 64 * 32 * 4),
    ("all-gather", 4, 4, 3 * 7, 3 * 7 * 64 * 8 * 2),
    ("collective-permute", 2, 8, 1, 8),
    ("all-to-all", 16, 1, 1, 8),
    ("all-reduce", 2, 1, 1, 8),
  }
  assert not unknown_loops
  text = GPU.replace('"known_trip_count":{"n":"7"},', "")
  found, unknown_loops = collectives.sent(hlo.Module(text))
  assert unknown_loops == 1
  gathers = [c for c in found if c.kind == "all-gather"]
  assert gathers[0].runs == 3


@pytest.mark.parametrize(
  "kind, sent",
  [
    ("all-gather", 75),
    ("reduce-scatter", 75),
    ("all-reduce", 150),
    ("all-to-all", 75),
    ("collective-permute", 100),
  ],
)
def test_bytes_sent_in_a_ring(kind, sent):
  one = collectives.Collective(kind, 4, 1, runs=1, nbytes=100)
  assert one.sent_bytes == sent
  assert one._replace(group_size=1).sent_bytes == 0


def test_a_ragged_exchange_sends_what_the_smaller_buffer_holds():
  text = """HloModule m, num_partitions=8

ENTRY %main (x: bf16[64,16], y: bf16[96,16], i: s32[8]) -> bf16[96,16] {
  %x = bf16[64,16]{1,0} parameter(0)
  %y = bf16[96,16]{1,0} parameter(1)
  %i = s32[8]{0} parameter(2)
  ROOT %r = bf16[96,16]{1,0} ragged-all-to-all(%x, %y, %i, %i, %i, %i), \
channel_id=1, replica_groups=[1,8]<=[8]
}
"""
  (one,), _ = collectives.sent(hlo.Module(text))
  assert (one.kind, one.nbytes) == ("all-to-all", 64 * 16 * 2)


def test_elements_of_tuples_as_operands():
  """jax 0.12 writes tuple#1 where 0.10 has an operation of its own."""
  text = """HloModule m, num_partitions=2

ENTRY %main (p: (s32[], /*index=1*/bf16[8,4]{1,0})) -> bf16[8,4] {
  %p = (s32[], /*index=1*/bf16[8,4]{1,0}) parameter(0)
  ROOT %c = bf16[8,4]{1,0} collective-permute(%p#1), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501
  (collective,), _ = collectives.sent(hlo.Module(text))
  assert collective.nbytes == 8 * 4 * 2
