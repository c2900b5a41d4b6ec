"""What a start keeps for the next one, and that any change is a miss."""

import json
import logging
import os
import shutil
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

from bigtrain import settings, sharding
from bigtrain.runtime import closures, early, programs, sources
from bigtrain.runtime import kept as kept_lib

CONFIG = {
  "lr": 0.1,
  "wd": 0.1,
  "seed": 0,
  "total_steps": 100,
  "ckpt_steps": 5,
  "model": {"width": 8, "sizes": (1, 2)},
  "optimizer": {"name": "adam", "b1": 0.9},
  "schedule": {"decay_type": "cosine", "warmup_steps": 5},
  "grad_mults": [(".*", 0.5)],
}
BATCH = jax.ShapeDtypeStruct((4, 2), "float32")
TASK = "import os\nBY = 2.0\nMODE = os.environ.get('USERS_MODE')\n"


class AtOnce:
  """process.Background without a thread."""

  def __init__(self, fn, name):
    self._value = fn()

  def result(self):
    return self._value


class Starts:
  """Starts of one program. The attributes are what a test may change."""

  def __init__(self, folder):
    self.folder = folder
    self.config, self.batch = CONFIG, BATCH
    self.mesh = sharding.make_mesh(devices=jax.devices()[:1])
    self.file = folder / "second" / "users_task.py"
    self.lazy = folder / "second" / "users_lazy_part.py"
    self.installed = folder / "site-packages" / "users_library.py"

  def find(self):
    """The beginning of a start."""
    sys.modules.pop("users_lazy_part", None)  # It is imported by a trace.
    return kept_lib.find(self.config, self.mesh, self.batch, "text")

  def hit(self):
    """Whether a start finds its facts."""
    return self.find().hit

  def entries(self):
    """Files of the cache."""
    return sorted((self.folder / "cache" / "kept").glob("*.kept"))


def double(x):
  return {"twice": x * 2.0, "sum": (x.sum(),)}


def hide_other_tests(monkeypatch):
  """Hides the modules of other tests, whose files may be gone."""
  for name, module in sys.modules.copy().items():
    file = getattr(module, "__file__", None)
    if file is None:
      try:
        sources._check_without_file(name, module)
      except sources.NotKept:
        monkeypatch.delitem(sys.modules, name)
    elif not name.startswith("bigtrain") and not sources._is_library(
      name, file
    ):
      monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def starts(tmp_path, monkeypatch):
  """A program that has kept its facts and an executable."""
  hide_other_tests(monkeypatch)
  result = Starts(tmp_path)
  for name in ("first", "second", "site-packages", "cache"):
    (tmp_path / name).mkdir()
  result.file.write_text(TASK)
  result.lazy.write_text("A = 1\n")
  result.installed.write_text("VERSION = 1\n")
  for name in ("site-packages", "second", "first"):
    monkeypatch.syspath_prepend(tmp_path / name)
  monkeypatch.setattr(kept_lib, "_is_command", lambda: True)
  monkeypatch.setattr(sources, "_BEGAN", np.inf)  # These files are new.
  monkeypatch.setattr(kept_lib.process, "Background", AtOnce)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
  import users_library
  import users_task

  del users_library, users_task
  kept = result.find()
  assert kept.enabled and not kept.hit

  def trace():
    import users_lazy_part

    return {"loss": BATCH, "sum": (users_lazy_part.A,)}

  assert kept("shapes", trace)["loss"] == BATCH
  kept.write_facts()
  program = jax.jit(double).lower(BATCH).compile()
  kept.write_program("update", kept_lib.program_key((BATCH,), {}), program)
  yield result
  jax.config.update("jax_compilation_cache_dir", before)
  jax.config.update("jax_numpy_rank_promotion", "allow")
  for name in ("users_library", "users_task", "users_lazy_part"):
    sys.modules.pop(name, None)


def test_the_next_start_traces_nothing(starts):
  kept = starts.find()
  assert kept.hit
  fact = kept("shapes", lambda: pytest.fail("traced"))
  assert fact == {"loss": BATCH, "sum": (1,)}
  key = kept_lib.program_key((BATCH,), {})
  program = kept.read_program("update", key, (BATCH,))
  x = jnp.arange(8.0).reshape(4, 2)
  np.testing.assert_array_equal(program(x)["twice"], 2 * x)
  assert float(program(x)["sum"][0]) == 28.0
  # Another program of the same run.
  wide = (jax.ShapeDtypeStruct((4, 3), "float32"),)
  for other in (
    kept_lib.program_key(wide, {}),
    kept_lib.program_key((BATCH,), {"donate_argnums": 0}),
  ):
    assert kept.read_program("update", other, wide) is None


