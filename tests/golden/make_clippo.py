"""Makes clippo.npz: pictures of text by big_vision's render_unifont.

  PYTHONPATH=big_vision python tests/golden/make_clippo.py

PYTHONPATH needs a checkout of github.com/google-research/big_vision; commit
0127fb6 made the file. The font is made up: `font` draws the same one for
tests/pp/test_ops_render.py.
"""

import os
import pathlib
import tempfile

import numpy as np

GOLDEN = pathlib.Path(__file__).parent
NEEDS = ("big_vision", "tensorflow")
SIZES = (64, 100)
TEXTS = (
  "A photo of a cat.",
  "A Much longer text, which has no room in a picture of 64 pixels: " * 3,
  "x",
  "\u00c9tude \u4e16\u754c \U0001f600 \u0416!",
  "un\u2603known",  # A character that the font lacks.
  "    ",
)
_WIDE = "\u00c9\u4e16\u754c\u0416W"


def font() -> tuple[str, str]:
  """Lines of a font in GNU Unifont's format: of four, and of six digits."""
  rng = np.random.RandomState(0)
  glyph = lambda wide: "".join(
    f"{row & rng.randint(256) & mask:02X}" + ("" if not wide else f"{row:02X}")
    for row, mask in zip(rng.randint(0, 256, 16), [rng.randint(256)] * 16)
  )
  characters = [chr(n) for n in range(33, 127)] + sorted(set(_WIDE) - {"W"})
  lines = [f"{ord(c):04X}:{glyph(c in _WIDE)}\n" for c in characters]
  space = f"0020:{'00' * 16}\n"
  return space + "".join(lines), f"01F600:{glyph(True)}\n"


def write(golden: pathlib.Path = GOLDEN) -> None:
  with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    fonts = pathlib.Path("big_vision/pp/proj/clippo")
    fonts.mkdir(parents=True)
    lower, upper = font()
    (fonts / "unifont-9.0.06.hex").write_text(lower)
    (fonts / "unifont_upper-9.0.06.hex").write_text(upper)
    from big_vision.pp.proj.clippo import pp_ops

    arrays = {}
    for size in SIZES:
      render = pp_ops.get_pp_render_text(image_size=size)
      for i, text in enumerate(TEXTS):
        arrays[f"{size}/{i}"] = render({"texts": text})["image"].numpy()
  np.savez_compressed(golden / "clippo.npz", **arrays)


if __name__ == "__main__":
  write()
