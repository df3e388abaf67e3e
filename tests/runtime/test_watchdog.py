import subprocess
import time

import tiny

HANGING = """
import sys, threading
from pma_jax.cli import main
from pma_jax.runtime import watchdog
watchdog.GRACE_SECONDS = 0.3
threading.Thread(target=threading.Event().wait).start()
sys.exit(main())
"""


def test_failed_command_ends_although_a_thread_waits_forever(tmp_path):
    began = time.monotonic()
    command = tiny.python(HANGING, "merge", tmp_path / "absent", "--out", tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert time.monotonic() - began < 40
