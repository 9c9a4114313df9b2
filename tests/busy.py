"""The same program on the machine as it is, and beside busy loops."""

import subprocess
import sys

_NUM_LOOPS = 4


def alone_and_beside_loops(code):
    """What a program prints, both times."""

    def printed():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    alone = printed().stdout
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(_NUM_LOOPS)
    ]
    try:
        return alone, printed().stdout
    finally:
        for process in loops:
            process.kill()
            process.wait()
