"""Published models against the libraries themselves: `make test-published`.

The libraries have an environment of their own, build/published. It makes the
golden files anew, and opens the folders that we export.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from models.published import test_encoder_families, test_vit_families
from models.published.folders import (
  GOLDEN,
  MODELS,
  like_of,
  model_of,
  module_of,
  name_of,
  opened,
  variables_of,
)
from models.published.folders import export as export_folder
from support import rounding

from bigtrain.arrays import dims
from bigtrain.checkpoints import checkpointer, warm_start
from bigtrain.checkpoints.added_rows import AddedRows
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config import settings
from bigtrain.models import vit
from bigtrain.objective import building, new_rows, published_sizes
from bigtrain.tools import checkpoint as tool

pytestmark = pytest.mark.published
PYTHON = os.environ.get("PUBLISHED_PYTHON", "build/published/bin/python")
# Scripts with a function `write(golden)` that makes files below `golden`.
SCRIPTS = sorted(
  path.name
  for path in GOLDEN.glob("make_*.py")
  if "\ndef write(golden" in path.read_text()
)
# Bounds: the largest spreads of the families' outputs, and of their gradients,
# those of Swin 2's first kernel. See support/rounding.py.
OUTPUTS, GRADIENTS = rounding.ROUNDINGS * 1e-5, rounding.ROUNDINGS * 4e-4
LINEAR = dict(type="linear", factor=2.0)
# {case: (layout, changes of the model)}.
CASES = {
  **{layout: (layout, {}) for layout in MODELS},
  "llama, tied": ("llama", dict(tied_head=True)),
  "llama, linear": ("llama", dict(rope_scaling=LINEAR, rope_theta=2e4)),
  "llama, plain": ("llama", dict(rope_scaling=None, norm_eps=1e-3)),
  "mixtral, window": ("mixtral", dict(window=7, head_dim=6)),
  "llama, classes": ("llama", dict(num_classes=3)),
  "mixtral, tied": ("mixtral", dict(tied_head=True)),
  "t5, untied": ("t5", dict(tied_head=False)),
  "t5_1_1, tied": ("t5_1_1", dict(tied_head=True)),
  "switch, untied": ("switch", dict(tied_head=False)),
  "switch, all layers": (
    "switch",
    dict(moe=dict(num_experts=3, top_k=1, every=1)),
  ),
}


def export(layout, model, folder):
  """Exports random parameters; returns (parameters, the folder)."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (rng.normal(size=x.shape) * 0.3 + (x.ndim < 2)).astype(x.dtype),
    like_of(model),
  )
  fields = type(model).__dataclass_fields__
  options = {
    name: getattr(model, name)
    for name in fields
    if name not in ("parent", "name", "variant", "moe", "rope_scaling", "kinds")
  }
  if model.moe is not None:
    # A config says only what differs from the defaults.
    defaults = model.moe._field_defaults
    options["moe"] = {
      name: value
      for name, value in model.moe._asdict().items()
      if name not in defaults or value != defaults[name]
    }
  if getattr(model, "rope_scaling", None):
    options["rope_scaling"] = dict(model.rope_scaling)
  config = {"model_name": name_of(layout), "model": options}
  workdir, out = str(folder / "run"), str(folder / "out")
  saver = checkpointer.Checkpointer(workdir)
  state = {"params": params, "step": np.int32(1)}
  saver.save(1, state, HostState(config=config))
  saver.close()
  assert tool.main(["export", workdir, out, f"--layout={layout}"]) == 0
  return params, out


def inputs_of(layout, vocab_size):
  """Returns the model's arguments and those of transformers."""
  rng = np.random.default_rng(1)
  tokens = functools.partial(rng.integers, 1, vocab_size)
  if module_of(layout).__name__.endswith("decoder"):
    text = tokens(size=(2, 24))
    return (text,), dict(input_ids=text)
  inputs, targets = tokens(size=(2, 25)), tokens(size=(2, 22))
  inputs[1, 17:] = 0
  before = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
  theirs = dict(
    input_ids=inputs,
    attention_mask=(inputs != 0).astype(np.int64),
    decoder_input_ids=before,
  )
  return (inputs, targets), theirs


