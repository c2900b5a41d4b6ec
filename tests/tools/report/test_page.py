"""The HTML page."""

from support import written_runs

from bigtrain.tools import ranking
from bigtrain.tools.report import page, panels, report


def test_differences_of_configs():
  runs = [
    panels.Run("a", {"lr": 1e-3, "model": {"width": 64}, "pp": "x"}, {}, []),
    panels.Run("b", {"lr": 1e-3, "model": {"width": 32, "mlp": {}}}, {}, []),
  ]
  assert page.differences(runs) == {
    "model.width": ["64", "32"],
    "pp": ["x", ""],
    "model.mlp": ["", "{}"],
  }


def test_pages_are_reproducible(tmp_path):
  workdir = written_runs.write_run(tmp_path / "a")
  first, second = (
    page.render(runs, "val/acc", "max", [ranking.Best(0.8, 400)])
    for runs in [report.read([workdir])] * 2
  )
  assert first == second


def test_values_cannot_end_the_script_element():
  rows = [{"step": 1, "</script><b>": 1.0}]
  runs = [panels.Run("a", {}, {}, rows)]
  html = page.render(runs, "loss", "min", [None])
  assert html.count("</script>") == 2 and "<b>" not in html


def test_text_is_escaped():
  config, start = {"<c>": "<d>"}, {"<e>": "<f>"}
  runs = [
    panels.Run("<a>", {}, {}, [{"step": 1, "<b>": 1.0}]),
    panels.Run("b", config, {"starts": [start]}, [{"step": 1}]),
  ]
  html = page.render(runs, "<g>", "min", [None, None])
  html = html.partition("<body>")[2].partition("<script")[0]
  for letter in "abcdefg":
    assert f"&lt;{letter}&gt;" in html and f"<{letter}>" not in html
