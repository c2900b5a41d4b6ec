"""Pieces of HTML."""

from bigtrain.tools.report import markup


def test_text_is_escaped():
  table = markup.by_run(["<a>"], {"<b>": ["<c>"]})
  table += markup.details("<d>", {"<e>": "<f>"})
  for letter in "abcdef":
    assert f"&lt;{letter}&gt;" in table and f"<{letter}>" not in table
