"""Masks in texts, in PaliGemma's format (Beyer et al. 2024, arXiv 2407.07726).

  <loc0341><loc0085><loc0938><loc0426><seg004>...<seg127> cat ; <loc...> dog

A box, as in box_texts.py, followed by 16 codes of the mask inside the box; see
pp/mask_codes.py.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from bigtrain.text import box_texts

NUM_CODES = 16  # Of a mask.
VOCABULARY = 128  # Number of different codes.
_CODES = re.compile(rf"\s*((?:<seg\d{{3}}>){{{NUM_CODES}}})(?!<seg)")


class Mask(NamedTuple):
  """A mask inside a box, as codes."""

  box: box_texts.Box
  codes: tuple[int, ...]


def spell(box: box_texts.Box, codes: Sequence[int]) -> str:
  """The text of a mask, with the label of its box."""
  text = "".join(f"<seg{code:03d}>" for code in codes)
  return f"{box_texts.spell(box[:4])}{text} {box.label}".rstrip()


def read(text: str) -> list[Mask | None]:
  """Returns the masks of a text; None for a box without 16 valid codes."""
  result: list[Mask | None] = []
  for box, after in box_texts.read_with_rest(text):
    match = _CODES.match(after)
    codes = [int(x) for x in re.findall(r"\d{3}", match[1])] if match else []
    if match is None or max(codes) >= VOCABULARY:
      result.append(None)
      continue
    label = after[match.end() :].split(";")[0].split("<")[0].strip()
    result.append(Mask(box._replace(label=label), tuple(codes)))
  return result
