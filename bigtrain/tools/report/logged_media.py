"""Images, texts, tables and histograms that a run has logged, as HTML.

Log entries have the paths of such files as values.
"""

from bigtrain.reports import media
from bigtrain.tools.report import markup
from bigtrain.tools.report.panels import Run

_MAX_ROWS = 40  # Of a table.
# Folders whose files texts.py shows, compared with their references.
_TEXT_FOLDERS = ("captions/", "generations/")


def section(run: Run) -> str:
  newest: dict[str, tuple[int, str]] = {}  # {name: (step, path)}
  for entry in run.entries:
    for name, value in entry.items():
      if isinstance(value, str) and not value.startswith(_TEXT_FOLDERS):
        newest[name] = entry["step"], value
  shown = []
  for name, (step, path) in sorted(newest.items()):
    value = media.read(run.workdir, path)
    if value is not None:  # Else the string is no path, or the file is gone.
      shown.append((name, step, type(value).__name__, value))
  return markup.render(
    "logged_media.jinja", shown=shown, cells_of=_cells, max_rows=_MAX_ROWS
  )


def _cells(table: media.Table) -> list[list[str | None]]:
  """The first rows of a table as texts; None for missing cells."""
  rows = []
  for row in table.rows[:_MAX_ROWS]:
    cells = [row.get(column) for column in table.columns]
    rows.append([None if c is None else markup.text(c) for c in cells])
  return rows
