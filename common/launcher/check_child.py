"""`python -m common.launcher.check_child ROLE`: what TensorFlow finds on the device of this
process's environment, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys

from common.gpu.choose import DEVICE
from common.system.errors import BAD_INPUT, OK, BadInput


def say(ok: bool, what: str, detail: str, advice: str = "") -> None:
    """Print one finding (`common.launcher.check.Finding`)."""
    sys.stdout.write(
        json.dumps({"ok": ok, "what": what, "detail": detail, "advice": advice}) + "\n"
    )
    sys.stdout.flush()


def main(role: str) -> int:
    """Report versions, then the device; return the exit code."""
    expected = os.environ.get(DEVICE, "cpu")
    try:
        from common.gpu.device import import_tensorflow, prove_device, versions

        tf = import_tensorflow()
    except ImportError as e:
        say(
            False,
            f"{role} versions",
            f"TensorFlow cannot be imported: {e}",
            "pip install 'tensorflow[and-cuda]' (GPU) or tensorflow-cpu",
        )
        return BAD_INPUT
    found = versions(tf)
    say(
        True,
        f"{role} versions",
        (
            ", ".join(f"{k} {v}" for k, v in found.items())
            if expected == "gpu"
            else f"tensorflow {tf.__version__}"
        ),
    )
    try:
        info = prove_device(expected)
    except BadInput as e:
        say(False, f"{role} device", str(e))
        return BAD_INPUT
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if (
        expected == "gpu"
        and asked.startswith(("GPU-", "MIG-"))
        and info.uuid
        and not info.uuid.startswith(asked)
    ):
        say(
            False,
            f"{role} device",
            f"got {info.uuid}, asked for {asked}",
            "unset CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER",
        )
        return BAD_INPUT
    count = "exactly one GPU, " if expected == "gpu" else ""
    say(
        True, f"{role} device", f"{count}{info.label}: a matrix product and a convolution are right"
    )
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "this"))
