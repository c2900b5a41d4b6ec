"""The site of docs/ is complete, and its links work."""

import pathlib
import re
import subprocess
import sys

import pytest
from support import processes

from bigtrain.tools import reference

ROOT = pathlib.Path(__file__).parent.parent


def test_the_navigation_has_every_page_and_every_kind():
  nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
  listed = re.findall(r": (\S+\.md)$", nav, re.M)
  pages = [path.name for path in (ROOT / "docs").glob("*.md")]
  kinds = [f"reference/{kind}.md" for kind in reference.KINDS]
  assert sorted(listed) == sorted(["index.md", *pages, *kinds])


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
  pytest.importorskip("mkdocs", reason="needs the extra docs")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
  built = subprocess.run(
    [*command, f"--site-dir={tmp_path}"],
    cwd=ROOT,
    env=processes.environment(NO_MKDOCS_2_WARNING="1"),
    capture_output=True,
    text=True,
    check=False,
  )
  assert built.returncode == 0, built.stdout + built.stderr
  page = (tmp_path / "reference" / "ops.html").read_text()
  assert "central_crop" in page and "height" in page
  start = (tmp_path / "index.html").read_text()
  assert 'href="predict.html"' in start and "reference/ops.html" in start
