"""XLA's flags: merged with the user's own, for GPUs alone, and all of them known to the TensorFlow
installed here.
"""

import subprocess
import sys

import pytest

from common.gpu.choose import CPU, Device
from common.gpu.xla_env import CACHE, cache_folder, xla_env
from tests.bench.step import ROWS

GPU = Device("gpu", "GPU-1", 1)
OWN = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"


def test_flags_are_added_to_the_users_own(tmp_path):
    env = xla_env({"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true --mine=1"}, GPU, tmp_path)
    assert env == {
        "XLA_FLAGS": (
            "--xla_gpu_enable_triton_gemm=true --mine=1 --xla_gpu_autotune_level=0"
            f' --xla_gpu_per_fusion_autotune_cache_dir="{tmp_path}"'
        ),
        CACHE: str(tmp_path),
    }
    assert xla_env({}, GPU) == {"XLA_FLAGS": OWN}


def test_a_longer_name_is_another_flag_and_a_cache_of_the_users_own_is_left_to_the_user(tmp_path):
    given = "--xla_gpu_enable_triton_gemm_int4=true -xla_gpu_per_fusion_autotune_cache_dir=/mine"
    assert xla_env({"XLA_FLAGS": given}, GPU, tmp_path) == {"XLA_FLAGS": f"{given} {OWN}"}


@pytest.mark.parametrize(
    ("device", "given"),
    [(CPU, {}), (CPU, {"XLA_FLAGS": "--mine=1"}), (GPU, {"XLA_FLAGS": "flags.txt"})],
)
def test_nothing_for_the_cpu_nor_beside_a_file_of_flags(device, given, tmp_path):
    assert xla_env(given, device, tmp_path) == {}


def test_a_cache_is_of_one_process_and_one_version(tmp_path):
    import tensorflow as tf

    a, b = cache_folder(tmp_path, "trainer"), cache_folder(tmp_path, "producer-0")
    assert a != b
    assert a == tmp_path / "cache" / "xla" / f"tensorflow-{tf.__version__}" / "trainer"


def test_this_tensorflow_knows_every_flag_and_determinism_needs_none(tmp_path):
    """One process with all flags that the launcher and the benchmark set: XLA ends it if one is
    unknown, and else notes their values.
    """
    code = (
        "import tensorflow as tf\n"
        "tf.config.experimental.enable_op_determinism()\n"
        "tf.function(lambda x: x + 1, jit_compile=True)(tf.ones([2]))\n"
    )
    cache, dump = tmp_path / 'a "run" \\ here', tmp_path / "dump"
    bench = " ".join(
        options["xla"]
        for options in ROWS.values()
        if "triton_gemm" not in options.get("xla", "triton_gemm")
    )
    env = {
        **xla_env({"XLA_FLAGS": f"--xla_dump_to={dump} {bench}"}, GPU, cache),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (noted,) = (p.read_text() for p in dump.glob("*.debug_options"))
    lines = noted.splitlines()
    assert "xla_gpu_enable_triton_gemm: false" in lines
    assert (
        f'xla_gpu_per_fusion_autotune_cache_dir: "{cache}"' in lines
    )  # as it is, and not as it had to be quoted
    assert "xla_gpu_deterministic_ops: true" in lines  # "…and disables autotuning", says XLA of it
