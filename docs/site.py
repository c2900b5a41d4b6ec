"""Hooks of mkdocs: the pages that are made from README.md and the program.

The reference pages have the text of `python -m bigtrain list KIND NAME`. The
start page is README.md. Links to files of the repository that are not part of
the site become plain text.
"""

import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

from bigtrain.tools import reference

_ROOT = pathlib.Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
  """Adds the start page and the reference pages."""
  pages = {"index.md": _without_folder((_ROOT / "README.md").read_text())}
  for kind in reference.KINDS:
    pages[f"reference/{kind}.md"] = page(kind)
  for path, text in pages.items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
  """Drops links to files outside of docs/."""
  folder = (_ROOT / "docs" / page.file.src_uri).parent

  def link(match: re.Match[str]) -> str:
    text, target = match.groups()
    path = target.partition("#")[0]
    outside = path and ":" not in path and not _inside(folder / path)
    return text if outside else match[0]

  return _LINK.sub(link, markdown)


def _inside(path: pathlib.Path) -> bool:
  """Whether a link leads to a page or picture of the site.

  A link to a page of docs/ that is not there counts too: it is an error.
  """
  return path.resolve().is_relative_to(_ROOT / "docs")


def _without_folder(readme: str) -> str:
  """README.md as a page of docs/: `docs/x.md` is `x.md`."""
  link = lambda match: match[1] + (match[2] or "../")
  text = re.sub(r"(\]\()(?!https?:|#|docs/)()", link, readme)
  return text.replace("](docs/", "](").replace("](../#", "](#")


def page(kind: str) -> str:
  """The reference page of a kind."""
  lines = [f"# {kind.capitalize()}", "", f"`python -m bigtrain list {kind}`"]
  for name in reference.names(kind):
    text = reference.explain(kind, name)
    lines += ["", f"## {name}", "", "```text", text, "```"]
  return "\n".join(lines) + "\n"
