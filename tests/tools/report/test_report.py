"""The command that reports runs."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import written_runs

from bigtrain import main, settings
from bigtrain.tools.report import report

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

ROOT = pathlib.Path(__file__).parents[3]


def test_short_names_are_distinct(tmp_path):
  assert report.short_names(["/x/runs/a/"]) == ["a"]
  assert report.short_names(["/x/a", "/x/b"]) == ["a", "b"]
  assert report.short_names(["/x/s0", "/y/s0"]) == ["x/s0", "y/s0"]
  with pytest.raises(settings.ConfigError, match="expected different folders"):
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
  links = re.findall(r"(?:src|href)=[\"']([^\"']*)", page)
  assert all(link.startswith("#") for link in links)
  assert "@import" not in page and "<script" not in page
  assert "fast &amp; &lt;wild&gt;" in page
  assert page.count("<svg") == 8  # Seven panels and the time accounts.
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
  assert "Memory of the step 2 MiB per device" in text
  assert "Model GFLOPs per step 5 5" in text
  assert "median" in text.lower()


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
  assert error.count("\n") == 1 and "metrics.jsonl: no rows" in error
  # No config.json, no run.json, one row, not a number.
  (bare / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n')
  assert report.main([str(bare)]) == 0
  assert (bare / "report" / "report.html").exists()
  assert (bare / "report" / "loss.png").exists()


def test_missing_matplotlib_is_an_error(tmp_path, monkeypatch, capsys):
  workdir = written_runs.write_run(tmp_path / "a")
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert report.main([workdir]) == 2
  assert "pip install 'bigtrain[report]'" in capsys.readouterr().err


@pytest.fixture
def look(tmp_path):
  """Takes a screenshot of a page; returns {color: number of pixels}."""
  if not shutil.which("chromium"):
    pytest.skip("Chromium is not installed")

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


def test_the_page_in_a_browser(two_runs, look):
  count = look(two_runs)
  # Curves of both runs, and the time of steps.
  for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
    assert count[color] > 500


@pytest.mark.slow
def test_a_report_of_digits_in_a_browser(tmp_path, look):
  workdir = tmp_path / "digits"
  config = str(ROOT / "configs" / "digits.py") + ":runlocal"
  main.train(settings.load(config) | {"compile_cache": False}, str(workdir))
  assert report.main([str(workdir)]) == 0
  with open(workdir / "report" / "report.html") as file:
    page = file.read()
  assert "val/acc" in page and "<svg" in page
  assert look(workdir / "report")[(0x00, 0x72, 0xB2)] > 500
