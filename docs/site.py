"""Hooks for mkdocs: pages made from files outside docs/ and from the program.

README.md is the start page. CONTRIBUTING.md and CHANGELOG.md have a page each,
and so has each kind of `python -m bigtrain list KIND`. Links are rewritten to
match; a link to a file that the site does not have becomes plain text.
"""

import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

from bigtrain.tools import reference

_ROOT = pathlib.Path(__file__).parent.parent
_DOCS = _ROOT / "docs"

# Pages of the site whose files lie in the root of the repository.
_ROOT_PAGES = {
  "index.md": "README.md",
  "contributing.md": "CONTRIBUTING.md",
  "changelog.md": "CHANGELOG.md",
}

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
# Markdown has no pictures for dark screens, so README.md has a few HTML tags,
# whose links mkdocs does not check.
_HTML_LINK = re.compile(r'(?<= )(src|srcset|href)="([^"]+)"')


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages whose files do not lie in docs/."""
  pages = {
    page: (_ROOT / file).read_text(encoding="utf-8")
    for page, file in _ROOT_PAGES.items()
  }
  for kind in reference.KINDS:
    pages[f"reference/{kind}.md"] = reference_page(kind)
  for path, text in pages.items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
  """Rewrites links for the place that the page has on the site."""
  uri = page.file.src_uri
  from_root = uri in _ROOT_PAGES
  written_in = _ROOT if from_root else (_DOCS / uri).parent
  shown_in = (_DOCS / uri).parent

  def link(match: re.Match[str]) -> str:
    text, target = match.groups()
    target = _on_site(target, written_in, shown_in)
    return text if target is None else f"[{text}]({target})"

  def html_link(match: re.Match[str]) -> str:
    attribute, target = match.groups()
    on_site = _on_site(target, written_in, shown_in)
    return f'{attribute}="{target if on_site is None else on_site}"'

  return _HTML_LINK.sub(html_link, _LINK.sub(link, markdown))


def _on_site(
  target: str, written_in: pathlib.Path, shown_in: pathlib.Path
) -> str | None:
  """Returns a link's target on the site, or None if the site does not have it.

  A page of docs/ that does not exist is returned too: mkdocs reports it.
  """
  path, hash_sign, anchor = target.partition("#")
  if not path or ":" in path:  # On the same page, or on another site.
    return target
  file = pathlib.Path(os.path.normpath(written_in / path))
  for page, root_file in _ROOT_PAGES.items():
    if file == _ROOT / root_file:
      file = _DOCS / page
  if not file.is_relative_to(_DOCS):
    return None
  relative = pathlib.Path(os.path.relpath(file, shown_in)).as_posix()
  return relative + hash_sign + anchor


def reference_page(kind: str) -> str:
  lines = [f"# {kind.capitalize()}", "", f"`python -m bigtrain list {kind}`"]
  for name in reference.names(kind):
    text = reference.explain(kind, name)
    lines += ["", f"## {name}", "", "```text", text, "```"]
  return "\n".join(lines) + "\n"
