"""Programs are compiled ahead of time, and identical ones only once."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import processes

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.runtime import programs

X = jax.ShapeDtypeStruct((256,), "float32")


def scaled(by):
  return lambda x: x * by


def test_facts_about_a_program():
  made = programs.Programs()
  compiled = made.compile("a", scaled(2.0), X)
  np.testing.assert_array_equal(compiled(jnp.ones(256)), np.full(256, 2.0))
  facts = made.facts("a")
  assert facts["argument_bytes"] == facts["output_bytes"] == 1024
  assert facts["trace_secs"] > 0 and facts["compile_secs"] > 0
  assert made.facts("b") == {}


def test_identical_programs_are_compiled_once():
  made = programs.Programs()
  first = made.compile("first", scaled(2.0), X)
  assert made.compile("same", scaled(2.0), X) is first
  assert made.facts("same")["cache"] == "shared"
  # A different constant, shape or number of results is another program.
  assert made.compile("b", scaled(3.0), X) is not first
  large = jnp.arange(256.0)
  c, d = (
    made.compile(n, scaled(large * n_), X) for n, n_ in (("c", 1), ("d", 2))
  )
  assert c is not d
  np.testing.assert_array_equal(d(jnp.ones(256)), large * 2)
  assert made.compile("e", lambda x: (x * 2.0,), X) is not first
  # As is one of another argument, such as of a teacher like its student.
  g, h = (
    made.compile(n, lambda *x, i=i: x[i], X, X) for i, n in enumerate("gh")
  )
  assert h(jnp.zeros(256), jnp.ones(256))[0] == 1 and g is not h
  lowered = made.lower("f", scaled(2.0), X)  # share=False, as for the update.
  assert lowered() is not first


@pytest.fixture
def cache(tmp_path):
  """An empty persistent cache."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  yield
  jax.config.update("jax_compilation_cache_dir", before)


def test_facts_have_hits_and_misses_of_the_cache(cache):
  from jax.experimental.compilation_cache import compilation_cache

  compilation_cache.reset_cache()
  try:
    outcomes = []
    for _ in range(2):
      made = programs.Programs()
      made.compile("a", scaled(1.2345), X)
      outcomes.append(made.facts("a")["cache"])
    assert outcomes == ["miss", "hit"]
  finally:
    compilation_cache.reset_cache()


def test_eager_programs_run_python_at_every_call():
  calls = []

  def fn(x):
    def body(total, y):
      calls.append(y)
      return total + y, None

    return jax.lax.scan(body, 0.0, x)[0]

  made = programs.Programs("eager")
  fn = made.compile("a", fn, jax.ShapeDtypeStruct((3,), "float32"))
  fn(jnp.ones(3))
  assert calls == [1.0, 1.0, 1.0]
  assert made.facts("a") == {}


def test_mode_from_the_config():
  read = lambda **keys: (
    programs.from_config(settings.Config(keys), sharding.make_mesh()).mode
  )
  assert read() == "compiled"
  assert read(eager=True) == "eager"
  assert read(debug_nans=True) == "checked"
  with pytest.raises(ConfigError, match="set one of them"):
    read(eager=True, debug_nans=True)


def test_builds_run_one_by_one_and_failures_are_raised():
  order, gate = [], threading.Event()

  def build(name, fails=False):
    def run():
      gate.wait()
      order.append((name, jax.sharding.get_abstract_mesh().axis_names))
      if fails:
        raise OSError("no disk")
      return name

    return run

  mesh = sharding.make_mesh()
  builder = programs.Builder(
    {"a": build("a"), "b": build("b", fails=True), "c": build("c")}, mesh
  )
  builder.check()  # Nothing runs before `start`.
  assert not order
  builder.start("abc")
  gate.set()
  assert builder.get("a") == "a" and builder.get("c") == "c"
  assert order == [(name, sharding.AXES) for name in "abc"]
  with pytest.raises(OSError, match="no disk"):
    builder.check()
  with pytest.raises(OSError, match="no disk"):
    builder.get("b")


def test_nothing_is_built_after_close():
  builder = programs.Builder({"a": lambda: 1 / 0}, sharding.make_mesh())
  builder.close()
  assert builder.get("a") is None


def cached_program(folder, devices=1):
  """Output and log of a process that compiles a program with a cache."""
  program = (
    "import sys, jax, jax.numpy as jnp\n"
    "from absl import logging\n"
    "from bigtrain.runtime import jax_flags\n"
    "from bigtrain.runtime import programs\n"
    "jax_flags.use_compile_cache(sys.argv[1])\n"
    "made = programs.Programs()\n"
    "x = jax.ShapeDtypeStruct((8,), 'float32')\n"
    "fn = made.compile('fn', lambda x: jnp.sin(x) + 1, x)\n"
    "print(made.facts('fn')['cache'], fn(jnp.zeros(8))[0])\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program, str(folder)],
    env=processes.environment(devices),
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout.strip(), done.stderr


def test_several_cpu_devices_have_no_compilation_cache(tmp_path):
  # XLA restores their programs without the order of their collectives.
  assert cached_program(tmp_path, devices=2)[0] == "off 1.0"
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "damage",
  [
    lambda x: x[: len(x) // 2],
    pytest.param(lambda x: b"x", marks=pytest.mark.slow),
  ],
)
def test_a_damaged_compilation_cache_is_a_miss(tmp_path, damage):
  assert cached_program(tmp_path)[0] == "miss 1.0"
  assert cached_program(tmp_path)[0] == "hit 1.0"
  entries = [
    f for f in tmp_path.rglob("*") if f.is_file() and "-cache" in f.name
  ]
  assert entries
  for entry in entries:
    entry.write_bytes(damage(entry.read_bytes()))
  result, messages = cached_program(tmp_path)
  assert result == "miss 1.0"
  assert "cache" in messages
