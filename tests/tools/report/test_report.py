import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from bigtrain import main, settings
from bigtrain.reports import writers
from bigtrain.tools.report import curves, panels, report

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

ROOT = pathlib.Path(__file__).parents[2]


def make_run(workdir, *, lr=1e-3, evals=("val",), accounts=True, name="loss"):
  """A workdir as a run leaves it, with 40 rows and an evaluation each 10."""
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
  w = writers.Writers(str(workdir), tensorboard=False)
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
    if i == 1:  # What the first row says of the compiled update.
      row |= {"model_flops_per_step": 5 * 10**9}
      for part in ("argument", "output", "temporary", "alias"):
        row[f"update_{part}_bytes"] = 2**20
    if accounts:
      row |= {"account/step_secs": 30.0 * i, "account/compile_secs": 60.0}
    w.write(row)
    if i % 10 == 0:
      for evaluation in evals:
        w.write(
          {
            "step": 10 * i,
            f"{evaluation}/acc": i / 50,
            f"{evaluation}/secs": 1.0,
          }
        )
  if accounts:
    w.write({"step": 400, "restarts": 1, "account/lost_secs": 140.0})
  w.close()
  return str(workdir)


def test_panels_of_one_run(tmp_path):
  runs = report.read([make_run(tmp_path / "a", evals=("val", "test"))])
  found = {panel.name: panel for panel in panels.panels(runs)}
  assert list(found) == [
    "loss",
    "eval_acc",
    "accuracy",
    "lr",
    "grad_norm",
    "examples_per_sec",
    "mfu",
  ]
  val, test = found["eval_acc"].series
  assert (val.label, test.label) == ("val/acc", "test/acc")
  assert val.color != test.color
  assert val.steps == [100, 200, 300, 400]
  assert val.values == [0.2, 0.4, 0.6, 0.8]
  (mfu,) = found["mfu"].series
  assert found["mfu"].unit == "% of peak" and set(mfu.values) == {50.0}
  assert found["lr"].series[0].label == ""  # One line needs no legend.


def test_panels_of_two_runs_tell_runs_by_color(tmp_path):
  runs = report.read(
    [
      make_run(tmp_path / "a", evals=("val", "test")),
      make_run(tmp_path / "b", lr=2e-3, evals=("val",)),
    ]
  )
  found = {panel.name: panel for panel in panels.panels(runs)}
  labels = [(s.label, s.color, s.line) for s in found["eval_acc"].series]
  blue, orange = panels.COLORS[:2]
  assert labels == [
    ("a val/acc", blue, "-"),
    ("a test/acc", blue, "--"),
    ("b val/acc", orange, "-"),
  ]
  assert [s.color for s in found["loss"].series] == [blue, orange]


def test_rates_of_groups_share_a_panel():
  rows = [{"step": 1, "lr/head": 1e-3, "lr/body": 1e-4, "lr": 1.0}]
  run = panels.Run("a", {}, {}, rows)
  (panel,) = panels.panels([run])
  assert [s.label for s in panel.series] == ["lr", "lr/head", "lr/body"]
  assert panels.results([run]) == []


def test_results_are_those_of_the_config_if_it_says():
  rows = [{"step": 1, "val/acc": 1.0, "train/x": 2.0, "account/step_secs": 1.0}]
  named = panels.Run("a", {"evals": {"val": {}}}, {}, rows)
  assert panels.results([named]) == ["val/acc"]
  assert panels.results([named._replace(config={})]) == ["val/acc", "train/x"]


def test_config_differences():
  runs = [
    panels.Run("a", {"lr": 1e-3, "model": {"width": 64}, "pp": "x"}, {}, []),
    panels.Run("b", {"lr": 1e-3, "model": {"width": 32, "mlp": {}}}, {}, []),
  ]
  assert report.differences(runs) == {
    "model.width": ["64", "32"],
    "pp": ["x", ""],
    "model.mlp": ["", "{}"],
  }


def test_names_are_short_but_differ(tmp_path):
  assert report.short_names(["/x/runs/a/"]) == ["a"]
  assert report.short_names(["/x/a", "/x/b"]) == ["a", "b"]
  assert report.short_names(["/x/s0", "/y/s0"]) == ["x/s0", "y/s0"]
  with pytest.raises(settings.ConfigError, match="one is twice"):
    report.short_names(["/x/a", "/x/a/"])