def run(*arguments, python=PYTHON, **options):
  """Runs the Python of the libraries' environment in tests/golden."""
  assert pathlib.Path(PYTHON).exists(), "`make test-published` installs it"
  # Absolute, but not resolved: the environment is where the link lies.
  command = [os.path.abspath(python), *map(str, arguments)]
  env = {**os.environ, "PYTHONPATH": os.environ.get("BIG_VISION", "")}
  return subprocess.run(command, cwd=GOLDEN, env=env, check=True, **options)


def python_of(script):
  """The first environment that has the packages in the script's NEEDS."""
  needs = re.search(r"^NEEDS = \((.*)\)$", (GOLDEN / script).read_text(), re.M)
  names = re.findall(r"\w+", needs[1]) if needs else []
  code = f"import importlib.util as u; print([*map(u.find_spec, {names})])"
  for python in (PYTHON, sys.executable):
    if (
      "None" not in run("-c", code, python=python, stdout=-1, text=True).stdout
    ):
      return python
  pytest.skip(f"needs {', '.join(names)}; BIG_VISION=folder of a checkout")


def floats(arrays):
  return [x for x in arrays if x.dtype.kind not in "iubU"]


def check_file(old, new):
  """Compares two files of numbers: integers and texts exactly."""
  if old.suffix in (".npz", ".safetensors"):
    read = np.load if old.suffix == ".npz" else safetensors_files.read
    before, after = dict(read(str(old))), dict(read(str(new)))
    assert before.keys() == after.keys(), old
    for name, value in before.items():
      if value.dtype.kind in "iubU":
        np.testing.assert_array_equal(after[name], value, f"{old}: {name}")
      else:
        # Some gradients are zero but for rounding: keys' biases.
        of_file = max(np.abs(x).max(initial=0) for x in floats(before.values()))
        gradients = old.stem == "gradients"
        atol = (GRADIENTS if gradients else OUTPUTS) * max(
          np.abs(value).max(initial=0), gradients * 1e-2 * of_file
        )
        np.testing.assert_allclose(
          after[name], value, rtol=0, atol=atol, err_msg=f"{old}: {name}"
        )
  elif old.suffix == ".json":
    assert json.loads(new.read_text()) == json.loads(old.read_text()), old
  else:
    assert new.read_bytes() == old.read_bytes(), old


@pytest.mark.parametrize("script", SCRIPTS)
def test_golden_files_can_be_made_anew(script, tmp_path):
  module, out = script.removesuffix(".py"), str(tmp_path)
  code = f"import pathlib, {module} as m; m.write(pathlib.Path({out!r}))"
  run("-c", code, python=python_of(script))
  files = [path for path in tmp_path.rglob("*") if path.is_file()]
  assert files
  for new in files:
    check_file(GOLDEN / new.relative_to(tmp_path), new)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
  """{case: (layout, model, parameters, folder)}; the library opened them."""
  result = {}
  for case, (layout, changes) in CASES.items():
    model = model_of(layout, **changes)
    folder = tmp_path_factory.mktemp(layout)
    params, out = export(layout, model, folder)
    np.savez(f"{out}/inputs.npz", **inputs_of(layout, model.vocab_size)[1])
    result[case] = layout, model, params, out
  run("open_exports.py", *[out for *_, out in result.values()])
  return result


@pytest.mark.parametrize("case", CASES)
def test_exports_open_with_equal_logits(case, exports):
  layout, model, params, out = exports[case]
  ours, _ = inputs_of(layout, model.vocab_size)
  logits = jax.jit(lambda params: [model.apply({"params": params}, *ours)[0]])
  rounding.assert_close(logits, params, [np.load(f"{out}/logits.npy")])

  # The export is a published folder for us, too.
  config = settings.Config(
    dict(model_name=name_of(layout), model=dict(published=out))
  )
  module, again = building.model(published_sizes.with_published_sizes(config))
  warm_start.check_published(out, module, again)
  loaded, _ = warm_start.load_params(
    out, like_of(again), convert=module.from_published
  )
  jax.tree.map(np.testing.assert_array_equal, params, loaded)


FAMILIES = sorted(path.name for path in (GOLDEN / "published").iterdir())


