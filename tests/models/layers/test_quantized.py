"""Training and serving with products in int8 and fp8, by Qwix."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from models.layers import test_lora
from support import float16

import bigtrain
from bigtrain import main
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import quantized
from bigtrain.objective import building
from bigtrain.reports import flops
from bigtrain.tools import evaluate

pytest.importorskip("qwix", reason="pip install 'bigtrain[quantize]'")

INT8 = [(".*", "int8")]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 16)))


def decoder(rules=None, **options):
  """(a small Llama, its loss)."""
  options = dict(
    **dict(variant="llama_mu", depth=2, vocab_size=64, max_len=16), **options
  )
  config = dict(model_name="decoder", model=options)
  if rules:
    config["quantize"] = rules
  _, model = building.model(settings.Config(config))

  def loss(variables):
    logits = model.apply(variables, TOKENS)[0].astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(
      jnp.take_along_axis(logprobs, TOKENS[:, 1:, None], axis=-1)
    )

  return model, loss


@pytest.fixture(scope="module")
def variables():
  model, _ = decoder(dtype="bfloat16")
  return jax.jit(model.init)(jax.random.key(0), TOKENS)


@pytest.fixture(scope="module")
def exact(variables):
  """Loss and gradients in bfloat16."""
  _, loss = decoder(dtype="bfloat16")
  return jax.jit(jax.value_and_grad(loss))(variables)


@pytest.mark.parametrize(
  ("precision", "operands", "error"),
  [("int8", r"s8\[[\d,]+\]", 0.03), ("fp8", r"f8e4m3fn\[[\d,]+\]", 0.1)],
)
def test_the_compiled_products_have_the_precision(
  variables, exact, precision, operands, error
):
  _, loss = decoder([(".*", precision)], dtype="bfloat16")
  traced = jax.jit(jax.value_and_grad(loss)).trace(variables)
  for platform in ("tpu", "cuda"):
    traced.lower(lowering_platforms=(platform,))
  lowered = traced.lower()
  # Seven kernels, forward and in the gradient of their input; the two blocks
  # are one function.
  kind = {"int8": "i8", "fp8": "f8E4M3FN"}[precision]
  products = re.findall(
    rf"dot_general.*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x{kind}>\) -> "
    r"tensor<[\dx]+x(\w+)>",
    lowered.as_text(),
  )
  result = {"int8": "i32", "fp8": "bf16"}[precision]
  gradient = {"int8": "i8", "fp8": "f8E5M2"}[precision]
  assert sorted(products) == sorted(7 * [(kind, result), (gradient, result)])
  if precision == "fp8":
    float16.require()
  program = lowered.compile()
  assert re.search(operands, program.as_text())
  if precision == "int8":
    assert re.search(r"s32\[[\d,]+\]\S* dot\(", program.as_text())
  value, grads = program(variables)
  assert float(value) == pytest.approx(float(exact[0]), rel=1e-3)
  for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(exact[1])):
    assert ours.dtype == jnp.float32
    size = jnp.linalg.norm(theirs)
    assert jnp.linalg.norm(ours - theirs) < error * size


@pytest.mark.slow
def test_a_loop_with_remat_computes_the_same(variables):
  _, loss = decoder(INT8)
  policy = "dots_with_no_batch_dims_saveable"
  _, looped = decoder(INT8, scan=True, remat_policy=policy)
  params = dict(variables["params"])
  blocks = [params.pop("blocks_0"), params.pop("blocks_1")]
  params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
  stacked = {**variables, "params": params}
  value, grads = jax.jit(jax.value_and_grad(loss))(variables)
  value_2, grads_2 = jax.jit(jax.value_and_grad(looped))(stacked)
  assert float(value) == pytest.approx(float(value_2), rel=1e-5)
  np.testing.assert_allclose(
    grads["params"]["blocks_1"]["mlp"]["up"]["kernel"],
    grads_2["params"]["blocks"]["mlp"]["up"]["kernel"][1],
    atol=2e-5,
  )


def test_parameters_and_flops_do_not_depend_on_the_rules():
  plain, plain_loss = decoder()
  model, loss = decoder(INT8)
  init = lambda m: jax.eval_shape(m.init, jax.random.key(0), TOKENS)
  assert init(model) == init(plain)
  counts = [flops.forward_flops(f, init(plain)) for f in (loss, plain_loss)]
  assert counts[0] == counts[1] > 0


def test_heads_and_routers_are_left_out_unless_they_are_named():
  options = dict(variant="mu/4", num_classes=3, rep_size=True)
  image = jnp.zeros((1, 8, 8, 3))

  def names(rules):
    config = dict(model_name="vit", model=options, quantize=rules)
    _, model = building.model(settings.Config(config))
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    jax.eval_shape(model.apply, variables, image)
    quantized.check(model)
    layers = model.quantized_layers
    return {n for n, rule in layers._names.items() if rule is not None}

  block = "Transformer/encoderblock"
  attention = f"{block}/MultiHeadDotProductAttention"
  by_default = names(INT8)
  assert f"{block}/MlpBlock/Dense_0" in by_default
  assert not {"head", "pre_logits"} & by_default
  assert names([*INT8, ("head", "int8")]) == by_default | {"head"}
  assert any(name.startswith(attention) for name in by_default)
  mlp = names([(".*MlpBlock.*", "fp8")])
  assert mlp == {f"{block}/MlpBlock/Dense_{i}" for i in range(2)}
  assert names([(".*MlpBlock.*", None), *INT8]) >= mlp


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    ([("firts", "int8")], r"quantize\[0\]: 'firts' is not the first match "),
    ([("firts", "int8")], "Did you mean 'first'"),
    ([*INT8, ("first", "fp8")], r"quantize\[1\]: 'first' is not the first"),
    ([(".*", "int4")], r"quantize\[0\]: unknown precision 'int4'"),
    ([("(", "int8")], r"quantize\[0\]: bad regex"),
    ([".*"], r"quantize\[0\]: expected \(regex"),
    ({"a": "int8"}, "quantize: expected a list of pairs"),
  ],
)
def test_mistakes_are_errors_before_anything_compiles(
  tiny_config, tmp_path, rules, message
):
  with pytest.raises(ConfigError, match=message):
    main.train(tiny_config({"quantize": rules}), str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(base="int8")])
def test_adapters_add_to_the_products_of_their_base(options):
  """Near the model with merged adapters, in float32."""
  config, exact, variables, inputs = test_lora.made("llama", **options)
  config = settings.Config(config | dict(quantize=INT8))
  _, model = building.model(config)
  apply = jax.jit(lambda v: model.apply(v, *inputs)[0])
  products = re.findall(r"dot_general.*xi8>", apply.lower(variables).as_text())
  assert len(products) == 7  # Of a block; the head is left out.
  want = exact.apply(variables, *inputs)[0]
  got, scale = apply(variables), np.abs(want).max()
  np.testing.assert_allclose(got / scale, want / scale, atol=0.06)
  without = jax.tree.map(jnp.zeros_like, variables["params"])
  off = apply({**variables, "params": without})
  assert np.abs(off - want).max() > 0.3 * scale


@pytest.mark.slow
def test_a_run_is_resumed_and_served_with_its_rules(tiny_config, tmp_path):
  changes = {"log_steps": 1, "quantize": [("first", "int8")]}
  config = tiny_config(changes)
  main.train(tiny_config(changes | {"stop_at_steps": 3}), str(tmp_path))
  main.train(config, str(tmp_path))
  main.train(config, str(tmp_path / "whole"))
  arrays = [tiny.arrays(folder, 6) for folder in (tmp_path, tmp_path / "whole")]
  jax.tree.map(np.testing.assert_array_equal, *arrays)
  assert {x.dtype for n, x in arrays[0].items() if "params" in n} == {
    np.dtype("float32")
  }
  row = tiny.rows(tmp_path)[6]
  assert evaluate.evaluate(str(tmp_path))["val/loss"] == row["val/loss"]
  # The same parameters in float32.
  without = evaluate.evaluate(str(tmp_path), changes=["quantize=None"])
  assert without["val/loss"] == pytest.approx(row["val/loss"], rel=0.02)
  assert without["val/loss"] != row["val/loss"]
  assert bigtrain.load(str(tmp_path)).model.quantized_layers


@pytest.mark.slow
def test_devices_and_microbatches_change_rounding_only(tiny_config, tmp_path):
  base = {"log_steps": 1, "evals": {}, "quantize": INT8}
  losses = {}
  for name, changes in {
    "replica": {},
    "parts": {"mesh": dict(replica=2, fsdp=4), "microbatches": 2},
  }.items():
    main.train(tiny_config(base | changes), str(tmp_path / name))
    rows = tiny.rows(tmp_path / name).values()
    losses[name] = [row["loss"] for row in rows]
  # A last bit decides between two neighbours in int8, so the difference grows.
  assert losses["parts"][:2] == pytest.approx(losses["replica"][:2], rel=1e-6)
  assert losses["parts"] == pytest.approx(losses["replica"], rel=5e-3)
