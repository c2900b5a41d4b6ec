"""The quickstart of language models learns what it promises."""

import pathlib

import pytest

from bigtrain import main, settings

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "pydoc_lm.py"


@pytest.mark.results
def test_pydoc_lm_reaches_its_bits_per_byte(tmp_path):
  newest = main.train(settings.load(str(CONFIG)), str(tmp_path / "run"))
  assert newest["val/bits_per_byte"] <= 1.60
