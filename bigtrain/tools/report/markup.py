"""Pieces of HTML."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigtrain.tools.report.panels import COLORS


def text(value: Any) -> str:
  return html.escape(str(value))


def dot(run: int) -> str:
  return (
    f'<span class="dot" style="background:{COLORS[run % len(COLORS)]}"></span>'
  )


def by_run(names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
  head = "".join(
    f'<th class="of-run-{i}">{dot(i)}{text(name)}</th>'
    for i, name in enumerate(names)
  )
  body = "".join(
    f"<tr><th>{text(name)}</th>"
    + "".join(
      f'<td class="of-run-{i}">{text(value) or "&ndash;"}</td>'
      for i, value in enumerate(values)
    )
    + "</tr>"
    for name, values in lines.items()
  )
  return (
    '<div class="wide"><table><thead><tr><th></th>'
    f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
  )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """A table of cells that are HTML already; scrolls if it is long."""
  heads = "".join(f"<th>{cell}</th>" for cell in head)
  body = "".join(
    "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    for row in rows
  )
  return (
    f'<div class="wide tall"><table><thead><tr>{heads}</tr></thead>'
    f"<tbody>{body}</tbody></table></div>"
  )


def details(title: str, lines: Mapping[str, str]) -> str:
  body = "".join(
    f"<tr><th>{text(k)}</th><td>{text(v)}</td></tr>" for k, v in lines.items()
  )
  return (
    f"<details><summary>{text(title)}</summary>"
    f'<div class="wide"><table class="keys">{body}</table></div></details>'
  )


def picture(content: bytes, kind: str = "", description: str = "") -> str:
  encoded = base64.b64encode(content).decode()
  return (
    f'<img class="{kind}" alt="{text(description)}" '
    f'src="data:image/png;base64,{encoded}">'
  )
