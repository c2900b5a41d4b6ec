"""The first example of a run's texts, and what evaluators have written."""

import json
import os

from bigtrain.files import paths
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run
from bigtrain.tools.report.predictions import newest

_MOST_ROWS = 40


def section(run: Run) -> str:
  parts = []
  starts = run.info.get("starts") or [{}]
  if example := starts[-1].get("first_example"):
    parts.append(
      '<h4>First example</h4><p class="note">What is marked has a loss.</p>'
      '<p style="white-space: pre-wrap">'
    )
    for text, has_loss in example:
      text = markup.text(text)
      parts.append(f"<mark>{text}</mark>" if has_loss else text)
    parts.append("</p>")
  for name, (step, path) in newest(run.workdir, "captions", "jsonl").items():
    parts.append(f"<h4>{markup.text(name)}, step {step:,}: captions</h4>")
    sheet = path.removesuffix(".jsonl") + ".png"
    if os.path.exists(sheet):
      parts.append(
        '<p class="note">Pictures with their captions. <span class="wrong">Red'
        "</span>: equals none of the references.</p>"
        + markup.picture(paths.read_bytes(sheet), "sheet", f"captions, {name}")
      )
    parts.append(_table(path, {"caption": "Caption"}))
  columns = {"prompt": "Prompt", "sample": "Sample"}
  for name, (step, path) in newest(run.workdir, "generations", "jsonl").items():
    parts.append(f"<h4>{markup.text(name)}, step {step:,}: samples</h4>")
    parts.append(_table(path, columns))
  return "".join(parts)


def _table(path: str, columns: dict[str, str]) -> str:
  lines = paths.read_bytes(path).decode().splitlines()
  rows = [json.loads(line) for line in lines[:_MOST_ROWS]]
  columns = {k: v for k, v in columns.items() if any(k in row for row in rows)}
  compared = any(row.get("references") for row in rows)
  head = ["#", *columns.values(), *(["References"] if compared else [])]
  answer = [*columns][-1] if columns else ""
  body = []
  for row in rows:
    cells = [str(row.get("number", ""))]
    for key in columns:
      text = markup.text(row.get(key, ""))
      references = [text.strip() for text in row.get("references", [])]
      if references and key == answer:
        is_right = str(row[key]).strip() in references
        kind = "right" if is_right else "wrong"
        text = f'<span class="{kind}">{text}</span>'
      cells.append(text)
    if compared:
      cells.append("<br>".join(map(markup.text, row.get("references", []))))
    body.append(cells)
  legend = (
    '<p class="note"><span class="right">Green</span>: equals a reference; '
    '<span class="wrong">red</span>: equals none.</p>'
    if compared
    else ""
  )
  title = "All"
  if len(rows) < len(lines):
    title = f"The first {len(rows)} of {len(lines):,}"
  return (
    f"<details open><summary>{title}</summary>{legend}"
    f"{markup.table(head, body)}</details>"
  )
