"""What a run reports: rows of metrics, progress, time, FLOPs and its setup.

Open writers.py first: it writes metrics.jsonl (rows.py), the files beside it
(media.py), TensorBoard (loggers.py), W&B, MLflow, trackio (trackers.py) and the
console (console.py). chrono.py accounts for time, flops.py counts model FLOPs,
record.py writes config.json and run.json, and ending.py has a run's last lines.
main, runtime, the tools and some evaluators import this package.
"""
