"""What a run reports: rows of metrics, progress, time, FLOPs and its setup.

Open row_log.py first: it takes the metrics of a step and hands the row to
writers.py, which writes metrics.jsonl (rows.py), the images, texts and
histograms beside it (media.py), TensorBoard (loggers.py), W&B, MLflow, trackio
(trackers.py) and the console (console.py). chrono.py accounts for time and
measures throughput, flops.py counts model FLOPs, record.py writes config.json
and run.json, footprint.py measures the update's state and FLOPs, and ending.py
has the last lines that a run prints. main, the
tools, and evaluators that return images or texts import this package; apart
from row_log.py, which also feeds the hooks, its modules import only what lies
below: settings, lengths, trees, sharding and files.
"""
