"""Workdirs with the files of a run, written without training."""

import json
import math
import os

import numpy as np

from bigtrain import metrics
from bigtrain.config import settings
from bigtrain.reports import loggers, media, writers


def write_run(workdir, *, lr=1e-3, evals=("val",), accounts=True, name="loss"):
  """Writes the files of a run of 40 rows; returns the workdir.

  Args:
    workdir: folder to create.
    lr: learning rate of the config.
    evals: names of evaluations, which run every 10 rows.
    accounts: whether the rows have time accounts.
    name: name of the loss.
  """
  os.makedirs(workdir)
  config = {
    "lr": lr,
    "task": "classification",
    "evals": {name: {} for name in evals},
    "input": {"pp": "decode|<script>alert(1)</script>"},
  }
  info = {"starts": [{"devices": 8, "device_kind": "TPU v4"}]}
  for file, content in (("config.json", config), ("run.json", info)):
    with open(os.path.join(workdir, file), "w") as f:
      json.dump(content, f)
  writer = writers.Writers(str(workdir))
  for i in range(1, 41):
    row = {
      "step": 10 * i,
      name: 2 / i,
      "accuracy": 1 - 1 / i,
      "lr": lr / i,
      "grad_norm": math.nan if i == 3 else 1.0,
      "progress": i / 40,
      "examples_per_sec": 1000.0 + i,
      "mfu": 0.5,
      "weight_rms/kernel": 1.0,
      "device_hours": i / 10,
    }
    if i == 1:  # Facts about the compiled update, in the first row.
      row |= {"model_flops_per_step": 5 * 10**9}
      for part in ("argument", "output", "temporary", "alias"):
        row[f"update_{part}_bytes"] = 2**20
    if accounts:
      row |= {"account/step_secs": 30.0 * i, "account/compile_secs": 60.0}
    writer.write(row)
    if i % 10 == 0:
      for evaluation in evals:
        writer.write(
          {
            "step": 10 * i,
            f"{evaluation}/acc": i / 50,
            f"{evaluation}/secs": 1.0,
          }
        )
  if accounts:
    writer.write({"step": 400, "restarts": 1, "account/lost_secs": 140.0})
  writer.close()
  return str(workdir)


def media_row(step):
  """A row with a value of every kind."""
  pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 9
  rows = [{"number": 0, "text": "a|b", "references": ["x", "y"]}]
  return {
    "step": step,
    "loss": 0.5,
    "examples_per_sec": 3.0,
    "device_peak_bytes": 7,
    "val/acc": 0.25,
    "val/picture": media.Image(pixels, "two rows"),
    "val/gray": media.Image(np.eye(4, dtype=np.float32)),
    "val/note": media.Text("# Title\n<b>text</b>"),
    "val/texts": media.Table(rows, f"texts/{step}.jsonl"),
    "val/sizes": metrics.Histogram(np.array([1.0, 2.0, 5.0]), 0.0, 3.0),
  }


CONFIG = {"lr": 0.5, "model": {"depth": 3}, "evals": {"val": {"type": "mean"}}}


def write_media(workdir, *steps, restored_step=None, **options):
  """Writes rows of every kind of value, as a run with a config does."""
  (workdir / "config.json").write_text(json.dumps(CONFIG))
  (workdir / "parameters.txt").write_text("| kernel | 12 |\n")
  writer = writers.Writers(
    str(workdir),
    restored_step=restored_step,
    loggers=loggers.from_config(settings.Config(options)),
  )
  for step in steps:
    writer.write(*media.split(media_row(step)))
  writer.close()
