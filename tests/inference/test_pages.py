"""The lines of README.md and docs/predict.md run as printed."""

import ast
import importlib
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from bigtrain import main
from configs import digits, pydoc_lm

ROOT = pathlib.Path(__file__).parents[2]


def snippets(page, of="python"):
  """The code blocks of a page, in order."""
  blocks = re.findall(
    r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M
  )
  return [code for language, code in blocks if language == of]


@pytest.fixture
def photo(picture_run, tmp_path, monkeypatch):
  """A working folder with runs/mine, photos/ and a photo.jpg."""
  import tensorflow as tf

  (tmp_path / "runs").mkdir()
  (tmp_path / "runs" / "mine").symlink_to(picture_run / "runs" / "mine")
  (tmp_path / "photos").symlink_to(picture_run / "val")
  image = tf.io.decode_png((picture_run / "val/owl/0.png").read_bytes())
  jpeg = tf.io.encode_jpeg(image, quality=100).numpy()
  (tmp_path / "photo.jpg").write_bytes(jpeg)
  monkeypatch.chdir(tmp_path)


def test_the_three_lines_predict_a_picture_as_printed(photo, capsys):
  (code,) = [s for s in snippets("README.md") if "bigtrain.load" in s]
  assert code == snippets("docs/predict.md")[0]
  exec(code, {})
  result = ast.literal_eval(capsys.readouterr().out)
  assert result["label"] == "owl" and len(result["top"]) == 3


@pytest.mark.slow
def test_the_page_on_prediction_runs_as_printed(photo, capsys):
  main.train(digits.get_config("runlocal"), "runs/digits")
  main.train(pydoc_lm.get_config("runlocal"), "runs/lm")
  rows = [dict(question="What is a set?", answer=" A collection.")] * 2
  lines = "".join(f"{json.dumps(row)}\n" for row in rows)
  pathlib.Path("questions.jsonl").write_text(lines)
  commands = [
    shlex.split(line, comments=True)[2:]
    for block in snippets("docs/predict.md", "")
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith("python -m")
  ]
  names = {"images": np.zeros((2, 6, 6, 3), np.float32)}
  assert [c[0] for c in commands] == [
    "bigtrain.tools.checkpoint",
    *["bigtrain.tools.predict"] * 3,
    "bigtrain.tools.checkpoint",
  ]
  for module, *words in commands:
    assert importlib.import_module(module).main(words) == 0
  for code in snippets("docs/predict.md"):
    exec(code, names)
  assert names["logits"].shape == (2, 3)
  assert len(names["model"].predict("photo.jpg")["top"]) == 5
