"""The op that draws text, for models that read only pixels (CLIPPO)."""

import functools

import numpy as np

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.files import paths
from bigtrain.pp import registry
from bigtrain.pp.ops_text import on_texts
from bigtrain.pp.registry import Op

_SIDE = 16  # Height of a line, in pixels.
_MIN_WIDTH = 4  # Of a character.
_SPACING = 1  # Empty columns on each side of a character.
_MAX_CHARS = 768
_BACKGROUND = 127


@registry.register("render_text")
def render_text(
  size: int,
  font: str = "/usr/share/unifont/unifont.hex",
  key: str = "text",
  key_result: str | None = "labels",
) -> Op:
  """Draws lower-case text, black on grey: uint8 [..., size, size, 3].

  The pictures are those of CLIPPO, https://arxiv.org/abs/2212.08045. Characters
  that the font lacks are blank, and text for which there is no room is cut.

  Args:
    font: file of GNU Unifont, in Debian's package unifont.
  """
  check_number("argument 'size'", size, least=2 * _SIDE, whole=True)
  glyphs = _glyphs(font)
  blank = np.zeros((_SIDE, _MIN_WIDTH), bool)

  def picture(text: str) -> np.ndarray:
    text = text.encode().lower().decode()  # Only ASCII, as in CLIPPO.
    letters = [glyphs.get(ord(c), blank) for c in text[:_MAX_CHARS]] or [blank]
    widths = [letter.shape[1] for letter in letters]
    line_of_letter = np.cumsum(widths) // (size - max(widths))
    ink = np.zeros((size + _SIDE, size), bool)
    for line in range(min(line_of_letter[-1], size // _SIDE) + 1):
      own = [x for x, n in zip(letters, line_of_letter) if n == line]
      row = np.concatenate([blank[:, :0], *own], axis=1)
      ink[line * _SIDE : (line + 1) * _SIDE, : row.shape[1]] = row
    grey = np.where(ink[:size, :, None], 0, _BACKGROUND).astype(np.uint8)
    return grey.repeat(3, axis=2)

  shape = (size, size, 3)
  return on_texts(picture, "render_text", key, key_result, "uint8", shape)


@functools.cache
def _glyphs(font: str) -> dict[int, np.ndarray]:
  """Returns {character: pixels [16, width]}, cut to the inked columns."""
  result = {}
  try:
    with open(paths.absolute(font)) as file:
      for character, bits in (line.strip().split(":") for line in file):
        packed = np.frombuffer(bytes.fromhex(bits), np.uint8)
        pixels = np.unpackbits(packed).reshape(_SIDE, -1).astype(bool)
        pixels = np.pad(pixels, ((0, 0), (0, _SIDE - pixels.shape[1])))
        inked = [*np.nonzero(pixels.any(axis=0))[0]] or [0]
        first = max(inked[0] - _SPACING, 0)
        last = max(inked[-1] + _SPACING, first + _MIN_WIDTH)
        result[int(character, 16)] = pixels[:, first:last]
  except (OSError, ValueError) as e:
    hint = "expected unifont.hex of GNU Unifont (apt-get install unifont)"
    raise ConfigError(f"argument 'font': {hint}, got {font!r}: {e}.") from e
  return result
