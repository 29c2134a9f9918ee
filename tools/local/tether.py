"""Ties a command to the process that starts it: `python tether.py PARENT_PID COMMAND...` executes COMMAND.

The kernel kills the command when its parent ends in any way, so that a killed launcher leaves no process behind. This
is a separate script, because Python code between fork and exec is not safe in a process with threads. It uses only the
standard library, because it is started with `-I -S`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_COMMAND_NOT_RUN = 127


def tie(parent_pid: int) -> None:
    """Tie this process to its parent: it is killed when the parent ends. Exits if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone")


def main(parent_pid: int, command: list[str]) -> None:
    tie(parent_pid)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_COMMAND_NOT_RUN)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
