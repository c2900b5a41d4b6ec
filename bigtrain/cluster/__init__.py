"""The processes of a run: signals, how they join and talk, watchdog, lease.

Open process.py first. Other packages import only process.py, watchdog.py,
lease.py and transfers.py. process.py uses launchers.py, which detects the job
and this process's place in it, and channel.py, which carries all messages
between processes; hub.py is the end of the channel on process 0.
"""
