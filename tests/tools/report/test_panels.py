"""The choice of curves."""

from support.written_runs import write_run

from bigtrain.tools.report import panels, report


def test_panels_of_one_run(tmp_path):
  runs = report.read([write_run(tmp_path / "a", evals=("val", "test"))])
  by_name = {panel.name: panel for panel in panels.panels(runs)}
  assert list(by_name) == [
    "loss",
    "eval_acc",
    "accuracy",
    "lr",
    "grad_norm",
    "examples_per_sec",
    "mfu",
  ]
  val, test = by_name["eval_acc"].series
  assert (val.label, test.label) == ("val/acc", "test/acc")
  assert val.color != test.color
  assert val.steps == [100, 200, 300, 400]
  assert val.values == [0.2, 0.4, 0.6, 0.8]
  (mfu,) = by_name["mfu"].series
  assert by_name["mfu"].unit == "% of peak" and set(mfu.values) == {50.0}
  assert by_name["lr"].series[0].label == ""  # A single curve needs no legend.


def test_colors_distinguish_two_runs(tmp_path):
  runs = report.read(
    [
      write_run(tmp_path / "a", evals=("val", "test")),
      write_run(tmp_path / "b", lr=2e-3, evals=("val",)),
    ]
  )
  by_name = {panel.name: panel for panel in panels.panels(runs)}
  labels = [(s.label, s.color, s.line) for s in by_name["eval_acc"].series]
  blue, orange = panels.COLORS[:2]
  assert labels == [
    ("a val/acc", blue, "-"),
    ("a test/acc", blue, "--"),
    ("b val/acc", orange, "-"),
  ]
  assert [s.color for s in by_name["loss"].series] == [blue, orange]


def test_learning_rates_of_groups_share_a_panel():
  rows = [{"step": 1, "lr/head": 1e-3, "lr/body": 1e-4, "lr": 1.0}]
  run = panels.Run("a", {}, {}, rows)
  (panel,) = panels.panels([run])
  assert [s.label for s in panel.series] == ["lr", "lr/head", "lr/body"]
  assert panels.results([run]) == []


def test_results_are_the_evaluations_of_the_config():
  rows = [{"step": 1, "val/acc": 1.0, "train/x": 2.0, "account/step_secs": 1.0}]
  named = panels.Run("a", {"evals": {"val": {}}}, {}, rows)
  assert panels.results([named]) == ["val/acc"]
  assert panels.results([named._replace(config={})]) == ["val/acc", "train/x"]


def experts(**values):
  return [
    {"step": step, **{f"experts/{name}": x for name, x in values.items()}}
    for step in (1, 2)
  ]


def test_the_balance_of_experts_is_a_panel():
  rows = experts(peak_0=1.5, peak_1=1.2, peak_max=1.5, peak_layer=0, dropped=0)
  rows = [row | {"expert_load/0": 0.5} for row in rows]
  run = panels.Run("a", {}, {}, rows)
  (panel,) = panels.panels([run])  # Nothing is dropped, and nothing evaluated.
  assert [s.label for s in panel.series] == ["experts/peak_0", "experts/peak_1"]
  assert panel.title == "Load of the busiest expert"
  # Of several runs, each has one curve; and so have many layers.
  (panel,) = panels.panels([run, run._replace(name="b")])
  assert [s.label for s in panel.series] == ["a", "b"]
  assert panel.series[0].values == [1.5, 1.5]
  many = experts(peak_max=3.0, **{f"peak_{i}": 2.0 for i in range(20)})
  (panel,) = panels.panels([panels.Run("a", {}, {}, many)])
  assert [s.values for s in panel.series] == [[3.0, 3.0]]


def test_both_stacks_of_a_t5_have_a_balance():
  rows = experts(peak_encoder_0=1.0, peak_decoder_0=1.1, left_behind=0.25)
  balance, lost = panels.panels([panels.Run("a", {}, {}, rows)])
  assert len(balance.series) == 2
  assert lost.series[0].values == [25.0, 25.0]
