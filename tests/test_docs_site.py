"""The site of docs/ is complete, and all its links and pictures exist."""

import html.parser
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest
from support import processes

from bigtrain.tools import reference

ROOT = pathlib.Path(__file__).parent.parent


def test_the_navigation_has_every_page_and_every_kind():
  nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
  listed = re.findall(r": (\S+\.md)$", nav, re.M)
  from_root = ["index.md", "contributing.md", "changelog.md"]
  pages = [path.name for path in (ROOT / "docs").glob("*.md")]
  kinds = [f"reference/{kind}.md" for kind in reference.KINDS]
  assert sorted(listed) == sorted([*from_root, *pages, *kinds])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """Folder of the built site."""
  pytest.importorskip("mkdocs", reason="needs the extra docs")
  folder = tmp_path_factory.mktemp("site")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
  built = subprocess.run(
    [*command, f"--site-dir={folder}"],
    cwd=ROOT,
    env=processes.environment(NO_MKDOCS_2_WARNING="1"),
    capture_output=True,
    text=True,
    check=False,
  )
  assert built.returncode == 0, built.stdout + built.stderr
  return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
  page = (site / "reference" / "ops.html").read_text()
  assert "central_crop" in page and "height" in page
  start = (site / "index.html").read_text()
  assert 'href="predict.html"' in start and "reference/ops.html" in start
  assert 'href="contributing.html"' in start


class Links(html.parser.HTMLParser):
  """What an HTML page refers to, and the anchors that it has."""

  def __init__(self, text):
    super().__init__()
    self.targets = []
    self.anchors = set()
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    for name, value in attrs:
      if not value:
        continue
      if name in ("src", "href"):
        self.targets.append(value)
      elif name == "srcset":
        self.targets += [part.split()[0] for part in value.split(",")]
      elif name == "id" or (tag == "a" and name == "name"):
        self.anchors.add(value)


def broken_links(folder):
  """Returns "page -> target" of all that leads nowhere within the site."""
  pages = {
    path: Links(path.read_text()) for path in folder.resolve().rglob("*.html")
  }
  broken = []
  for page, links in pages.items():
    for target in links.targets:
      url = urllib.parse.urlsplit(target)
      if url.scheme or url.netloc:
        continue
      path = urllib.parse.unquote(url.path)
      if path.startswith("/"):  # As in 404.html, which any folder can show.
        file = folder.resolve() / path[1:]
      else:
        file = (page.parent / path).resolve() if path else page
      if file.is_dir():
        file /= "index.html"
      anchor = urllib.parse.unquote(url.fragment)
      no_anchor = anchor and file in pages and anchor not in pages[file].anchors
      if not file.is_file() or no_anchor:
        broken.append(f"{page.relative_to(folder.resolve())} -> {target}")
  return sorted(broken)


@pytest.mark.slow
def test_links_and_pictures_of_the_site_exist(site):
  assert (site / "report.png").is_file()
  assert not broken_links(site)


def test_broken_links_are_found(tmp_path):
  (tmp_path / "style.css").touch()
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "index.html").write_text('<a href="../start.html#h">')
  (tmp_path / "start.html").write_text(
    '<link href="style.css"><link href="/style.css"><h1 id="h"></h1>'
    '<a href="#h"></a><a href="folder/"></a><a href="https://x.org/y"></a>'
    '<img src="docs/no.png"><source srcset="no.png 2x"><a href="#no"></a>'
    '<a href="folder/index.html#no"></a><script src="/no.js"></script>'
  )
  assert broken_links(tmp_path) == [
    "start.html -> #no",
    "start.html -> /no.js",
    "start.html -> docs/no.png",
    "start.html -> folder/index.html#no",
    "start.html -> no.png",
  ]
