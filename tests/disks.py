"""Small disks to fill; only root can mount them."""

import subprocess


def mount(folder, size, *options):
  """Whether a disk of this size could be mounted at the folder."""
  options = ",".join([*options, f"size={size}"])
  command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
  return not subprocess.call(command, stderr=subprocess.DEVNULL)


def unmount(folder):
  """Takes it away, now or when nobody looks into it any more.

  Whatever walks through the files of a machine may do so at any moment, and
  is no fault of the program that has ended.
  """
  subprocess.check_call(["umount", "--lazy", str(folder)])
