"""Pages of docs that lead through a task: their commands run as printed."""

import re

import pages
import pytest

pytestmark = pytest.mark.slow


def test_out_of_memory(tmp_path):
  plan, train = pages.blocks("docs/out_of_memory.md", "")
  table = pages.ran(pages.type_shell(plan.text, tmp_path))
  assert re.search(r"^devices +1$", table, re.M)
  assert re.search(r"of 80 +\d.*%", table)
  ended = pages.type_shell(train.text, tmp_path)
  assert ended.returncode == 1
  line = ended.stderr.strip().splitlines()[-1]
  (printed,) = pages.blocks("docs/out_of_memory.md", "text")
  without_figures = lambda text: re.sub(
    r"=\d+ |[\d.]+ [kMG]?B", "", " ".join(text.split())
  )
  assert without_figures(line) == without_figures(printed.text)
