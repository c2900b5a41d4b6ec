"""FLOPs of jaxprs against counts by hand, and peaks of devices."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models import cappa, decoder, resnet, t5, two_towers, vit
from bigtrain.models.layers import attention as attention_layer
from bigtrain.models.layers import masks
from bigtrain.reports import flops
from bigtrain.tasks import (
  captioning,
  classification,
  contrastive,
  language_modeling,
  seq2seq,
)

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


@pytest.mark.parametrize("window", [None, 50, 500])
@pytest.mark.parametrize(
  ("kernel", "platform"),
  [("xla", "cpu"), ("blockwise", "cpu"), ("cudnn", "gpu"), ("splash", "tpu")],
)
@pytest.mark.parametrize("length", [128, 1027])
def test_a_window_counts_alike_in_every_kernel(
  traces_cudnn, monkeypatch, kernel, platform, window, length
):
  monkeypatch.setattr(sharding, "device", lambda: (platform, platform))
  q = Shape((2, length, 4, 64), jnp.bfloat16)
  kv = Shape((2, length, 2, 64), jnp.bfloat16)

  def fn(q, k, v):
    return attention_layer.attend(
      *(q, k, v),
      mask=masks.Mask(causal=True, window=window),
      backend=kernel,
    )

  def loss(*qkv):
    return fn(*qkv).astype(jnp.float32).sum()

  seen = min(window or length, length)
  hand = 2 * (2 * 2 * 4 * length * seen * 64)
  assert flops.forward_flops(fn, q, kv, kv) == hand
  if kernel != "splash":  # Its backward pass computes the scores twice more.
    grad = jax.grad(loss, argnums=(0, 1, 2))
    assert flops.forward_flops(grad, q, kv, kv) == 3 * hand


@pytest.mark.parametrize(
  ("mask", "kernel", "platform"),
  [
    (masks.Mask(), "blockwise", "cpu"),
    (masks.Mask(), "splash", "tpu"),
    (masks.Mask(), "cudnn", "gpu"),
    (masks.Mask(real_BS=jnp.ones((2, 300), bool)), "blockwise", "cpu"),
    (masks.Mask(real_BS=jnp.ones((2, 300), bool)), "splash", "tpu"),
  ],
)
def test_cross_attention_counts_alike_in_every_kernel(
  traces_cudnn, monkeypatch, mask, kernel, platform
):
  monkeypatch.setattr(sharding, "device", lambda: (platform, platform))
  q = Shape((2, 197, 4, 64), jnp.bfloat16)
  kv = Shape((2, 300, 4, 64), jnp.bfloat16)

  def fn(q, k, v):
    return attention_layer.attend(q, k, v, mask=mask, backend=kernel)

  hand = 2 * (2 * 2 * 4 * 197 * 300 * 64)
  assert flops.forward_flops(fn, q, kv, kv) == hand


def test_fused_attention_counts_like_the_plain_one(traces_cudnn):
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
    assert grad == 3 * forward - patches


# Model FLOPs of a task's loss against counts by hand, in multiply-adds.
#
# Axes: B batch, L and S lengths, P patches, D width, H heads, K head width, F
# hidden width, V vocabulary, E experts or embedding.


def count_loss(task, model, batch, **options):
  """Model FLOPs of a forward pass of the loss, halved: multiply-adds."""
  arguments = jax.eval_shape(task.inputs, batch)
  key = jax.eval_shape(lambda: jax.random.key(0))
  variables = jax.eval_shape(
    lambda key, arguments: model.init(key, **arguments), key, arguments
  )
  count = flops.forward_flops(
    lambda variables, batch, key: task.loss_fn(
      variables, batch, key, model=model, train=True, **options
    )[0],
    *(variables, batch, key),
  )
  assert count % 2 == 0
  return count // 2


def int32(*shape):
  return Shape(shape, jnp.int32)


def text(*shape):
  return {"tokens": int32(*shape), "targets": int32(*shape)}


def attention(B, L, S, D, HK, cross=False):
  """Projections of queries and outputs, keys and values, and two products."""
  keys = S if cross else L
  return B * (2 * L * D * HK + 2 * keys * D * HK + 2 * L * S * HK)


def encoder_block(B, L, D, F):
  return attention(B, L, L, D, D) + B * L * 2 * D * F


DECODER = dict(
  variant="llama", vocab_size=101, width=32, depth=3, num_heads=4,
  num_kv_heads=2, head_dim=16, mlp_dim=48, tied_head=False,
)  # fmt: skip


def decoder_count(B, L, window=None):
  S = min(window or L, L)
  block = attention(B, L, S, D=32, HK=64)
  block -= B * 2 * L * 32 * 32  # Two heads of keys and values for four.
  return 3 * (block + B * L * 3 * 32 * 48) + B * L * 32 * 101


@pytest.mark.parametrize(
  ("options", "chunk"),
  [
    ({}, 0),
    ({}, None),
    ({}, 4),
    ({}, 7),  # Two chunks for a length of 12, of which 2 positions are padding.
    (dict(scan=True, remat_policy="nothing_saveable"), 5),
    (dict(window=5), 0),
    (dict(window=5, scan=True, attention_softcap=30.0), 7),
    (dict(window=100), 0),
  ],
)
def test_decoder(options, chunk):
  model = decoder.Model(**DECODER, **options)
  count = count_loss(language_modeling, model, text(8, 12), chunk=chunk)
  assert count == decoder_count(8, 12, options.get("window"))


@pytest.mark.parametrize("scan", [False, True])
def test_decoder_with_layers_of_two_kinds(scan):
  kinds = {"local": dict(window=5), "global": dict(num_kv_heads=4, mlp_dim=64)}
  model = decoder.Model(
    **DECODER, scan=scan, kinds=kinds, layers=("local", "global")
  )
  count = count_loss(language_modeling, model, text(8, 12), chunk=0)
  # Two local layers and a global one, which has more heads and hidden units.
  local = decoder_count(8, 12, 5) - decoder_count(8, 12)
  more = 8 * 2 * 12 * 32 * 32 + 8 * 12 * 3 * 32 * 16
  assert count == decoder_count(8, 12) + 2 * local // 3 + more


def test_decoder_on_packed_documents():
  # A mask takes nothing away: which documents are packed is left to chance.
  batch = text(8, 12) | {"segments": int32(8, 12)}
  for options in ({}, dict(window=5)):
    model = decoder.Model(**DECODER, **options)
    count = count_loss(language_modeling, model, batch, chunk=7)
    assert count == decoder_count(8, 12, options.get("window"))


@pytest.mark.parametrize("chunk", [0, 7])
def test_decoder_on_a_mesh(chunk):
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp")
  )
  with jax.set_mesh(mesh):
    count = count_loss(
      language_modeling, decoder.Model(**DECODER), text(8, 12), chunk=chunk
    )
  assert count == decoder_count(8, 12)


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 1.25, 2.0, 8.0, 0.5])
@pytest.mark.parametrize("top_k", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_experts(capacity_factor, top_k):
  B, L, D, E, F = 8, 12, 32, 4, 48
  options = dict(
    num_experts=E, top_k=top_k, every=3, capacity_factor=capacity_factor
  )
  model = decoder.Model(**DECODER, moe=options)
  tokens = L * top_k
  if capacity_factor == 0.5:  # The other half of the choices is dropped.
    tokens = E * math.ceil(0.5 * L * top_k / E)
  # The router, the experts, and the weighted sum of a token's experts.
  experts = B * (L * D * E + tokens * 3 * D * F + L * top_k * D)
  expected = decoder_count(B, L) - B * L * 3 * D * F + experts
  assert count_loss(language_modeling, model, text(B, L)) == expected


@pytest.mark.parametrize(
  "chunk", [pytest.param(None, marks=pytest.mark.slow), 4]
)
@pytest.mark.parametrize("moe", [None, dict(num_experts=4, every=2, top_k=1)])
def test_t5(chunk, moe):
  B, S, L, D, H, K, F, V = 4, 15, 6, 32, 4, 16, 48, 101
  if moe:
    moe["capacity_factor"] = 1.25
  model = t5.Model(
    variant="t5", vocab_size=V, width=D, depth=2, decoder_depth=4,
    num_heads=H, head_dim=K, mlp_dim=F, moe=moe, scan=True,
  )  # fmt: skip
  batch = {"inputs": int32(B, S), "targets": int32(B, L)}
  encoder = 2 * (attention(B, S, S, D, H * K) + B * S * 2 * D * F)
  decoder = attention(B, L, L, D, H * K)
  decoder += attention(B, L, S, D, H * K, cross=True) + B * L * 2 * D * F
  routers = B * (S + 2 * L) * (4 * D + D) if moe else 0
  expected = encoder + 4 * decoder + B * L * D * V + routers
  assert count_loss(seq2seq, model, batch, chunk=chunk) == expected


@pytest.mark.parametrize("chunk", [0, 4])
def test_captioner(chunk):
  B, size, L, D, F, V = 8, 16, 6, 32, 64, 101
  model = cappa.Model(
    vocab_size=V, max_len=L, patch_size=4, width=D, depth=2, mlp_dim=F,
    num_heads=4, decoder_depth=3, mask_token=True,
  )  # fmt: skip
  batch = {"image": f32(B, size, size, 3), "labels": int32(B, L)}
  P = (size // 4) ** 2
  block = attention(B, L, L, D, D) + attention(B, L, P, D, D, cross=True)
  expected = (
    B * P * (4 * 4 * 3) * D
    + 2 * encoder_block(B, P, D, F)
    + 3 * (block + B * L * 2 * D * F)
    + B * L * D * V
  )
  count = count_loss(
    captioning, model, batch, chunk=chunk, masked_pred_prob=0.75
  )
  assert count == expected


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
@pytest.mark.parametrize("chunk", [3, 8, 1024])
def test_two_towers(kind, chunk):
  B, size, L, D, F, E = 8, 16, 6, 32, 64, 24
  tower = dict(width=D, depth=2, mlp_dim=F, num_heads=4)
  model = two_towers.Model(
    image=dict(tower, patch_size=4, pool_type="gap"),
    text=dict(tower, vocab_size=101),
    out_dim=E,
  )
  batch = {"image": f32(B, size, size, 3), "labels": int32(B, L)}
  P = (size // 4) ** 2
  expected = (
    B * P * (4 * 4 * 3) * D
    + 2 * encoder_block(B, P, D, F)
    + 2 * encoder_block(B, L, D, F)
    + 2 * B * D * E
    + B * B * E  # The logits of all pairs, once.
  )
  count = count_loss(contrastive, model, batch, kind=kind, chunk=chunk)
  assert count == expected


def test_resnet_50_has_its_published_flops():
  model = resnet.Model(num_classes=1000)
  batch = {"image": f32(2, 224, 224, 3), "labels": int32(2)}
  count = count_loss(classification, model, batch)

  def block(size, inputs, channels, stride):
    out = size // stride
    first = size**2 * inputs * channels
    rest = out**2 * channels * (9 * channels + 4 * channels)
    project = stride > 1 or inputs != 4 * channels
    return first + rest + project * out**2 * inputs * 4 * channels

  expected, size, inputs = 112**2 * 7 * 7 * 3 * 64 + 2048 * 1000, 56, 64
  for stage, blocks in enumerate([3, 4, 6, 3]):
    channels = 64 * 2**stage
    for i in range(blocks):
      stride = 2 if stage and not i else 1
      expected += block(size, inputs, channels, stride)
      size, inputs = size // stride, 4 * channels
  assert count == 2 * expected
  # Version 1.5 in NVIDIA's and torchvision's tables: 4.1 billion.
  assert expected == pytest.approx(4.09e9, rel=0.005)


def test_executed_flops_include_padding_and_empty_slots():
  B, L, D, V = 8, 12, 32, 101
  model = decoder.Model(**DECODER)
  key = jax.eval_shape(lambda: jax.random.key(0))
  variables = jax.eval_shape(
    lambda key: model.init(key, jnp.zeros((B, L), jnp.int32)), key
  )

  def loss(variables, batch):
    return language_modeling.loss_fn(
      variables, batch, None, model=model, train=False, chunk=7
    )[0]

  counts = [
    count(loss, variables, text(B, L)) // 2
    for count in (flops.forward_flops, flops.executed_flops)
  ]
  assert counts == [decoder_count(B, L), decoder_count(B, L) + 2 * B * D * V]


def test_rare_operations_count_as_none():
  def f(x):
    y = x @ x
    with model_flops.rare():
      return jax.lax.while_loop(lambda y: y[0, 0] < 0, lambda y: y @ x, y)

  x = np.ones((3, 3), np.float32)
  for count in (flops.forward_flops, flops.executed_flops):
    assert count(f, x) == 2 * 3**3


def test_mfu_by_hand():
  # 3 x 1e12 FLOPs in half a second on 4 devices of 3e12 FLOP/s.
  assert flops.mfu(3 * 10**12, 0.5, 4, 3e12) == 0.5


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
