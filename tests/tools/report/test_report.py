"""The command that reports runs."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import browser, written_runs

from bigtrain import main
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.tools.report import report

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

ROOT = pathlib.Path(__file__).parents[3]


def test_short_names_are_distinct(tmp_path):
  assert report.short_names(["/x/runs/a/"]) == ["a"]
  assert report.short_names(["/x/a", "/x/b"]) == ["a", "b"]
  assert report.short_names(["/x/s0", "/y/s0"]) == ["x/s0", "y/s0"]
  with pytest.raises(ConfigError, match="expected different folders"):
    report.short_names(["/x/a", "/x/a/"])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
  """Folder of a report on two runs, written by the command."""
  folder = tmp_path_factory.mktemp("report")
  workdirs = [
    written_runs.write_run(folder / "slow", lr=1e-3),
    written_runs.write_run(folder / "fast & <wild>", lr=2e-3, accounts=False),
  ]
  out = str(folder / "out")
  subprocess.run(
    [sys.executable, "-m", "bigtrain.tools.report", *workdirs, "--out", out],
    check=True,
  )
  return out


def test_the_page_is_complete_and_needs_nothing_else(two_runs):
  with open(os.path.join(two_runs, "report.html")) as file:
    page = file.read()
  # Nothing is fetched, and values of configs are escaped.
  page = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
  links = re.findall(r"(?:src|href)=[\"']([^\"']*)", page)
  assert all(link.startswith(("#", "data:")) for link in links)
  assert "@import" not in page and "alert(1)</script>" not in page
  assert "fast &amp; &lt;wild&gt;" in page
  assert page.count("<svg id=") == 7
  text = re.sub(r"<svg.*?</svg>", "", page, flags=re.S)
  text = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
  text = re.sub(r"<[^>]*>", " ", text)
  text = re.sub(r"\s+", " ", text)
  assert "8 x TPU v4" in text
  assert "val/acc 0.8 0.8" in text
  # The table of runs has the only difference of the configs.
  assert re.search(r"Run val/acc at step Steps Training loss lr slow", text)
  assert "lr 0.001 0.002" in text
  assert "steps 20m00s (85.7%) \N{EN DASH}" in text
  assert "lost to restarts 2m20s (10.0%)" in text
  assert "Restarts 1 0" in text
  assert "Memory of the step 2 MiB per device" in text
  assert "Model GFLOPs per step 5 5" in text
  assert "median" in text.lower()


def test_runs_are_sorted_and_the_best_is_marked(
  tmp_path, no_matplotlib, capsys
):
  workdirs = [written_runs.write_run(tmp_path / name) for name in "abc"]
  rows = (tmp_path / "b" / "metrics.jsonl").read_text()
  (tmp_path / "b" / "metrics.jsonl").write_text(
    rows.replace('"val/acc": 0.8', '"val/acc": 0.9')
  )
  (tmp_path / "c" / "metrics.jsonl").write_text(
    "".join(rows.splitlines(True)[:30])
  )

  def order(*flags):
    out = str(tmp_path / "out")
    assert report.main([*workdirs, "--out", out, *flags]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    table = page.partition('class="runs"')[2].partition("</table>")[0]
    best = re.search(r'class="best">.*?★', table, re.S)[0]
    names = re.findall(r"</span>(\w)[ <]", table)
    assert f"</span>{names[0]} " in best
    return "".join(names)

  assert order() == "bac"
  assert order("--mode=min")[0] == "a"  # All begin with 0.2.
  assert order("--metric=loss") == "abc"
  assert report.main([*workdirs, "--metric=val/ac"]) == 2
  assert "Did you mean 'val/acc'" in capsys.readouterr().err


def test_images_have_content(two_runs):
  names = {name for name in os.listdir(two_runs) if name.endswith(".png")}
  assert names >= {"curves.png", "loss.png", "eval_acc.png", "time.png"}
  for name in names:
    image = Image.open(os.path.join(two_runs, name)).convert("RGB")
    assert image.width >= 400
    colors = {color for _, color in image.getcolors(1 << 20)}
    assert (255, 255, 255) in colors
    assert (0x00, 0x72, 0xB2) in colors, name  # The first run, or its steps.


def test_workdirs_with_missing_files(tmp_path, capsys):
  bare = tmp_path / "bare"
  bare.mkdir()
  assert report.main([str(bare)]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and "metrics.jsonl: no log entries" in error
  # No config.json, no run.json, one row, not a number.
  (bare / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n')
  assert report.main([str(bare)]) == 0
  assert (bare / "report" / "report.html").exists()
  assert (bare / "report" / "loss.png").exists()


@pytest.fixture
def no_matplotlib(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_without_matplotlib_there_is_the_page(tmp_path, no_matplotlib, capsys):
  workdir = written_runs.write_run(tmp_path / "a")
  assert report.main([workdir]) == 0
  assert "pip install 'bigtrain[report]'" in capsys.readouterr().out
  assert os.listdir(tmp_path / "a" / "report") == ["report.html"]


# In a browser.


def test_the_page_in_a_browser(two_runs, tmp_path):
  page = os.path.join(two_runs, "report.html")
  assert browser.screenshot(page, tmp_path / "page.png") == []
  image = Image.open(tmp_path / "page.png").convert("RGB")
  count = {color: n for n, color in image.getcolors(1 << 22)}
  assert count[(255, 255, 255)] > 0.7 * image.width * image.height
  # Curves of both runs.
  for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
    assert count[color] > 500


_CLICKS = """
const shape = () => all("#chart-0 path.curve").pop().getAttribute("d");
const input = (id) => document.getElementById(id);
const set = (id, value) => {
  input(id).value = value;
  input(id).dispatchEvent(new Event("input"));
};
const first = shape();
say("charts", all("figure").length, "curves", curves(0));
// Switches.
all("input.switch")[0].click();
say("one run", curves(0), all(".of-run-0").every((n) => n.hidden));
input("none").click();
say("no run", curves(0), document.getElementById("chart-0").textContent);
input("all").click();
say("all runs", curves(0), shape() === first);
// Smoothing: the values as they are stay visible.
set("smoothing", "0.9");
say("smooth", curves(0), all("#chart-0 path.faint").length, shape() === first);
move(0, 0.99);
say(document.getElementById("tip").innerText.replaceAll("\\n", "; "));
set("smoothing", "0");
// Logarithms.
input("log-y").click();
say("log values", shape() === first, all("#chart-0 text").some(
  (n) => n.textContent === "0.1"));
