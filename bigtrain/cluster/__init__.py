"""The processes of a run: signals, how they join and talk, watchdog, lease.

Open process.py first. Other packages import only it, watchdog.py, lease.py and
transfers.py. Behind process.py, launchers.py detects the job and this process's
place in it, and channel.py carries all messages, with hub.py as its end on
process 0.
"""
