"""The configs that read token files do so without tensorflow."""

import os
import pathlib
import subprocess
import sys

READS_TOKENS = """
import pathlib, sys
from bigtrain import input_pipeline, main, settings, sharding
from bigtrain.tools import tokenize
folder = pathlib.Path(sys.argv[1])
(folder / "a.txt").write_text("What is read, token by token. " * 2000)
for name in ("train", "val", "c4_train", "c4_validation"):
  code = tokenize.main(
    ["--tokenizer=bytes", f"--output={folder / name}", "--processes=1"]
    + [str(folder / "a.txt")]
  )
  assert not code
mesh = sharding.make_mesh()
seen = 0
for path in sorted(pathlib.Path("configs").glob("*.py")):
  if "tokens" not in path.read_text() or path.stem == "common":
    continue
  key = "data_dir" if "data_dir" in path.read_text() else "data"
  config = settings.load(f"{path}:{key}={folder}")
  if config["input"]["data"]["type"] != "tokens":
    continue
  seen += 1
  config["input"]["batch_size"] = 8
  settings.find_module("tasks", config["task"], "task")
  settings.find_module("models", config["model_name"], "model_name")
  tracked = settings.Config(config)
  train = input_pipeline.make_train(tracked.input, seed=0, mesh=mesh)
  batches = train.start(0, 1)
  next(batches)
  batches.close()
  options = config["evals"]["val"]
  settings.find_module("evaluators", options["type"], "type")
  evaluation = input_pipeline.make_eval(
    data=options["data"],
    pp=options.get("pp", ""),
    batch_size=8,
    num_examples=8,
    mesh=mesh,
  )
  next(iter(evaluation.batches()))
print(seen, "tensorflow" in sys.modules, file=sys.stderr)
"""


def test_configs_that_read_token_files_do_not_import_tensorflow(tmp_path):
  root = pathlib.Path(__file__).parent.parent.parent
  done = subprocess.run(
    [sys.executable, "-c", READS_TOKENS, str(tmp_path)],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  number, imported = done.stderr.split()[-2:]
  assert int(number) >= 7 and imported == "False"
