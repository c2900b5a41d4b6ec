"""Images, texts, tables and histograms that the rows point to, as HTML."""

import json
from typing import Any

from bigtrain.reports import media
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run

_MOST_ROWS = 40
_SMALL = 128  # Pictures that are narrower, in pixels, are enlarged.
# texts.py shows these, compared with their references.
_OF_TEXTS = ("captions/", "generations/")


def section(run: Run) -> str:
  newest: dict[str, tuple[int, str]] = {}
  for row in run.rows:
    for name, value in row.items():
      if isinstance(value, str) and not value.startswith(_OF_TEXTS):
        newest[name] = row["step"], value
  parts = []
  for name, (step, path) in sorted(newest.items()):
    value = media.read(run.workdir, path)
    if value is not None:  # Else the string is no path, or the file is gone.
      title = f"{markup.text(name)}, step {step:,}"
      parts.append(f"<h4>{title}</h4>{_html(name, value)}")
  return "".join(parts)


def _html(name: str, value: Any) -> str:
  if isinstance(value, media.Text):
    return f"<pre>{markup.text(value.text)}</pre>"
  if isinstance(value, media.Table):
    return _table(value)
  if isinstance(value, media.ImageFile):
    picture = markup.picture(value.content, "sheet", value.caption or name)
    text = markup.text(value.caption)
    if value.width < _SMALL:
      return f'<div class="pictures"><div>{picture}{text}</div></div>'
    return f"{picture}<p>{text}</p>"
  return _histogram(value["edges"], value["counts"])


def _table(table: media.Table) -> str:
  rows = [
    [_cell(row.get(column)) for column in table.columns]
    for row in table.rows[:_MOST_ROWS]
  ]
  hidden = len(table.rows) - len(rows)
  more = f'<p class="note">and {hidden:,} more</p>' if hidden > 0 else ""
  return markup.table(map(markup.text, table.columns), rows) + more


def _cell(value: Any) -> str:
  if value is None:
    return "&ndash;"
  return markup.text(value if isinstance(value, str) else json.dumps(value))


def _histogram(edges: list[float], counts: list[float]) -> str:
  """Bars with their numbers as tool tips, over an axis with the outer edges."""
  width, height = 10, 100
  top = max(*counts, 0.0) or 1.0
  bars = "".join(
    f'<rect x="{width * i + 1}" y="{height * (1 - count / top):.1f}" '
    f'width="{width - 2}" height="{height * count / top:.1f}" fill="#0072B2">'
    f"<title>{low:g} to {high:g}: {count:g}</title></rect>"
    for i, (low, high, count) in enumerate(zip(edges, edges[1:], counts))
  )
  return (
    f'<svg class="sheet" role="img" width="{2 * width * len(counts)}" '
    f'height="120" viewBox="0 0 {width * len(counts)} {height}" '
    f'preserveAspectRatio="none">{bars}</svg>'
    f'<p class="note">{edges[0]:g} to {edges[-1]:g}, {sum(counts):g} values</p>'
  )