@pytest.fixture(scope="module")
def families(tmp_path_factory):
  """{family: the folder}, exports of the golden folders that were opened."""
  folders = {}
  for family in FAMILIES:
    golden = GOLDEN / "published" / family
    module, model = opened(golden, scan=True)
    folders[family] = out = tmp_path_factory.mktemp(family)
    variables = variables_of(module, model, golden)
    export_folder(module, model, variables, out, origin=golden)
    tokens = np.load(golden / "reference.npz")["tokens"]
    np.savez(out / "inputs.npz", input_ids=tokens.astype(np.int64))
  run("open_exports.py", *folders.values())
  return folders


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_of_families_open_with_equal_logits(family, families):
  reference = np.load(GOLDEN / "published" / family / "reference.npz")
  logits, expected = (
    np.load(families[family] / "logits.npy"),
    reference["logits"],
  )
  scale = np.abs(expected).max()
  np.testing.assert_allclose(logits, expected, rtol=0, atol=OUTPUTS * scale)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
  """{family: (logits, the folder)} of exports with rows for five new tokens."""
  result = {}
  for family in FAMILIES:
    golden = GOLDEN / "published" / family
    _, old = opened(golden)
    size = old.vocab_size
    module, model = opened(golden, scan=True, vocab_size=size + 5)
    axes = new_rows.axes_of(dims.of_model(module, model))
    rows = AddedRows(size, size + 5, size, size, axes, init="normal")
    source = dict(path=str(golden), new_rows=rows._asdict())
    variables = variables_of(module, model, source)
    out = tmp_path_factory.mktemp(family)
    export_folder(module, model, variables, out, origin=golden)
    tokens = np.random.default_rng(0).integers(0, size + 5, (2, 20))
    tokens[:, :5] = np.arange(size, size + 5)
    np.savez(out / "inputs.npz", input_ids=tokens)
    logits = jax.jit(lambda v, model=model, x=tokens: model.apply(v, x)[0])
    result[family] = np.asarray(logits(variables)), out
  run("open_exports.py", *[out for _, out in result.values()])
  return result


@pytest.mark.parametrize("family", FAMILIES)
def test_new_rows_of_families_open_with_equal_logits(family, extended):
  logits, out = extended[family]
  scale = np.abs(logits).max()
  theirs = np.load(out / "logits.npy")
  np.testing.assert_allclose(theirs, logits, rtol=0, atol=OUTPUTS * scale)


IMAGES = [
  name
  for name in test_vit_families.FAMILIES
  # MAE shuffles patches.
  if name != "vit_mae"
]
STAGES = [
  name
  for name in test_encoder_families.FAMILIES
  if name.startswith(("bit", "convnext", "swin"))
]


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
  """{family: the folder}, exports of golden models of images, opened."""
  folders = {}
  for family in IMAGES:
    golden = test_vit_families.VISION / family
    model = test_vit_families.opened(golden)
    params = test_vit_families.params_of(model, golden)
    folders[family] = out = tmp_path_factory.mktemp(family)
    layout = test_vit_families.layout_of(family)
    export_folder(vit, model, {"params": params}, out, layout)
    pixels = np.load(golden / "reference.npz")["pixel_values"]
    np.savez(out / "inputs.npz", pixel_values=pixels)
  for family in STAGES:
    module, model = test_encoder_families.opened(family)
    inputs, reference = test_encoder_families.reference(family)
    params = test_encoder_families.params_of(
      module, model, inputs, test_encoder_families.VISION / family
    )
    folders[family] = out = tmp_path_factory.mktemp(family)
    export_folder(module, model, {"params": params}, out)
    np.savez(out / "inputs.npz", pixel_values=reference["pixel_values"])
  run("open_exports.py", *folders.values())
  return folders


@pytest.mark.parametrize("family", IMAGES + STAGES)
def test_exports_of_images_open_with_equal_outputs(family, of_images):
  with np.load(test_vit_families.VISION / family / "reference.npz") as file:
    name = "logits" if "logits" in file else "pooler_output"
    expected = file[name]
  outputs = np.load(of_images[family] / "logits.npy")
  scale = np.abs(expected).max()
  np.testing.assert_allclose(outputs, expected, rtol=0, atol=OUTPUTS * scale)