def test_the_last_executable_is_loaded_before_it_is_known_to_be_right(
  starts, monkeypatch
):
  monkeypatch.setattr(early.host_memory, "keep_freed", lambda: None)
  library, loads = kept_lib.serialize_executable, []
  load = library.deserialize_and_load

  def counted(*args, **kwargs):
    loads.append(args)
    return load(*args, **kwargs)

  monkeypatch.setattr(library, "deserialize_and_load", counted)
  key = kept_lib.program_key((BATCH,), {})
  x = jnp.arange(8.0).reshape(4, 2)
  program = jax.jit(double).lower(BATCH).compile()
  starts.find().write_program("init", key, program)

  def begin():
    loads.clear()
    early.begin(str(starts.folder / "cache"), settings.digest(CONFIG))
    assert len(loads) == 1

  def num_loads():
    kept = starts.find()
    program = kept.read_program("update", key, (BATCH,))
    np.testing.assert_array_equal(program(x)["twice"], 2 * x)
    return len(loads)

  begin()
  # Another program of the start comes first.
  assert starts.find().read_program("init", key, (BATCH,)) is not None
  loads.clear()
  assert num_loads() == 0  # The one that has begun.
  assert num_loads() == 1  # It is used once.
  begin()
  (begun,) = early._loading
  begun._value = begun._value._replace(serialized=b"other")
  assert num_loads() == 2
  begin()
  (begun,) = early._loading
  begun._value = begun._value._replace(device_ids=[1])
  assert num_loads() == 2
  begin()
  starts.file.write_text(TASK.replace("2.0", "3.0"))
  assert not starts.hit() and not early._loading  # Its memory is free again.
  loads.clear()
  early.begin(str(starts.folder / "cache"), settings.digest(CONFIG))
  assert not loads  # The note was stale.
  early.begin(str(starts.folder / "cache"), settings.digest({}))
  assert not loads  # No start of this config is known.


def _config(starts, patch):
  starts.config = {**CONFIG, "nonfinite": "skip"}


def _optimizer(starts, patch):
  starts.config = {**CONFIG, "optimizer": {"name": "adam", "b1": 0.8}}


def _no_weight_decay(starts, patch):
  starts.config = {**CONFIG, "wd": 0.0}


def _no_multiplier(starts, patch):
  starts.config = {**CONFIG, "grad_mults": [(".*", 1.0)]}


def _other_parameters(starts, patch):
  starts.config = {**CONFIG, "grad_mults": [(".*kernel", 0.5)]}


def _no_warm_up(starts, patch):
  schedule = {"decay_type": "cosine", "warmup_steps": 0}
  starts.config = {**CONFIG, "schedule": schedule}


def _schedule(starts, patch):
  schedule = {"decay_type": "linear", "warmup_steps": 5}
  starts.config = {**CONFIG, "schedule": schedule}


def _mistake(starts, patch):
  starts.config = {**CONFIG, "grad_mults": 3}


def _nested_config(starts, patch):
  starts.config = {**CONFIG, "model": {"width": 8, "sizes": [1, 2]}}


def _new_key(starts, patch):
  starts.config = {**CONFIG, "ema_decay": None}


def _batch(starts, patch):
  starts.batch = jax.ShapeDtypeStruct((8, 2), "float32")


def _batch_type(starts, patch):
  starts.batch = jax.ShapeDtypeStruct((4, 2), "bfloat16")


def _devices(starts, patch):
  starts.mesh = sharding.make_mesh(devices=jax.devices()[:2])


def _other_device(starts, patch):
  starts.mesh = sharding.make_mesh(devices=jax.devices()[1:2])


def _xla_flags(starts, patch):
  patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_dump_to=")


def _variable_of_the_module(starts, patch):
  patch.setenv("USERS_MODE", "fast")


def _jax_flag(starts, patch):
  jax.config.update("jax_numpy_rank_promotion", "warn")


def _version(starts, patch):
  installed = [*sources.installed(), "jax-99.dist-info"]
  patch.setattr(sources, "installed", lambda: installed)


def _byte_of_a_module(starts, patch):
  starts.file.write_text(TASK.replace("2.0", "3.0"))


def _byte_of_a_module_of_a_trace(starts, patch):
  starts.lazy.write_text("A = 2\n")


