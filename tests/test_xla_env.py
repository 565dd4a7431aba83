from common.xla_env import xla_env


def test_flags_are_added_to_the_users_own(tmp_path):
    cache = tmp_path / "a" / "xla"
    flags = xla_env({"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true --mine=1"}, deterministic=True, cache=cache)["XLA_FLAGS"].split()
    assert flags == [
        "--xla_gpu_enable_triton_gemm=true",
        "--mine=1",
        "--xla_gpu_exclude_nondeterministic_ops=true",
        f"--xla_gpu_per_fusion_autotune_cache_dir={cache}",
    ]
    assert cache.is_dir()
    assert xla_env({}) == {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
