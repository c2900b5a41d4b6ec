"""The files that rows point to, in the page."""

from support import written_runs

from bigtrain.reports import writers
from bigtrain.tools.report import logged_media, page
from bigtrain.tools.report.panels import Run


def test_the_newest_of_each_metric_is_shown(tmp_path):
  written_runs.write_media(tmp_path, 5, 6, tensorboard=False)
  (tmp_path / "media/val/gray/00000006.png").unlink()
  run = Run("a", {}, {}, writers.read_rows(str(tmp_path)), str(tmp_path))
  html = logged_media.section(run)
  titles = ["note", "picture", "sizes", "texts"]
  assert [f"<h4>val/{name}, step 6</h4>" in html for name in titles] == [
    True
  ] * 4
  assert "step 5" not in html and "gray" not in html
  assert html.count("data:image/png;base64,iVBOR") == 1
  assert ">two rows</div>" in html
  assert "# Title\n&lt;b&gt;text&lt;/b&gt;" in html  # Not run as HTML.
  assert "<th>references</th>" in html and "<td>a|b</td>" in html
  assert html.count("<rect") == 3 and "1 to 2: 2</title>" in html
  section = page.render([run], "loss", "min", [None])
  assert "<h2>Images, tables and histograms</h2>" in section


def test_strings_that_are_no_files_of_the_run_are_left_out(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  (tmp_path / "secret.txt").write_text("outside")
  (workdir / "captions").mkdir()
  (workdir / "captions" / "val.jsonl").write_text("")
  row = {
    "step": 1,
    "note": "hello",
    "gone": "media/gone.png",
    "outside": "../secret.txt",
    "absolute": str(tmp_path / "secret.txt"),
    "shown_elsewhere": "captions/val.jsonl",
    "loss": 1.0,
  }
  assert logged_media.section(Run("a", {}, {}, [row], str(workdir))) == ""
