"""The rows of `tests.bench.step`: ways to compute a step, each with what it changes."""

from __future__ import annotations

# Options of a row: precision, `kernels` fields, other StepOptions fields, xla (flags), positions
# (of a row), torch, coqui (other programs).
_BF16 = {"precision": "bf16", "kernels": {}}


def _fast(**changed) -> dict:
    kernels = {
        "attention": "cudnn",
        "dropout": "hash",
        "lean": True,
        "embedding_grad": "scatter",
        "split_qkv": True,
    }
    kernels |= {"long_sums": True, "wide_residual": True}
    return {"precision": "bf16", "kernels": {**kernels, **changed}, "attention_dropout": 0.0}


_TRITON_FUSIONS = "--xla_gpu_experimental_enable_fusion_block_level_rewriter=true"
_LT = "--xla_gpu_enable_cublaslt=true"
_LT_LAUNCHED = f"{_LT} --xla_gpu_enable_command_buffer=-CUBLASLT"

ROWS: dict[str, dict] = {
    "ours": _fast(),
    "ours, short sums": _fast(long_sums=False),
    "ours, weight copies": _fast(weight_copies=True),
    "ours, narrow residual": _fast(wide_residual=False),
    "ours, joint qkv": _fast(split_qkv=False),
    "fp32 plain": {"precision": "fp32", "kernels": {}},
    "tf32 plain": {"precision": "tf32", "kernels": {}},
    "bf16 plain": _BF16,
    "bf16 plain, no attention dropout": {**_BF16, "attention_dropout": 0.0},
    "bf16 plain, hash dropout": {**_BF16, "kernels": {"dropout": "hash"}},
    "bf16 fused": {**_BF16, "kernels": {"attention": "cudnn"}, "attention_dropout": 0.0},
    "ours, stateless dropout": _fast(dropout="stateless"),
    "ours, no dropout": {**_fast(), "dropout": 0.0},
    "ours, plain attention": _fast(attention="plain"),
    "ours, attention dropout": {**_fast(), "attention_dropout": None},
    "ours, not lean": _fast(lean=False),
    "ours, embedding by matmul": _fast(embedding_grad="matmul"),
    "ours, micro and apply": {**_fast(), "grouped": True},
    "ours, recompute": {**_fast(), "recompute": True},
    "ours, triton gemm": {**_fast(), "xla": "--xla_gpu_enable_triton_gemm=true"},
    "ours, parallel llvm": {
        **_fast(),
        "xla": "--xla_gpu_enable_llvm_module_compilation_parallelism=true",
    },
    "ours, no command buffers": {**_fast(), "xla": "--xla_gpu_enable_command_buffer="},
    "ours, latency hiding": {**_fast(), "xla": "--xla_gpu_enable_latency_hiding_scheduler=true"},
    "ours, cublaslt": {**_fast(), "xla": _LT},
    "ours, cublaslt, weight copies": {**_fast(weight_copies=True), "xla": _LT},
    "ours, cublaslt outside graphs": {**_fast(), "xla": _LT_LAUNCHED},
    "ours, cublaslt outside graphs, weight copies": {
        **_fast(weight_copies=True),
        "xla": _LT_LAUNCHED,
    },
    "fp32 plain, cublaslt": {"precision": "fp32", "kernels": {}, "xla": _LT},
    "fp32 plain, cublaslt outside graphs": {
        "precision": "fp32",
        "kernels": {},
        "xla": _LT_LAUNCHED,
    },
    "tf32 plain, cublaslt outside graphs": {
        "precision": "tf32",
        "kernels": {},
        "xla": _LT_LAUNCHED,
    },
    "ours, wide loads": {**_fast(), "xla": "--xla_gpu_experimental_allow_unroll_factor_eight=true"},
    "ours, triton fusions of several outputs": {
        **_fast(),
        "xla": f"{_TRITON_FUSIONS} --xla_gpu_unsupported_enable_triton_multi_output_fusion=true",
    },
    "ours, 408 positions": {**_fast(), "positions": 408},
    "ours, 416 positions": {**_fast(), "positions": 416},
    "ours, 448 positions": {**_fast(), "positions": 448},
    "ours, triton fusions": {**_fast(), "xla": _TRITON_FUSIONS},
    "ours, cudnn gemm fusions": {**_fast(), "xla": "--xla_gpu_cudnn_gemm_fusion_level=2"},
    "ours, dynamic slices": {**_fast(), "xla": "--xla_gpu_enable_dynamic_slice_fusion=true"},
    "ours, cold cache": {**_fast(), "cache": "cold"},
    "ours, warm cache": {**_fast(), "cache": "warm"},
    "ours, warm autotuning": {**_fast(), "cache": "autotuning"},
    "ours, saving": {**_fast(), "save": True},
    "ours, autotuned": {**_fast(), "xla": "--xla_gpu_autotune_level=4"},
    "ours, autotune level 2": {**_fast(), "xla": "--xla_gpu_autotune_level=2"},
    "ours, fusions not autotuned": {
        **_fast(),
        "xla": "--xla_gpu_experimental_enable_fusion_autotuner=false",
    },
    "ours, parallel compilation": {
        **_fast(),
        "xla": (
            "--xla_gpu_enable_llvm_module_compilation_parallelism=true"
            " --xla_gpu_force_compilation_parallelism=8"
        ),
    },
    "torch": {"torch": {"compile": True}},
    "torch eager": {"torch": {"compile": False}},
    "torch, attention dropout": {"torch": {"compile": True, "attention_dropout": 0.1}},
    "coqui fp32": {"coqui": "fp32"},
    "coqui tf32": {"coqui": "tf32"},
    "coqui bf16": {"coqui": "bf16"},
    "gemm ceiling": {"ceiling": True},
}
