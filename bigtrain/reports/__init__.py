"""What a run reports: log entries, dashboards, progress, time, FLOPs, setup.

Open writers.py first. It writes each log entry to metrics.jsonl
(log_entries.py), its images and tables to files (media.py), and passes it to
the loggers (loggers.py: tensorboard.py, trackers.py and users' metric writers)
and the console (console.py). chrono.py accounts for time, flops.py counts model
FLOPs, record.py writes config.json and run.json, which run_files.py reads
again, parameters.py the table of parameters, and ending.py the last lines of a
run. main, runtime, the tools and some evaluators import this package.
"""
