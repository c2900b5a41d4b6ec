"""Options of XLA: ours, the config's, and mistakes."""

import re

import jax
import jax.numpy as jnp
import pytest

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.runtime import compiler_options, programs


def read(**options):
  config = settings.Config({"compiler_options": options})
  return compiler_options.read(config, sharding.make_mesh())


def test_the_config_overrides_and_removes_our_options(monkeypatch):
  ours = {"xla_cpu_enable_fast_math": False, "xla_cpu_enable_fast_min_max": 0}
  monkeypatch.setitem(compiler_options.OURS, "cpu", ours)
  assert read() == ours
  assert read(
    xla_cpu_enable_fast_math=True,
    xla_cpu_enable_fast_min_max=None,
    xla_backend_optimization_level=1,
  ) == {"xla_cpu_enable_fast_math": True, "xla_backend_optimization_level": 1}


def test_this_version_of_jax_knows_the_options_for_gpus():
  options = compiler_options.OURS["gpu"]
  assert len(options) == 3
  jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)


@pytest.mark.parametrize(
  "name, value", [("xla_no_such", 1), ("xla_cpu_enable_fast_math", "often")]
)
def test_the_compiler_checks_options_before_training(name, value):
  message = re.escape(f"config.compiler_options.{name}={value!r}: ")
  options = {"xla_backend_optimization_level": 1, name: value}
  with pytest.raises(ConfigError, match=message):
    read(**options)
  with jax.set_mesh(sharding.make_mesh()):  # As in a run.
    with pytest.raises(ConfigError, match=message):
      read(**options)


@pytest.mark.parametrize("mode", ["compiled", "checked"])
def test_programs_are_compiled_with_the_options(mode, tmp_path):
  options = {"xla_dump_to": str(tmp_path)}
  made = programs.Programs(mode, options)
  x = jax.ShapeDtypeStruct((7,), "float32")
  cache = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    made.compile("a", lambda x: x * 2.5, x)(jnp.ones(7))
  finally:
    jax.config.update("jax_enable_compilation_cache", cache is not None)
  assert any(tmp_path.iterdir())
  if mode == "compiled":
    assert made.facts("a")["compiler_options"] == options