input("log-x").click();
say("log steps", shape() === first);
input("log-x").click(); input("log-y").click();
say("as before", shape() === first);
// Hovering and zooming.
move(0, 0.5);
say(document.getElementById("tip").innerText.replaceAll("\\n", "; "));
move(0, 0.5, "pointerleave");
say("tip", document.getElementById("tip").hidden);
move(0, 0.5, "pointerdown"); move(0, 0.8); move(0, 0.8, "pointerup");
const ticks = all("#chart-1 text").map((n) => n.textContent);
say("zoomed", ticks.includes("100"), ticks.includes("300"));
document.getElementById("chart-1").dispatchEvent(new Event("dblclick"));
say("again", shape() === first);
"""


def test_clicks_in_a_browser(two_runs):
  lines = browser.play(os.path.join(two_runs, "report.html"), _CLICKS)
  said = dict(enumerate(lines))
  assert lines[:5] == [
    "charts 7 curves 2",
    "one run 1 true",
    f"no run 0 {said[2].removeprefix('no run 0 ')}",
    "all runs 2 true",
    "smooth 4 2 false",
  ]
  assert "no values" in said[2]
  # Rows at steps 10, 20, ..., 400 have the loss 20 / step.
  losses = [20 / step for step in range(10, 401, 10)]
  total = weight = 0.0
  for loss in losses:
    total, weight = 0.9 * total + 0.1 * loss, 0.9 * weight + 0.1
  smooth = f"(smoothed {float(f'{total / weight:.4g}'):g})"
  assert said[5].startswith("step 400; ") and said[5].count(smooth) == 2
  assert lines[6:9] == [
    "log values false true",
    "log steps false",
    "as before true",
  ]
  step = int(re.match(r"step (\d+); ", said[9])[1])
  assert 180 <= step <= 220
  assert said[9].count(f"{float(f'{20 / step:.4g}'):g}") == 2
  assert "slow" in said[9] and "fast & <wild>" in said[9]
  assert lines[10:] == ["tip true", "zoomed false true", "again true"]


@pytest.mark.slow
def test_a_report_of_digits_in_a_browser(tmp_path):
  workdir = tmp_path / "digits"
  config = loading.load(f"{ROOT}/configs/digits.py:runlocal")
  val = config["evals"]["val"]
  config["evals"]["saved"] = dict(
    type="save",
    pred="logits",
    data=val["data"],
    pp=val["pp"],
    keys=("image", "labels"),
    log_steps=4,
  )
  main.train(config | {"compile_cache": False}, str(workdir))
  assert report.main([str(workdir)]) == 0
  page = workdir / "report" / "report.html"
  lines = browser.play(
    page,
    """
    say(all(".matrix tbody tr").length, all(".pictures img").length);
    say(all(".pictures img").every((n) => n.complete && n.naturalWidth === 8));
    """,
  )
  assert lines == ["10 24", "true"]
  assert browser.screenshot(page, tmp_path / "page.png") == []
