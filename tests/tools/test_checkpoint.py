"""The tool that shows, verifies and exports checkpoints."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support.saved_states import like, make_values, path_of, save

from bigtrain.arrays import trees
from bigtrain.tools import checkpoint as tool

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("run"))
  save(workdir, 100, 200)
  return workdir


@pytest.fixture
def workdir(saved, tmp_path):
  """A copy of the workdir, to damage."""
  return shutil.copytree(saved, tmp_path / "copy")


def test_show_prints_the_tree(saved, capsys):
  assert tool.main(["show", saved]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert "00000200: step 200, 8 arrays, 3.08 kB" in lines[0]
  assert lines[2] == "steps in this workdir: 100, 200"
  rows = [" ".join(line.split()) for line in lines[4:]]
  assert rows == [
    "opt/ 212 bytes 113 values",
    "mask 16 bytes bool[16] sharded over ['fsdp']",
    "mu/ 192 bytes 96 values",
    "dense 192 bytes float16[3,32] sharded over [None, 'fsdp']",
    "none 0 bytes float32[0,5]",
    "seen 4 bytes uint32[]",
    "params/ 2.86 kB 728 values",
    "dense/ 1.58 kB 408 values",
    "bias 48 bytes bfloat16[24]",
    "kernel 1.54 kB float32[16,24] sharded over ['fsdp']",
    "wide 1.28 kB float32[8,40] sharded over [['replica', 'fsdp'], None]",
    "step 4 bytes int32[]",
  ]
  assert tool.main(["show", path_of(saved, 100), "--depth=1"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert "step 100," in lines[0]
  assert [line.split()[0] for line in lines[3:]] == ["opt/", "params/", "step"]


def test_show_is_fast_and_needs_no_jax(saved):
  script = (
    "import sys; from bigtrain.tools import checkpoint as t; "
    "t.main(sys.argv[1:]); "
    "print({'jax', 'tensorstore', 'tensorflow'} & set(sys.modules))"
  )
  start = time.monotonic()
  out = subprocess.check_output(
    [sys.executable, "-c", script, "show", saved], cwd=ROOT, text=True
  )
  assert out.splitlines()[-1] == "set()"
  # It takes 0.15 s on an idle machine.
  assert time.monotonic() - start < 30


def test_verify_lists_all_damaged_files(workdir, capsys):
  assert tool.main(["verify", str(workdir)]) == 0
  assert capsys.readouterr().out.count("intact") == 2
  damaged = [
    path_of(workdir, 100, "params/dense/kernel/c.0.0"),
    path_of(workdir, 100, "opt/seen/zarr.json"),
    path_of(workdir, 200, "opt/mask/c.0"),
  ]
  for path in damaged:
    content = bytearray(pathlib.Path(path).read_bytes())
    content[5] ^= 1
    pathlib.Path(path).write_bytes(content)
  removed = path_of(workdir, 200, "params/wide/c.0.0")
  os.remove(removed)
  assert tool.main(["verify", str(workdir)]) == 1
  out = capsys.readouterr().out
  for path in [*damaged, removed]:
    assert f"{path}: " in out
  assert out.count("DAMAGED array") == 4 and out.count("2 problem(s)") == 2
  assert tool.main(["verify", str(workdir), "--step=200"]) == 1
  assert capsys.readouterr().out.count("DAMAGED") == 2
  os.remove(path_of(workdir, 100, "manifest.json"))
  assert tool.main(["verify", path_of(workdir, 100)]) == 1
  assert "DAMAGED" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_export_has_the_exact_values(saved, tmp_path, kind, capsys):
  out = str(tmp_path / f"all.{kind}")
  assert tool.main(["export", saved, out, "--step", "100"]) == 0
  assert "8 arrays" in capsys.readouterr().out
  if kind == "npz":
    with np.load(out, allow_pickle=False) as opened:
      exported = dict(opened)
  else:
    exported = safetensors.numpy.load_file(out)
  expected = dict(trees.flatten_with_names(make_values(like(), 100)))
  assert sorted(exported) == sorted(expected)
  for name, x in exported.items():
    y = np.asarray(expected[name])
    if kind == "npz" and y.dtype == ml_dtypes.bfloat16:
      y = y.astype(np.float32)
    assert x.dtype == y.dtype and x.shape == y.shape, name
    assert x.tobytes() == y.tobytes(), name
  files = [f"all.{kind}", f"all.{kind}.json"]
  assert sorted(os.listdir(tmp_path)) == files


def test_export_of_one_tree(saved, tmp_path):
  out = str(tmp_path / "params.npz")
  assert tool.main(["export", saved, out, "--prefix=params/dense"]) == 0
  with np.load(out) as opened:
    assert sorted(opened) == ["params/dense/bias", "params/dense/kernel"]


def test_a_damaged_checkpoint_is_not_exported(workdir, tmp_path, capsys):
  path = path_of(workdir, 200, "params/wide/c.0.0")
  content = bytearray(pathlib.Path(path).read_bytes())
  content[5] ^= 1
  pathlib.Path(path).write_bytes(content)
  out = str(tmp_path / "x.npz")
  assert tool.main(["export", str(workdir), out]) == 1
  assert "params/wide" in capsys.readouterr().err
  assert not os.path.exists(out) and not os.path.exists(out + ".tmp")
  assert tool.main(["export", str(workdir), out, "--prefix=opt"]) == 0


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["show", "{w}/no"], "no: no such file or directory"),
    (["verify", "{w}/no"], "no: no such file or directory"),
    (
      ["show", "{w}", "--step=3"],
      "show: {w}: no checkpoint of step 3; there are 100",
    ),
    (
      ["export", "{w}", "{w}/x.pt"],
      "x.pt: expected a name ending in",
    ),
    (["export", "{w}", "{w}/a/x.npz"], "no such folder"),
    (["export", "{w}", "{w}/x.npz", "--prefix=parms"], "mean 'params'"),
  ],
)
def test_wrong_arguments_give_a_one_line_error(
  workdir, capsys, arguments, message
):
  code = tool.main([a.format(w=workdir) for a in arguments])
  err = capsys.readouterr().err
  assert code == 2 and message.format(w=workdir) in err
  assert err.startswith("error: ") and err.count("\n") == 1


def test_an_export_is_not_overwritten_by_accident(workdir, tmp_path, capsys):
  out = tmp_path / "x.npz"
  out.write_text("mine")
  assert tool.main(["export", str(workdir), str(out)]) == 2
  assert "--overwrite" in capsys.readouterr().err and out.read_text() == "mine"
  assert tool.main(["export", str(workdir), str(out), "--overwrite"]) == 0
  assert out.read_bytes()[:2] == b"PK"


@pytest.mark.parametrize(
  "arguments, message",
  [
    ([], "the following arguments are required: command"),
    (["shew"], "command: unknown 'shew'. Did you mean 'show'?"),
    (["show"], "the following arguments are required: path"),
    (["show", "x", "--dpth=1"], "unknown argument. Did you mean '--depth'?"),
    (["export", "x", "y", "--format=hff"], "--format: unknown 'hff'. Did you"),
    (["show", __file__], "a file; expected a workdir or a checkpoint"),
  ],
)
def test_wrong_arguments_end_in_one_line(arguments, message, capsys):
  assert tool.main(arguments) == 2
  err = capsys.readouterr().err
  assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_closed_pipe_is_not_an_error(saved):
  finished = subprocess.run(
    f"{sys.executable} -m bigtrain.tools.checkpoint show {saved} | head -1",
    shell=True,
    cwd=ROOT,
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONUNBUFFERED": "1"},
  )
  assert finished.stderr == "" and "step 200" in finished.stdout
  assert jax.device_count() == 8  # The devices belong to this process.
