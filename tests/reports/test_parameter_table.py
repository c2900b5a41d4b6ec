"""The table of parameters: means and standard deviations, without a gather."""

import re

import jax
import ml_dtypes
import numpy as np

from bigtrain import sharding
from bigtrain.reports import parameter_table


def test_moments_of_sharded_parameters(tmp_path):
  mesh = sharding.make_mesh(fsdp=-1)
  rng = np.random.default_rng(0)
  values = {
    "dense": {"kernel": rng.normal(3.0, 0.5, (16, 24)).astype("float32")},
    "half": rng.normal(-2.0, 1.0, (8, 8)).astype(ml_dtypes.bfloat16),
    "scale": np.float32(5.0),
  }
  over = jax.sharding.NamedSharding(mesh, jax.P("fsdp"))
  placed = {
    "dense": {"kernel": jax.device_put(values["dense"]["kernel"], over)},
    "half": jax.device_put(values["half"], sharding.replicated(mesh)),
    "scale": jax.device_put(values["scale"], sharding.replicated(mesh)),
  }
  trainable = {"dense": {"kernel": True}, "half": False, "scale": True}
  moments = parameter_table.moments(placed, mesh)
  donate = jax.jit(lambda x: x * 2, donate_argnums=0)
  donate(placed["dense"]["kernel"])  # As the first step does.
  text = parameter_table.write(
    str(tmp_path), values, trainable, moments, "from scratch"
  )
  assert (tmp_path / "parameters.txt").read_text() == text + "\n"
  assert "449 parameters, 385 of them trained, 1,668 bytes" in text
  rows = {}
  for line in text.splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) == 9 and cells[0] != "Name":
      rows[cells[0]] = cells[4:]
  assert rows.keys() == {"dense/kernel", "half", "scale"}
  for name, value in (
    ("dense/kernel", values["dense"]["kernel"]),
    ("half", values["half"].astype("float32")),
    ("scale", values["scale"]),
  ):
    trained, names, axes, mean, std = rows[name]
    assert names == axes == ""
    assert trained == str(name != "half")
    np.testing.assert_allclose(float(mean), value.mean(), rtol=5e-3)
    np.testing.assert_allclose(float(std), value.std(), rtol=5e-3, atol=1e-6)


def test_no_array_is_gathered():
  mesh = sharding.make_mesh(fsdp=-1)
  over = jax.sharding.NamedSharding(mesh, jax.P("fsdp"))
  kernel = jax.ShapeDtypeStruct((64, 8), "float32", sharding=over)
  program = (
    parameter_table._compiled_mean_and_std(mesh)
    .lower(kernel)
    .compile()
    .as_text()
  )
  assert "all-gather" not in program
  shapes = re.findall(r"f32\[([\d,]+)\]", program)
  if mesh.size > 1:
    assert "64,8" not in shapes  # Only shards and sums of them.


def test_shapes_alone_have_no_moments(tmp_path):
  specs = {"kernel": jax.ShapeDtypeStruct((2, 3), "bfloat16")}
  assert parameter_table.moments(specs, sharding.make_mesh()) == {}
  text = parameter_table.write(str(tmp_path), specs, {"kernel": True}, {}, "")
  assert "Mean" not in text and "6 parameters" in text and "12 bytes" in text


def test_dimensions_have_names_and_axes_of_the_mesh(tmp_path):
  mesh = sharding.make_mesh(fsdp=-1)
  over = jax.sharding.NamedSharding(mesh, jax.P(None, ("replica", "fsdp")))
  kernel = jax.ShapeDtypeStruct((2, 8, 3), "f4", sharding=over)
  specs = {"up": {"kernel": kernel}}
  flags = {"up": {"kernel": True}}
  text = parameter_table.write(
    str(tmp_path), specs, flags, {}, "", {".*/kernel": "D -> H K"}
  )
  (line,) = [line for line in text.splitlines() if "up/kernel" in line]
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  assert cells[-2:] == ["D -> H K", "- replica+fsdp -"]
