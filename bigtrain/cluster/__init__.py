"""The processes of a run: signals, the channel, launchers, watchdog, lease.

Open process.py first: it catches signals, defines the exit codes and joins
the job's other processes. watchdog.py ends a process that hangs; lease.py
allows one job at a time in a workdir; transfers.py sends files from host to
host. Other packages import these four only. The rest works behind process.py:
launchers.py detects the job, and channel.py with hub.py, its end on process 0,
carries all that the processes tell each other.
"""
