"""The processes of a run: signals, launchers, rendezvous, watchdog, lease.

Open process.py first: it catches signals, defines the exit codes and joins
the job's other processes. watchdog.py ends a process that hangs; lease.py
allows one job at a time in a workdir. Other packages import these three only.
The rest works behind process.py: launchers.py detects the job, rendezvous.py
waits until all its processes are up, and connection.py and hub.py are the two
ends of the connections that keep them together while they run.
"""
