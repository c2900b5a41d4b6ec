"""What a run reports: rows of metrics, progress, time, FLOPs and its setup.

Open writers.py first: it writes metrics.jsonl (rows.py), the images, texts and
histograms beside it (media.py), TensorBoard (loggers.py), W&B, MLflow, trackio
(trackers.py) and the console (console.py). chrono.py accounts for time and
measures throughput, flops.py counts model FLOPs, record.py writes config.json
and run.json, and ending.py has the last lines that a run prints. main, runtime,
the tools, and evaluators that return images or texts import this package.
"""
