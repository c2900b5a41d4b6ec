"""Images, texts, tables and histograms that the rows point to, as HTML."""

from bigtrain.reports import media
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run

_MOST_ROWS = 40
# texts.py shows these, compared with their references.
_OF_TEXTS = ("captions/", "generations/")


def section(run: Run) -> str:
  newest: dict[str, tuple[int, str]] = {}
  for row in run.rows:
    for name, value in row.items():
      if isinstance(value, str) and not value.startswith(_OF_TEXTS):
        newest[name] = row["step"], value
  shown = [
    (name, step, type(value).__name__, value)
    for name, (step, path) in sorted(newest.items())
    # Else the string is no path, or the file is gone.
    if (value := media.read(run.workdir, path)) is not None
  ]
  return markup.render(
    "logged_media.jinja", shown=shown, cells_of=_cells, most_rows=_MOST_ROWS
  )


def _cells(table: media.Table) -> list[list[str | None]]:
  rows = [[row.get(c) for c in table.columns] for row in table.rows]
  return [
    [None if cell is None else markup.text(cell) for cell in row]
    for row in rows[:_MOST_ROWS]
  ]
