"""Captions and generated texts."""

import json

import numpy as np

from bigtrain.reports import media
from bigtrain.tools.report import texts
from bigtrain.tools.report.panels import Run


def write(path, rows):
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_captions(tmp_path):
  rows = [
    {"number": 0, "caption": "a <b>", "references": ["a <b>", "c"]},
    {"number": 1, "caption": "d", "references": ["e"]},
  ]
  write(tmp_path / "captions" / "val-00000010.jsonl", rows)
  picture = media.Image(np.zeros((2, 2, 3), np.uint8)).png()
  (tmp_path / "captions" / "val-00000010.png").write_bytes(picture)
  html = texts.section(Run("a", {}, {}, [], str(tmp_path)))
  assert "<h4>val, step 10: captions</h4>" in html
  assert '<span class="right">a &lt;b&gt;</span>' in html
  assert '<span class="wrong">d</span>' in html
  assert "a &lt;b&gt;<br>c" in html and html.count("<img") == 1


def test_samples_without_references(tmp_path):
  rows = [{"number": i, "prompt": "p", "sample": f"s{i}"} for i in range(50)]
  write(tmp_path / "generations" / "gen-00000010.jsonl", rows)
  html = texts.section(Run("a", {}, {}, [], str(tmp_path)))
  assert "The first 40 of 50" in html and "s39" in html and "s40" not in html
  assert "References" not in html and 'class="wrong"' not in html
  assert texts.section(Run("a", {}, {}, [], str(tmp_path / "none"))) == ""
