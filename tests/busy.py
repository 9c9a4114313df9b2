"""The same program on the machine as it is, and as on a busy one."""

import contextlib
import io
import signal
import subprocess
import sys

_RUNS_S, _WAITS_S = 0.05, 0.1
_IMPORTS = """
import autosac, torch._dynamo
autosac.profile, autosac.plan
print("ready", flush=True)
"""


def alone_and_in_turns(code):
    """What a program prints here, and in a process that has one turn of three.

    Clocks go on while it waits for its turn, which is all that it notices of others.
    There are none: waiting takes nothing from the tests that run meanwhile.
    """
    with contextlib.redirect_stdout(io.StringIO()) as alone:
        exec(code, {})
    command = [sys.executable, "-c", _IMPORTS + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            while process.poll() is None:
                _wait(process, _RUNS_S)
                process.send_signal(signal.SIGSTOP)
                _wait(process, _WAITS_S)
                process.send_signal(signal.SIGCONT)
            assert process.returncode == 0
            return alone.getvalue(), process.stdout.read()
        finally:
            process.kill()


def _wait(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
