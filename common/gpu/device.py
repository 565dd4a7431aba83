"""The child's side of a GPU: takes the one device that the environment gives, limits its memory,
and proves it with real operations.

`prove_device` imports TensorFlow; the launcher never calls it.
"""

from __future__ import annotations

import ctypes
import glob
import logging
import os
import site
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.gpu.choose import DEVICE, MEMORY_LIMIT
from common.gpu.listing import list_gpus
from common.gpu.memory import Context, cuda_identity, limit_mb, open_context
from common.gpu.xla_env import CACHE
from common.system.errors import BadInput, is_out_of_memory

log = logging.getLogger("device")

# The libraries that TensorFlow's GPU build loads, by their CUDA 12 names.
_LIBRARIES = {
    "libcuda.so.1": "the NVIDIA driver",
    "libcudart.so.12": "nvidia-cuda-runtime-cu12",
    "libcublas.so.12": "nvidia-cublas-cu12",
    "libcublasLt.so.12": "nvidia-cublas-cu12",
    "libcufft.so.11": "nvidia-cufft-cu12",
    "libcusolver.so.11": "nvidia-cusolver-cu12",
    "libcusparse.so.12": "nvidia-cusparse-cu12",
    "libcudnn.so.9": "nvidia-cudnn-cu12",
}

# Keras and TensorFlow Lite import these if they are installed, for wrappers, plots and conversions
# that nothing here uses: a third of TensorFlow's import time.
_NOT_NEEDED = ("sklearn", "pandas", "matplotlib", "jax")


@dataclass(frozen=True)
class DeviceInfo:
    """The proven device.

    `name` is TensorFlow's ("/device:GPU:0"), `uuid` and `bus_id` are empty on the CPU.
    """

    kind: str
    name: str
    label: str
    uuid: str = ""
    bus_id: str = ""
    memory_limit_mb: int | None = None
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.label


def import_tensorflow():
    """Import TensorFlow without Keras's extras; call it for a process's first import of TensorFlow.

    ImportError as from `import tensorflow`.
    """
    with absent(_NOT_NEEDED):
        import tensorflow as tf
    return tf