def _module_elsewhere(starts, patch):
  copy = starts.folder / "first" / starts.lazy.name
  copy.write_text(starts.lazy.read_text())
  sys.path_importer_cache.clear()


def _another_module(starts, patch):
  patch.setitem(sys.modules, "users_other", sys.modules["users_task"])


def _installed_file(starts, patch):
  os.utime(starts.installed, ns=(1, 1))


def _format(starts, patch):
  patch.setattr(kept_lib.kept_files, "FORMAT", b"bigtrain kept program 0\n")


def _another_process_misses(starts, patch):
  patch.setattr(kept_lib.process, "share", lambda *args: [True, False])


CHANGES = (
  *(_config, _optimizer, _no_weight_decay, _no_multiplier, _other_parameters),
  *(_no_warm_up, _schedule, _mistake),
  *(_nested_config, _new_key, _batch, _batch_type, _devices),
  *(_other_device, _xla_flags, _variable_of_the_module, _jax_flag, _version),
  *(_byte_of_a_module, _byte_of_a_module_of_a_trace, _module_elsewhere),
  *(_another_module, _installed_file, _format, _another_process_misses),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_one_change_is_a_miss(starts, change):
  assert starts.hit()
  with pytest.MonkeyPatch.context() as patch:
    change(starts, patch)
    kept = starts.find()
    assert not kept.hit
    assert kept("shapes", lambda: "traced again") == "traced again"
    key = kept_lib.program_key((BATCH,), {})
    assert kept.read_program("update", key, (BATCH,)) is None


def evaluate(starts, by=2.0, shape=(4, 2), path="evals.val", **options):
  """A start's evaluation of ones; returns (the results, number of traces)."""
  traces = []

  def predict_fn(x):
    return x + 1.0

  vars(predict_fn)[closures.FROM_CONFIG] = path, id(predict_fn)

  def outputs(x):  # What an evaluator makes.
    return {"outputs": predict_fn(x) * by}

  def traced(x):
    traces.append(x)
    return outputs(x)

  made, spec = programs.Programs(), jax.ShapeDtypeStruct(shape, "float32")
  made.kept = starts.find()
  with jax.set_mesh(starts.mesh):
    program = made.compile("val", traced, spec, closure=outputs, **options)
  return program(jnp.ones(shape))["outputs"], len(traces)


def test_the_next_start_traces_no_evaluation(starts):
  for num_traces in (1, 0, 0):
    results, traces = evaluate(starts)
    assert traces == num_traces
    np.testing.assert_array_equal(results, np.full((4, 2), 4.0))


OTHER_EVALUATIONS = {
  "closure": dict(by=3.0),
  "type": dict(by=np.float32(2.0)),
  "spec": dict(shape=(2, 2)),
  "predict function": dict(path="evals.test"),
  "options": dict(keep_unused=True),
}


@pytest.mark.parametrize(
  "change", OTHER_EVALUATIONS.values(), ids=list(OTHER_EVALUATIONS)
)
def test_another_evaluation_is_a_miss(starts, change):
  assert evaluate(starts)[1] == 1
  results, traces = evaluate(starts, **change)
  assert traces == 1
  np.testing.assert_array_equal(
    results, np.full(results.shape, 2.0 * change.get("by", 2.0))
  )
  assert evaluate(starts)[1] == 0  # The first one is still there.


def _number_of_the_config(starts, patch):
  starts.config = {**CONFIG, "lr": 0.2}  # An argument of the update.


@pytest.mark.parametrize(
  "change",
  (*CHANGES, _number_of_the_config),
  ids=lambda f: f.__name__.strip("_"),
)
def test_one_change_is_a_miss_of_an_evaluation(starts, change):
  assert [evaluate(starts)[1] for _ in range(2)] == [1, 0]
  with pytest.MonkeyPatch.context() as patch:
    change(starts, patch)
    assert evaluate(starts)[1] == 1


def test_a_damaged_evaluation_is_a_miss(starts, caplog):
  before = starts.entries()
  assert evaluate(starts)[1] == 1
  (path,) = set(starts.entries()) - set(before)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)
  with caplog.at_level(logging.WARNING):
    assert evaluate(starts)[1] == 1
  assert [r.message for r in caplog.records if "is damaged" in r.message]
  assert evaluate(starts)[1] == 0


def test_an_evaluation_with_unknown_values_is_not_kept(starts):
  before = starts.entries()
  assert [evaluate(starts, by=jnp.float32(2))[1] for _ in range(2)] == [1, 1]
  assert starts.entries() == before


