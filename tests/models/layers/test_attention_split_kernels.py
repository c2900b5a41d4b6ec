"""Kernels with examples that are split over devices, against one device.

Splash is interpreted on CPUs.
"""

import functools
import importlib.util
import subprocess
import sys

import jax
import pytest
from models.layers import attention_cases
from support import processes

from bigtrain import sharding
from bigtrain.models.layers import attention_kernels

Case = attention_cases.Case

# Blocks of 128 are the smallest. Odd lengths have padding on the last devices.
CASES = {
  "all": Case(L=400, causal=True, documents=True, window=150, softcap=2.0),
  "causal": Case(L=512, causal=True, heads=4, rows=1),
  "odd": Case(L=390, causal=True, rows=1),
  "window": Case(L=512, causal=True, window=150, rows=1),
  "documents": Case(L=500, causal=True, documents=True, rows=1),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setattr(attention_kernels, "_BLOCK", 128)
  monkeypatch.setattr(attention_kernels, "_INTERPRET", True)
  monkeypatch.setattr(sharding, "device", lambda: ("tpu", "TPU v5"))


@functools.cache
def expected(name):
  case = CASES[name]
  return case.results(case.arrays(), "xla")


@pytest.mark.parametrize(
  ("name", "sequence"),
  [
    ("all", 2),  # Compiling the interpreted kernels takes seconds.
    *(
      pytest.param(name, size, marks=pytest.mark.slow)
      for name, size in [
        ("causal", 2), ("odd", 2), ("window", 2), ("documents", 4),
      ]
    ),
  ],
)  # fmt: skip
def test_splash_equals_one_device(name, sequence):
  case = CASES[name]
  mesh = sharding.make_mesh(sequence=sequence, devices=jax.devices()[:sequence])
  with jax.set_mesh(mesh):
    actual = case.results(case.arrays(), "splash")
  attention_cases.check_close(actual, expected(name), 1e-5)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_on_one_device():
  case = CASES["causal"]
  mesh = sharding.make_mesh(sequence=2, devices=jax.devices()[:2])
  with jax.set_mesh(mesh):
    actual = case.results(case.arrays("bfloat16"), "splash")
  attention_cases.check_close(actual, expected("causal"), 0.03)


@pytest.mark.slow
def test_heads_are_split_as_well():
  case = CASES["causal"]
  devices = jax.devices()[:4]
  with jax.set_mesh(sharding.make_mesh(sequence=2, tensor=2, devices=devices)):
    actual = case.results(case.arrays(), "splash")
  attention_cases.check_close(actual, expected("causal"), 1e-5)


# Compiled in a process of its own, for four TPUs that are not there.
_COMPILE = """
import re
import jax
import numpy as np
from jax.experimental import topologies
from bigtrain import sharding
from bigtrain.config import loading, settings
from bigtrain.objective import building

config = dict(loading.load("configs/llama_8b.py"))
config["model"] |= dict(depth=1, vocab_size=512)
module, model = building.model(settings.Config(config))
devices = topologies.get_topology_desc(
  platform="tpu", topology_name="v5:2x2x1"
).devices
mesh = sharding.make_mesh(sequence=4, devices=devices)
tokens = jax.ShapeDtypeStruct(
  (1, 8192), np.int32, sharding=sharding.batch(mesh)
)

def loss(params, tokens):
  out = model.apply({"params": params}, tokens)
  return jax.tree.leaves(out)[0].astype(np.float32).sum()

with jax.set_mesh(mesh):
  init = lambda tokens: model.init(jax.random.key(0), tokens)["params"]
  params = jax.eval_shape(init, tokens)
  program = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
text = program.as_text()
assert "splash" in text
for shape in set(re.findall(r"\\w+\\[([\\d,]+)\\]", text)):
  assert sum(int(n) >= 8192 for n in shape.split(",")) < 2, shape
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)
def test_the_tpu_program_of_a_long_text_has_no_matrix_of_scores():
  variables = dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  done = subprocess.run(
    [sys.executable, "-c", _COMPILE],
    env=processes.environment() | variables,
    cwd=processes.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.stdout.endswith("done\n"), done.stderr[-2000:]
