"""Sheets of pictures with texts, for evaluators whose models read pictures."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.text import box_texts

_COLUMNS = 5
_LETTERS = 28  # Of a line below which texts are broken.


# {color: (top, left, bottom, right) of each box, in shares of the picture}.
Boxes = Mapping[str, Sequence[Sequence[float]]]


def of_texts(
  images: np.ndarray, texts: Sequence[str], is_wrong: Sequence[bool]
) -> np.ndarray:
  """Like `draw`, with wrong texts in red.

  Boxes in texts (text/box_texts.py) are drawn into the picture; only their
  labels remain in the text.
  """
  return draw(
    images,
    [box_texts.without(text) for text in texts],
    ["tab:red" if wrong else "black" for wrong in is_wrong],
    [
      {"tab:orange": [box[:4] for box in box_texts.read(text)]}
      for text in texts
    ],
  )


def draw(
  images: np.ndarray,
  texts: Sequence[str],
  colors: Sequence[str],
  boxes: Sequence[Boxes],
) -> np.ndarray:
  """Draws pictures with a text above each; returns uint8 RGB pixels.

  Args:
    images: [N, height, width, channels] in any range of values; with [N, K,
      height, width, channels], K pictures are drawn side by side.
    texts, colors, boxes: of each picture.
  """
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  columns = min(_COLUMNS, len(images))
  rows = -(-len(images) // columns)
  figure = Figure(figsize=(2.6 * columns, 2.0 * rows), dpi=100)
  canvas = backend_agg.FigureCanvasAgg(figure)
  for i, image in enumerate(_scaled(images)):
    axes = figure.add_subplot(rows, columns, i + 1)
    axes.axis("off")
    axes.imshow(image, interpolation="nearest")
    axes.set_title(_title(texts[i]), fontsize=8, color=colors[i])
    _add_boxes(axes, image.shape, boxes[i])
  figure.tight_layout()
  canvas.draw()
  return np.asarray(canvas.buffer_rgba())[..., :3]


def _scaled(images: np.ndarray) -> np.ndarray:
  """RGB pixels from 0 to 1, [N, height, width, 3]."""
  low, high = float(images.min()), float(images.max())
  scaled = (images - low) / max(high - low, 1e-6)
  if scaled.shape[-1] == 1:
    scaled = np.repeat(scaled, 3, axis=-1)
  if scaled.ndim == 5:
    # A white line stands between neighbouring pictures.
    gap = np.ones((*scaled.shape[:3], 1, 3))
    parts = np.concatenate([scaled, gap], axis=3)
    n, k, height, width, _ = parts.shape
    beside = parts.transpose(0, 2, 1, 3, 4).reshape(n, height, k * width, 3)
    scaled = beside[:, :, :-1]
  return scaled


def _title(text: str) -> str:
  words = " ".join(text.split())
  broken = textwrap.fill(
    words, _LETTERS, break_long_words=False, break_on_hyphens=False
  )
  return broken.replace("$", r"\$")  # Matplotlib would set "$x$" as a formula.


def _add_boxes(axes: Any, shape: Sequence[int], boxes: Boxes) -> None:
  from matplotlib.patches import Rectangle

  height, width = shape[:2]
  for color, of_color in boxes.items():
    for top, left, bottom, right in of_color:
      # The first pixel reaches from -0.5 to 0.5.
      corner = left * width - 0.5, top * height - 0.5
      size = (right - left) * width, (bottom - top) * height
      axes.add_patch(Rectangle(corner, *size, fill=False, ec=color, lw=2))