@contextmanager
def absent(names: tuple[str, ...]) -> Iterator[None]:
    """Hide top-level packages while inside, as if not installed; loaded ones stay."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def prove_device(
    expected: str | None = None,
    memory_limit_mb: int | None = None,
    *,
    intra_threads: int = 0,
    inter_threads: int = 0,
    whole_card: bool = False,
    join: Callable[[], None] = lambda: None,
) -> DeviceInfo:
    """Set TensorFlow up on this process's one device and run a matrix product and a convolution
    there. Call once, first.

    Args:
        expected: "gpu" or "cpu"; None: as the launcher's environment says, "cpu" without one.
        memory_limit_mb: hard limit; None: the environment's, else memory grows as needed. Reduced
        if the driver takes more than the launcher left for it (`common.gpu.memory`).
        whole_card: nothing else of this run uses the card, so a small one may be taken whole at
        once.
        intra_threads, inter_threads: TensorFlow's CPU threads; 0 leaves its default.
        join: called once TensorFlow is configured, before its first operation.

    Raises:
        BadInput: not exactly one GPU, or it cannot compute; the message names the library at fault
            and the versions.
    """
    expected = expected or os.environ.get(DEVICE, "cpu")
    if memory_limit_mb is None and os.environ.get(MEMORY_LIMIT):
        memory_limit_mb = int(os.environ[MEMORY_LIMIT])
    if expected == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # The driver takes its seconds while Python takes its own.
    opening = None if expected == "cpu" else ThreadPoolExecutor(1).submit(open_context)
    try:
        tf = import_tensorflow()
    except ImportError as e:
        raise BadInput(
            f"TensorFlow cannot be imported: {e}; install it with pip install"
            " 'tensorflow[and-cuda]' or tensorflow-cpu"
        ) from e
    if intra_threads:
        tf.config.threading.set_intra_op_parallelism_threads(intra_threads)
    if inter_threads:
        tf.config.threading.set_inter_op_parallelism_threads(inter_threads)
    if opening is None:
        tf.config.set_visible_devices([], "GPU")
        join()
        _compute(tf, "/device:CPU:0")
        return DeviceInfo("cpu", "/device:CPU:0", "CPU")
    context = opening.result()
    info = _prove_gpu(tf, context, limit_mb(memory_limit_mb, context, whole_card), join)
    log.info("computing on %s", info.label)
    return info


def _prove_gpu(
    tf, context: Context | None, memory_limit_mb: int | None, join: Callable[[], None]
) -> DeviceInfo:
    gpus = tf.config.list_physical_devices("GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if CACHE in os.environ:
        Path(os.environ[CACHE]).mkdir(parents=True, exist_ok=True)
    if len(gpus) != 1:
        why = (
            f"TensorFlow {tf.__version__} sees {len(gpus)} GPUs with"
            f" CUDA_VISIBLE_DEVICES={visible}, expected exactly 1"
        )
        raise BadInput(why if gpus else f"{why}: {diagnose(tf)}")
    if memory_limit_mb:
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit_mb)]
        )
    elif os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "true").lower() != "false":
        tf.config.experimental.set_memory_growth(gpus[0], True)
    details = tf.config.experimental.get_device_details(gpus[0])
    join()
    try:
        _compute(tf, "/device:GPU:0")
    except tf.errors.OpError as e:
        raise BadInput(_refusal(visible, e, lambda: diagnose(tf))) from e
    uuid, bus_id = _identify(visible)
    name = details.get("device_name", "GPU")
    label = f"GPU {uuid or visible} ({bus_id or 'bus id unknown'}, {name}" + (
        f", at most {memory_limit_mb} MB)" if memory_limit_mb else ")"
    )
    if context is not None:
        log.info(
            "the driver's context takes %d MB, %d MB are free; TensorFlow %s",
            context.took_mb,
            context.free_mb,
            f"gets {memory_limit_mb} MB" if memory_limit_mb else "takes what it needs",
        )
    return DeviceInfo(
        "gpu",
        "/device:GPU:0",
        label,
        uuid,
        bus_id,
        memory_limit_mb,
        details.get("compute_capability"),
    )


def _refusal(visible: str | None, error: Exception, diagnosis: Callable[[], str]) -> str:
    said = str(error).splitlines()[0]
    if is_out_of_memory(error):
        return (
            f"the GPU {visible} is full: {said}; `nvidia-smi` lists what holds its memory: end"
            " that, or choose another GPU"
        )
    return f"the GPU {visible} cannot compute: {said}; {diagnosis()}"


def _compute(tf, device: str) -> None:
    """Compute a 64 x 64 product of ones and a 3 x 3 box filter, whose answers are known."""
    with tf.device(device):
        product = tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64]))
        image = tf.nn.conv2d(tf.ones([1, 8, 8, 4]), tf.ones([3, 3, 4, 2]), 1, "VALID")
        if (
            float(tf.reduce_max(tf.abs(product - 64.0))) > 1e-3
            or float(tf.reduce_max(tf.abs(image - 36.0))) > 1e-3
        ):
            raise BadInput(
                f"{device} computes wrong numbers (a product of ones, a box filter): check the"
                " hardware and the driver"
            )


def _identify(visible: str | None) -> tuple[str, str]:
    """(UUID, bus id) of the GPU in use, from the driver, completed by NVML."""
    bare = cuda_identity()
    for gpu in list_gpus().gpus:
        if (bare and gpu.uuid.endswith(bare)) or (visible and gpu.uuid == visible):
            return gpu.uuid, gpu.bus_id
    return (f"GPU-{bare}", "") if bare else ("", "")


def versions(tf) -> dict[str, str]:
    """Versions of TensorFlow and of the CUDA libraries, both those built for and those found."""
    build = tf.sysconfig.get_build_info()
    found = {
        "tensorflow": tf.__version__,
        "built for CUDA": build.get("cuda_version", "none (CPU build)"),
    }
    found["built for cuDNN"] = str(build.get("cudnn_version", "none (CPU build)"))
    found["CUDA runtime found"] = _runtime_version() or "none"
    found["cuDNN found"] = cudnn_version() or "none"
    return found


def _runtime_version() -> str:
    lib = _load("libcudart.so.12")
    number = ctypes.c_int()
    if lib is None or lib.cudaRuntimeGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def cudnn_version() -> str:
    """Version of the cuDNN that this process loads; "" if there is none."""
    lib = _load("libcudnn.so.9")
    if lib is None:
        return ""
    lib.cudnnGetVersion.restype = ctypes.c_size_t
    n = lib.cudnnGetVersion()
    return f"{n // 10000}.{n % 10000 // 100}.{n % 100}"


def diagnose(tf) -> str:
    """Why no GPU can be used: the CPU build, libraries that do not load, or versions that do not
    match.
    """
    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return (
            "this TensorFlow is the CPU build; install the GPU one: pip uninstall tensorflow-cpu;"
            " pip install 'tensorflow[and-cuda]'"
        )
    missing = [f"{name} ({package})" for name, package in _LIBRARIES.items() if _load(name) is None]
    if missing:
        return (
            f"cannot load {', '.join(missing)}; pip install 'tensorflow[and-cuda]', and no other"
            " CUDA first in LD_LIBRARY_PATH"
        )
    v = versions(tf)
    return (
        "the libraries load; "
        + ", ".join(f"{k} {x}" for k, x in v.items())
        + "; compare with the driver in `nvidia-smi`"
    )


def _load(name: str) -> ctypes.CDLL | None:
    """A library by name, as the process finds it, else from the nvidia wheels, where TensorFlow
    looks too.
    """
    places = [name]
    for root in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ):
        places += glob.glob(os.path.join(root, "nvidia", "*", "lib", name)) if root else []
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None