def test_processes_do_not_agree_on_evaluations(starts, monkeypatch):
  kept = starts.find()
  assert kept.evaluation_key(double, (BATCH,), {})
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert kept.evaluation_key(double, (BATCH,), {}) == ""


def test_what_no_trace_depends_on_is_no_miss(starts, monkeypatch):
  schedule = {"decay_type": "cosine", "warmup_steps": 8}
  numbers = dict(lr=0.3, wd=0.2, seed=7, total_steps=99, schedule=schedule)
  numbers["grad_mults"] = [(".*", 0.1)]
  starts.config = {**CONFIG, **numbers, "ckpt_steps": 7, "stop_at_steps": 1}
  # Not a literal, which would count as a use of the variable.
  monkeypatch.setenv("_".join(("NOBODY", "READS", "THIS")), "1")
  assert starts.hit()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_entries_are_misses_with_one_warning(starts, damage, caplog):
  for path in starts.entries():
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    parts = {"truncated": content[:-1], "flipped": content, "empty": b""}
    path.write_bytes(parts[damage])
  with caplog.at_level(logging.WARNING):
    kept = starts.find()
    assert not kept.hit and not starts.hit()
    key = kept_lib.program_key((BATCH,), {})
    assert kept._read(kept._entry("update", key)) == (None, b"")
  assert [r.message for r in caplog.records if "is damaged" in r.message]
  assert len(caplog.records) == 2  # One for each file.
  assert not starts.entries()


def test_dropout_is_an_argument_of_the_update_and_of_nothing_else(starts):
  def entries(dropout):
    model = dict(patch_size=4, dropout=dropout)
    starts.config = {**CONFIG, "model_name": "vit", "model": model}
    kept = starts.find()
    return [kept._path(kept._entry(n, "")) for n in ("update", "init")]

  first, second, none = entries(0.1), entries(0.2), entries(0.0)
  assert first[0] == second[0]
  assert len({*first, second[1], *none}) == 5


def test_mains_second_name_is_no_miss_even_without_a_main(starts, monkeypatch):
  monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("main"))
  monkeypatch.delitem(sys.modules, "__main__", raising=False)
  assert starts.hit()


def test_traces_that_open_files_are_not_kept(starts):
  starts.config = {**CONFIG, "nonfinite": "skip"}
  kept = starts.find()
  weights = starts.folder / "weights.txt"
  weights.write_text("3")
  assert kept("shapes", lambda: weights.read_text()) == "3"
  kept.write_facts()
  assert not starts.hit()


def test_traces_that_write_bytecode_are_kept(starts, monkeypatch):
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  starts.config = {**CONFIG, "nonfinite": "skip"}
  kept = starts.find()
  cached = starts.lazy.parent / "__pycache__"
  shutil.rmtree(cached, ignore_errors=True)

  def trace():
    import users_lazy_part

    return users_lazy_part.A

  assert kept("shapes", trace) == 1
  kept.write_facts()
  assert list(cached.iterdir())
  assert starts.hit()


def test_parts_that_open_files_are_neither_kept_nor_used(starts):
  weights = starts.folder / "weights.txt"
  weights.write_text("3")
  found = programs.Programs()
  with found.making_parts():
    weights.read_text()
    starts.file.read_text()
  weights.read_text()
  args = starts.config, starts.mesh, starts.batch, "text"
  assert starts.hit()
  kept = found.keep(*args)
  assert not kept.hit and not kept.enabled
  assert found._opened == [str(weights)]
  found = programs.Programs()
  with found.making_parts():
    starts.file.read_text()
  assert found.keep(*args).enabled


def test_modules_that_changed_after_the_start_are_not_kept(starts, monkeypatch):
  changed = os.stat(starts.file).st_ctime
  monkeypatch.setattr(sources, "_BEGAN", changed)
  kept = starts.find()
  assert not kept.hit and not kept.enabled


def test_values_without_an_exact_text_are_not_kept(starts):
  starts.config = {**CONFIG, "table": np.zeros(3)}
  assert not starts.find().enabled


def test_only_a_private_folder_is_used(starts, caplog):
  folder = starts.folder / "cache" / "kept"
  assert folder.stat().st_mode & 0o777 == 0o700
  folder.chmod(0o770)
  assert not starts.find().enabled
  assert "other users may write to it" in caplog.text


def test_only_commands_keep_anything(starts, monkeypatch):
  monkeypatch.undo()
  assert not kept_lib._is_command()


