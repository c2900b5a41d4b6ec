"""Drawing with matplotlib."""

from bigtrain.tools.report import curves


def test_smoothing_keeps_level_and_length():
  assert curves.smooth([1.0] * 300) == [1.0] * 300
  noise = [float(i % 2) for i in range(1000)]
  assert all(0.4 < v < 0.6 for v in curves.smooth(noise)[50:-50])
  assert curves.smooth([3.0, 1.0]) == [3.0, 1.0]
