"""Which implementation of attention serves, and which "auto" takes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import absent_mesh

from bigtrain.config import choices
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import attention, attention_backends, masks

Case = attention_backends.Call

_TPU, _H100 = ("tpu", "TPU v5"), ("gpu", "NVIDIA H100 80GB HBM3")


def case(device, length, **changes):
  values = dict(
    platform=device[0], device_kind=device[1], splits=True, queries=length,
    positions=length, heads=8, kv_heads=8, width=64, dtype="bfloat16",
  )  # fmt: skip
  return Case(**{**values, **changes})


def choose(case, wanted="auto"):
  return attention_backends.choose(wanted, case)


@pytest.mark.parametrize(
  ("case", "expected"),
  [
    (case(("cpu", "cpu"), 512, causal=True), "xla"),
    (case(("cpu", "cpu"), 8192, causal=True), "blockwise"),
    (case(_TPU, 196), "xla"),
    (case(_TPU, 8192, causal=True, documents=True, window=100), "splash"),
    (case(_TPU, 1024, softcap=True, causal=True, width=72), "splash"),
    (case(_TPU, 512, bias=True), "xla"),
    (case(_TPU, 8192, bias=True), "blockwise"),
    (case(_TPU, 8192, prefix=True, causal=True), "blockwise"),
    (case(_TPU, 8192, splits=False), "blockwise"),
    (case(_TPU, 8192, causal=True, sequence=8, documents=True), "splash"),
    (case(_TPU, 1024, causal=True, sequence=8), "blockwise"),
    (case(_TPU, 1023, dtype="float16"), "xla"),
    (case(_H100, 197), "cudnn"),
    (case(_H100, 8192, causal=True, window=100, width=72), "cudnn"),
    (case(_H100, 196, dtype="float32"), "xla"),
    (case(_H100, 196, width=60), "xla"),
    (case(_H100, 196, width=160), "xla"),
    (case(_H100, 8192, softcap=True), "blockwise"),
    (case(_H100, 8192, sinks=True), "blockwise"),
    (case(_TPU, 8192, causal=True, window=128, sinks=True), "splash"),
    (case(_H100, 8192, causal=True, documents=True), "cudnn"),
    (case(_H100, 8193, causal=True, documents=True), "blockwise"),
    (case(_H100, 2**17, causal=True, width=128, sequence=8), "blockwise"),
    (case(_H100, 2**20, causal=True, width=128, sequence=16), "ring"),
    (case(_H100, 2**20, causal=True, width=128), "cudnn"),
    (case(_TPU, 2**20, causal=True, width=128, sequence=16), "splash"),
    (case(("gpu", "AMD Instinct MI300X"), 196), "xla"),
  ],
)
def test_auto(case, expected):
  choices.forget_choices()
  assert choose(case) == expected
  ((description, choice),) = choices.choices()["config.model.attention"].items()
  assert choice["choice"] == expected and choice["reason"]
  assert str(case.queries) in description


@pytest.mark.parametrize(
  ("version", "capability", "expected"),
  [
    ("cuda 13000", "9.0", "cudnn"),
    ("cuda 13000", "7.5", "xla"),
    ("rocm 70000", "gfx942", "xla"),
  ],
)
def test_cudnn_needs_a_gpu_of_nvidia_from_ampere_on(
  monkeypatch, version, capability, expected
):
  class Device:
    compute_capability = capability

  class Backend:
    platform_version = version

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "devices", lambda: [Device()])
  monkeypatch.setattr(jax.extend.backend, "get_backend", Backend)
  assert choose(case(_H100, 256)) == expected


@pytest.mark.parametrize(
  ("wanted", "case", "message"),
  [
    ("splash", case(("cpu", "cpu"), 512), "needs a TPU.*'blockwise', 'xla' or"),
    ("splash", case(_TPU, 512, bias=True), "no bias"),
    ("cudnn", case(_H100, 16_384, documents=True), "more than 128 MiB"),
    ("cudnn", case(_H100, 512, width=60), "multiple of 8.*not 60"),
  ],
)
def test_a_named_one_that_cannot_serve_is_an_error(wanted, case, message):
  with pytest.raises(ConfigError, match=message) as error:
    choose(case, wanted)
  assert f"config.model.attention={wanted!r}" in str(error.value)
  assert choose(case, "xla") == "xla"


def test_the_platform_is_that_of_the_mesh():
  q = jax.ShapeDtypeStruct((8, 512, 4, 64), jnp.bfloat16)
  attend = functools.partial(attention.attend, mask=masks.Mask(causal=True))
  choices.forget_choices()
  with absent_mesh.use("TPU v5", "tpu", replica=2, fsdp=4):
    traced = jax.jit(attend).trace(q, q, q)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
  (choice,) = choices.choices()[attention_backends.KEY].values()
  assert choice["choice"] == "splash"
  assert "tpu_custom_call" in text and "512x512x" not in text