def test_the_entries_unused_for_longest_are_removed(starts, monkeypatch):
  first, second = starts.entries()
  os.utime(first, (1, 1))
  limit = second.stat().st_size + 500  # With the note of the last start.
  kept_lib.kept_files._evict(str(first.parent), limit)
  assert starts.entries() == [second]


def test_programs_with_callbacks_are_not_kept(starts):
  def fn(x):
    return jax.pure_callback(lambda x: np.asarray(x), BATCH, x)

  kept, before = starts.find(), starts.entries()
  kept.write_program("callback", "", jax.jit(fn).lower(BATCH).compile())
  assert starts.entries() == before


@pytest.mark.slow
def test_programs_of_the_compilation_cache_are_kept(tmp_path):
  config = tmp_path / "my_config.py"
  text = (processes.ROOT / "configs" / "digits.py").read_text()
  flags = [
    f"--config.compile_cache={tmp_path / 'cache'}",
    *("--config.evals={}", "--config.stop_at_steps=2", "--config.log_steps=1"),
  ]
  rows, caches = [], []
  # The second start traces, because the file has changed, but not the program.
  for number, comment in enumerate(["", "\n# Changed.\n", None]):
    if comment is not None:
      config.write_text(text + comment)
      time.sleep(2)  # Kernels keep the start of a process less exactly.
    workdir = tmp_path / str(number)
    ended = processes.run(processes.main_command(config, workdir, *flags))
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = json.loads((workdir / "run.json").read_text())
    caches.append(run["starts"][-1]["programs"]["update"]["cache"])
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows.append([json.loads(line)["loss"] for line in lines])
  assert caches == ["miss", "hit", "kept"]
  assert "Loaded init" in ended.stderr
  assert rows[0] == rows[1] == rows[2]


@pytest.mark.slow
def test_a_restart_of_the_command_loads_its_programs(tmp_path):
  flags = [
    f"--config.compile_cache={tmp_path / 'cache'}",
    *("--config.evals={}", "--config.stop_at_steps=2", "--config.log_steps=1"),
  ]
  other = ["--config.lr=1e-4", "--config.total_steps=40"]
  starts = {
    "cold": flags,
    "warm": flags,
    "other numbers": [*flags, *other],
    "other numbers, no cache": [*flags, *other, "--config.compile_cache=False"],
  }
  outputs, rows = [], []
  for name, words in starts.items():
    workdir = tmp_path / name
    command = processes.main_command("configs/digits.py", workdir, *words)
    finished = processes.run(command)
    assert finished.returncode == 0, finished.stderr[-3000:]
    outputs.append(finished.stderr)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows.append([json.loads(line) for line in lines])
  assert "Compiled update" in outputs[0] and "Loaded" not in outputs[0]
  for output in outputs[1:3]:
    assert "Compiled update" not in output
    assert "Loaded update" in output and "Loaded init" in output
  assert "Loaded" not in outputs[3]
  for first, second in ((rows[0], rows[1]), (rows[2], rows[3])):
    for one, two in zip(first, second, strict=True):
      for name in ("loss", "grad_norm", "param_norm", "update_norm", "lr"):
        assert one.get(name) == two.get(name)
  norms = [[row.get("update_norm") for row in part] for part in rows]
  assert norms[0] != norms[2]
  run = json.loads((tmp_path / "warm" / "run.json").read_text())
  assert run["starts"][-1]["programs"]["update"]["cache"] == "kept"
  assert run["starts"][-1]["auto"]


@pytest.mark.slow
def test_a_restart_of_the_command_loads_its_evaluations(tmp_path):
  flags = [f"--config.compile_cache={tmp_path / 'cache'}"]
  outputs, rows = [], []
  for number in range(2):
    workdir = tmp_path / str(number)
    command = processes.main_command("configs/digits.py:runlocal", workdir)
    finished = processes.run([*command, *flags])
    assert finished.returncode == 0, finished.stderr[-3000:]
    outputs.append(finished.stderr)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows.append([json.loads(line) for line in lines])
  assert "Compiled val" in outputs[0] and "Compiled" not in outputs[1]
  assert "Loaded val" in outputs[1]
  for first, second in zip(*rows, strict=True):
    names = [n for n in first if n.startswith("val/") and n != "val/secs"]
    assert [first[n] for n in names] == [second[n] for n in names]
  run = json.loads((tmp_path / "1" / "run.json").read_text())
  assert run["starts"][-1]["programs"]["val"]["cache"] == "kept"
