"""FLOPs of jaxprs against counts by hand, and peaks of devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bigtrain.models import vit
from bigtrain.reports import flops

Shape = jax.ShapeDtypeStruct


def f32(*shape):
  return Shape(shape, jnp.float32)


def test_dot_general_with_batch_dimensions():
  def fn(a, b):
    return jnp.einsum("bmk,bkn->bmn", a, b) + 1  # The addition does not count.

  assert flops.forward_flops(fn, f32(3, 5, 7), f32(3, 7, 11)) == (
    2 * 3 * 5 * 7 * 11
  )


@pytest.mark.parametrize(
  ("groups", "batch_groups"), [(1, 1), (2, 1), (4, 1), (1, 2)]
)
def test_conv_counts_like_a_loop(groups, batch_groups):
  batch, c_in, c_out = 2, 4, 8

  def fn(x, w):
    return jax.lax.conv_general_dilated(
      x,
      w,
      window_strides=(2, 1),
      padding=((1, 1), (0, 0)),
      rhs_dilation=(1, 2),
      feature_group_count=groups,
      batch_group_count=batch_groups,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

  x, w = f32(batch, 9, 9, c_in), f32(3, 2, c_in // groups, c_out)
  out = jax.eval_shape(fn, x, w).shape
  assert out == (batch // batch_groups, 5, 7, c_out)
  assert flops.forward_flops(fn, x, w) == (
    2 * np.prod(out) * 3 * 2 * (c_in // groups)
  )


def test_transposed_conv_does_not_count_holes():
  # Stride 2 and kernel 4 double the length: each input is multiplied with each
  # tap once, however the computation is written.
  def fn(x, w):
    return jax.lax.conv_transpose(x, w, (2,), "SAME")

  count = flops.forward_flops(fn, f32(1, 8, 3), f32(4, 3, 5))
  assert count == 2 * 8 * 4 * 3 * 5


def test_gradient_of_a_strided_conv_is_three_times_the_forward():
  def fn(x, w):
    return nn.avg_pool(
      jax.lax.conv_general_dilated(
        x,
        w,
        (2, 2),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
      ),
      (1, 1),
    ).sum()

  x, w = f32(2, 8, 8, 3), f32(2, 2, 3, 4)
  forward = flops.forward_flops(fn, x, w)
  grad = flops.forward_flops(jax.grad(fn, argnums=(0, 1)), x, w)
  assert forward == 2 * 2 * 4 * 4 * 2 * 2 * 3 * 4
  assert grad == 3 * forward


def test_ragged_dot():
  args = f32(8, 4), f32(3, 4, 5), Shape((3,), jnp.int32)
  forward = flops.forward_flops(jax.lax.ragged_dot, *args)
  assert forward == 2 * 8 * 4 * 5

  def loss(a, b, sizes):
    return (jax.lax.ragged_dot(a, b, sizes) ** 2).sum()

  grad = jax.grad(loss, argnums=(0, 1))
  assert flops.forward_flops(grad, *args) == 3 * forward


def test_loops_branches_and_calls():
  square = 2 * 4**3
  x = f32(4, 4)
  product = lambda a: a @ a

  def count(fn):
    return flops.forward_flops(fn, x)

  assert count(jax.jit(product)) == square
  assert count(jax.checkpoint(product)) == square
  assert count(lambda a: jax.lax.fori_loop(0, 5, lambda i, c: c @ c, a)) == (
    5 * square
  )

  def scanned(a):
    return jax.lax.scan(lambda c, _: (jax.jit(product)(c), None), a, length=7)

  assert count(scanned) == 7 * square
  branches = [lambda a: a, product, lambda a: a @ a @ a]
  assert count(lambda a: jax.lax.switch(a[0, 0].astype(int), branches, a)) == (
    2 * square
  )

  vjp = jax.custom_vjp(product)
  vjp.defvjp(lambda a: (vjp(a), a), lambda a, g: (g @ a,))
  assert count(vjp) == square
  jvp = jax.custom_jvp(product)
  jvp.defjvp(lambda p, t: (jvp(*p), t[0] @ p[0]))
  assert count(jvp) == square


def test_while_counts_once_with_a_warning(caplog):
  def fn(a):
    return jax.lax.while_loop(lambda c: c[0, 0] > 1, lambda c: c @ c, a)

  with caplog.at_level("WARNING"):
    assert flops.forward_flops(fn, f32(4, 4)) == 2 * 4**3
  assert "unknown number of times" in caplog.text


def test_shard_map_counts_the_shards_together():
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()).reshape(4, 2), ("data", "model")
  )

  def sharded(spec):
    return jax.shard_map(
      lambda a: a @ jnp.ones((16, 3)), mesh=mesh, in_specs=spec, out_specs=spec
    )

  whole = 2 * 8 * 16 * 3
  assert flops.forward_flops(sharded(P()), f32(8, 16)) == whole
  assert flops.forward_flops(sharded(P("data")), f32(8, 16)) == whole
  both = P(("data", "model"))
  assert flops.forward_flops(sharded(both), f32(8, 16)) == whole


def test_pallas_counts_the_grid():
  pl = pytest.importorskip("jax.experimental.pallas")

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] @ x_ref[...]

  block = pl.BlockSpec((4, 4), lambda i: (i, 0))
  fn = pl.pallas_call(
    kernel,
    grid=(6,),
    in_specs=[block],
    out_specs=block,
    out_shape=f32(24, 4),
  )
  assert flops.forward_flops(fn, f32(24, 4)) == 6 * 2 * 4**3


def test_fused_attention_counts_like_the_plain_one(monkeypatch):
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  # Only these checks need a GPU and its cuDNN for tracing.
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92000)
  monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
  monkeypatch.setattr(
    cudnn, "is_cuda_compute_capability_equal", lambda _: False
  )
  q = Shape((2, 128, 4, 64), jnp.bfloat16)
  kv = Shape((2, 256, 2, 64), jnp.bfloat16)

  def attention(implementation):
    def fn(q, k, v):
      return jax.nn.dot_product_attention(
        q, k, v, implementation=implementation
      )

    return fn

  def grad(implementation):
    fn = attention(implementation)
    return jax.grad(
      lambda *args: fn(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2)
    )

  hand = 2 * 2 * (2 * 4 * 128 * 256 * 64)
  names = str(jax.make_jaxpr(attention("cudnn"))(q, kv, kv))
  assert "dot_general" not in names and "dot_product_attention" in names
  for implementation in ("xla", "cudnn"):
    fn = attention(implementation)
    assert flops.forward_flops(fn, q, kv, kv) == hand
    assert flops.forward_flops(grad(implementation), q, kv, kv) == 3 * hand


def vit_hand_count(model, batch, size):
  """A class token, a multiply-add as 2; see the ViT paper's table 1."""
  patches = (size // model.patch_size[0]) ** 2
  length, width = patches + 1, model.width
  block = length * (4 * width**2 + 2 * width * model.mlp_dim)
  block += 2 * length**2 * width
  total = patches * model.patch_size[0] ** 2 * 3 * width
  total += model.depth * block + width * model.num_classes
  return 2 * batch * total


def count_vit(batch, size, wrap=lambda fn: fn, **sizes):
  model = vit.Model(pool_type="tok", **sizes)
  image = f32(batch, size, size, 3)
  key = jax.eval_shape(lambda: jax.random.key(0))
  variables = jax.eval_shape(model.init, key, image)
  apply = lambda variables, image: model.apply(variables, image)[0]
  return model, flops.forward_flops(wrap(apply), variables, image)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat_policy", ["none", "nothing_saveable"])
def test_vit_b16_has_its_published_flops(scan, remat_policy):
  model, count = count_vit(
    2,
    224,
    variant="B/16",
    num_classes=1000,
    scan=scan,
    remat_policy=remat_policy,
  )
  assert count == vit_hand_count(model, 2, 224)
  assert count / 2 == pytest.approx(35.1e9, rel=0.02)


def test_training_is_three_times_the_forward():
  sizes = dict(
    width=64, depth=3, mlp_dim=256, num_heads=2, num_classes=10, patch_size=16
  )

  def wrap(apply):
    return jax.jit(jax.grad(lambda v, image: apply(v, image).sum()))

  for scan in (False, True):
    _, forward = count_vit(2, 64, scan=scan, **sizes)
    _, grad = count_vit(2, 64, wrap=wrap, scan=scan, **sizes)
    # The image needs no gradient: the patches have one product backward.
    patches = 2 * 2 * 16 * 16**2 * 3 * 64
    assert grad == flops.train_flops(forward) - patches


def test_mfu_by_hand():
  # 3 x 1e12 FLOPs in half a second on 4 devices of 3e12 FLOP/s.
  assert flops.mfu(flops.train_flops(10**12), 0.5, 4, 3e12) == 0.5


@pytest.mark.parametrize(
  ("kind", "tera"),
  [
    ("TPU v2", 22.5),
    ("TPU v3", 61.5),
    ("TPU v4", 275),
    ("TPU v5 lite", 197),
    ("TPU v5p", 459),
    ("TPU v5", 459),
    ("TPU v6 lite", 918),
    ("TPU7x", 1153.5),
    ("Tesla V100-SXM2-16GB", 125),
    ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA A10", 125),
    ("NVIDIA A10G", 70),
    ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362),
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.5),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H200", 989.4),
    ("NVIDIA B200", 2250),
    ("NVIDIA GB200", 2500),
    ("NVIDIA GeForce RTX 4090", 165.2),
  ],
)
def test_peak_by_device_kind(kind, tera):
  assert flops.peak_flops(kind) == pytest.approx(tera * 1e12)


def test_unknown_devices_have_no_peak():
  unknown = [
    "cpu",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "Some New Device",
  ]
  assert [flops.peak_flops(kind) for kind in unknown] == [None] * 4
  assert flops.peak_flops(jax.devices()[0]) is None
