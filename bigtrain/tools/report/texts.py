"""The first example of a run's texts, and texts of evaluators, as HTML."""

import json
import os
from typing import Any

from bigtrain.files import paths
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run
from bigtrain.tools.report.predictions import newest

_MAX_LINES = 40  # Of a file.
# {folder: (what is in it, fields to show)}; the last field is the answer.
_FOLDERS = {
  "captions": ("captions", ("caption",)),
  "generations": ("samples", ("prompt", "sample")),
}


def section(run: Run) -> str:
  files = []
  for folder, (kind, fields) in _FOLDERS.items():
    for evaluation, (step, path) in newest(
      run.workdir, folder, "jsonl"
    ).items():
      files.append(_read(evaluation, step, path, kind, fields))
  example = run.starts[-1].get("first_example") if run.starts else None
  return markup.render("texts.jinja", example=example, files=files)


def _read(
  evaluation: str, step: int, path: str, kind: str, fields: tuple[str, ...]
) -> dict[str, Any]:
  lines = paths.read_bytes(path).decode().splitlines()
  rows = [json.loads(line) for line in lines[:_MAX_LINES]]
  sheet = path.removesuffix(".jsonl") + ".png"
  return {
    "evaluation": evaluation,
    "step": step,
    "kind": kind,
    "columns": [name for name in fields if any(name in row for row in rows)],
    "rows": rows,
    "total": len(lines),
    "sheet": paths.read_bytes(sheet) if os.path.exists(sheet) else b"",
  }
