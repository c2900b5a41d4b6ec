"""Fills the page's templates. Values that they print are escaped."""

import base64
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jinja2

from bigtrain.config import settings
from bigtrain.reports import console
from bigtrain.tools.report.panels import COLORS

_FOLDER = pathlib.Path(__file__).parent


def read(name: str) -> str:
  return (_FOLDER / name).read_text()


def render(name: str, **values: Any) -> str:
  return _environment().get_template(name).render(values).strip()


@functools.cache
def _environment() -> jinja2.Environment:
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.globals["color_of"] = lambda run: COLORS[run % len(COLORS)]
  environment.filters |= {
    "base64": lambda content: base64.b64encode(content).decode(),
    "flat": flat,
    "number": number,
  }
  return environment


def number(value: float | None, spec: str = "") -> str:
  if value is None:
    return ""
  return format(value, spec) if spec else console.number(value)


def text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def flat(config: Mapping[str, Any]) -> dict[str, str]:
  return {key: text(x) for key, x in settings.flatten(config).items()}