def test_smoothing_keeps_level_and_length():
  assert curves.smooth([1.0] * 300) == [1.0] * 300
  noise = [float(i % 2) for i in range(1000)]
  assert all(0.4 < v < 0.6 for v in curves.smooth(noise)[50:-50])
  assert curves.smooth([3.0, 1.0]) == [3.0, 1.0]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
  """The folder of a report on two runs, made by the command."""
  folder = tmp_path_factory.mktemp("report")
  workdirs = [
    make_run(folder / "slow", lr=1e-3),
    make_run(folder / "fast & <wild>", lr=2e-3, accounts=False),
  ]
  out = str(folder / "out")
  subprocess.run(
    [sys.executable, "-m", "bigtrain.tools.report", *workdirs, "--out", out],
    check=True,
  )
  return out


def test_page_stands_alone_and_says_it_all(two_runs):
  with open(os.path.join(two_runs, "report.html")) as file:
    page = file.read()
  # Nothing is fetched; what a config says is text, not markup.
  links = re.findall(r"(?:src|href)=[\"']([^\"']*)", page)
  assert all(link.startswith("#") for link in links)
  assert "@import" not in page and "<script" not in page
  assert "fast &amp; &lt;wild&gt;" in page
  assert page.count("<svg") == 8  # Seven panels and the time.
  text = re.sub(r"<svg.*?</svg>", "", page, flags=re.S)
  text = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
  text = re.sub(r"<[^>]*>", " ", text)
  text = re.sub(r"\s+", " ", text)
  assert "8 x TPU v4" in text
  assert "val/acc 0.8 0.8" in text
  assert "lr 0.001 0.002" in text  # The only difference.
  assert "steps 20m00s (85.7%) &ndash;" in text
  assert "lost to restarts 2m20s (10.0%)" in text
  assert "Restarts 1 0" in text
  assert "Memory of the step 2 MiB a device" in text
  assert "Model GFLOPs of a step 5 5" in text
  assert "median" in text.lower()


def test_pictures_are_pictures(two_runs):
  names = {name for name in os.listdir(two_runs) if name.endswith(".png")}
  assert names >= {"curves.png", "loss.png", "eval_acc.png", "time.png"}
  for name in names:
    image = Image.open(os.path.join(two_runs, name)).convert("RGB")
    assert image.width >= 400
    colors = {color for _, color in image.getcolors(1 << 20)}
    assert (255, 255, 255) in colors
    assert (0x00, 0x72, 0xB2) in colors, name  # The first run, or its steps.


def test_a_page_is_the_same_again(tmp_path):
  workdir = make_run(tmp_path / "a")
  first, second = (
    report.page(runs, curves.svgs(runs))
    for runs in [report.read([workdir])] * 2
  )
  assert first == second


def test_poor_workdirs(tmp_path, capsys):
  bare = tmp_path / "bare"
  bare.mkdir()
  assert report.main([str(bare)]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and "metrics.jsonl: no rows" in error
  # No config.json, no run.json, one row, not a number.
  (bare / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n')
  assert report.main([str(bare)]) == 0
  assert (bare / "report" / "report.html").exists()
  assert (bare / "report" / "loss.png").exists()


def test_matplotlib_that_is_missing_is_told(tmp_path, monkeypatch, capsys):
  workdir = make_run(tmp_path / "a")
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert report.main([workdir]) == 2
  assert "pip install 'bigtrain[report]'" in capsys.readouterr().err


@pytest.fixture
def look(tmp_path):
  """Makes a picture of a page as a browser shows it: {color: pixels}."""
  if not shutil.which("chromium"):
    pytest.skip("there is no Chromium here")

  def take(folder):
    shot = tmp_path / "page.png"
    subprocess.run(
      [
        "chromium",
        "--headless",
        "--no-sandbox",  # Tests may run as root.
        "--disable-gpu",
        "--window-size=1280,2600",
        f"--screenshot={shot}",
        f"file://{folder}/report.html",
      ],
      check=True,
      capture_output=True,
      timeout=120,
    )
    image = Image.open(shot).convert("RGB")
    count = {color: n for n, color in image.getcolors(1 << 22)}
    assert count[(255, 255, 255)] > 0.7 * image.width * image.height
    return count

  return take


def test_page_in_a_browser(two_runs, look):
  count = look(two_runs)
  # Both runs' curves, and the account of steps.
  for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
    assert count[color] > 500


@pytest.mark.slow
def test_a_run_of_the_digits_in_a_browser(tmp_path, look):
  workdir = tmp_path / "digits"
  config = str(ROOT / "configs" / "digits.py") + ":runlocal"
  main.train(settings.load(config) | {"compile_cache": False}, str(workdir))
  assert report.main([str(workdir)]) == 0
  with open(workdir / "report" / "report.html") as file:
    page = file.read()
  assert "val/acc" in page and "<svg" in page
  assert look(workdir / "report")[(0x00, 0x72, 0xB2)] > 500
