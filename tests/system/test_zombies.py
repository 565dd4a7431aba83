"""What a producer started and left behind: the launcher of a container, whose first process it is,
takes its exit code.
"""

import subprocess
import sys

from tests.support.chaos import ROOT

# A child that leaves a grandchild behind; both end; only the child's code is for its owner.
CODE = """
import ctypes, subprocess, sys, time
import psutil
from common.launcher.child import reap_strays
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as a container's first process is
script = "import subprocess, sys; p = subprocess.Popen(['sleep', '0.2']); print(p.pid); sys.exit(7)"
child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
stray = psutil.Process(int(child.stdout.readline()))
deadline = time.monotonic() + 100
while stray.status() != psutil.STATUS_ZOMBIE or psutil.Process(child.pid).status() != "zombie":
    assert time.monotonic() < deadline
    time.sleep(0.01)
for _ in range(3):  # once for each that has ended, whichever the kernel names first
    reap_strays({child.pid})
    if child.returncode is None and not psutil.pid_exists(stray.pid):
        break
    child.poll()
assert child.wait() == 7, child.returncode
reap_strays({child.pid})
assert not psutil.pid_exists(stray.pid), "still a zombie"
"""


def test_strays_are_reaped_and_a_childs_exit_code_stays_its_owners():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
