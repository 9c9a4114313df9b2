"""The same program on the machine as it is, and as on a busy one."""

import contextlib
import signal
import subprocess
import sys

_RUNS_S, _WAITS_S = 0.05, 0.1


def alone_and_in_turns(code):
    """What a program prints on its own, and where others take two turns of three.

    Clocks go on while it waits for its turn, which is all that it notices of the
    others. There are none: waiting takes nothing from the tests that run meanwhile.
    """
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None:
                _wait(process, _RUNS_S)
                process.send_signal(signal.SIGSTOP)
                _wait(process, _WAITS_S)
                process.send_signal(signal.SIGCONT)
            assert process.returncode == 0
            return alone, process.stdout.read()
        finally:
            process.kill()


def _wait(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
