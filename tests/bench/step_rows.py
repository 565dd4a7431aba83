"""The rows of `tests.bench.step`: ways to compute a step, each with what it changes."""

from __future__ import annotations

ATTENTION = ("attention", "causal_attention")
LEAN = ("layer_norm", "group_norm", "gelu_tanh", "cross_entropy_sum", "class_tile")
LONG_SUMS = ("column_sum", "add_bias")

# Options of a row: precision, operations (which set, and the names of those that are of the other
# set), lever (of `step_levers`), fp8 (fields of `Fp8`), other StepOptions fields, xla (flags),
# switched (flags that XLA reads once it runs), positions (of a row), torch, coqui (other programs).
PLAIN = ("plain", ())
_BF16 = {"precision": "bf16", "operations": PLAIN}


def _fast(*plain: str) -> dict:
    return {"precision": "bf16", "operations": ("fast", plain), "attention_dropout": 0.0}


def _fp8(**options) -> dict:
    return {**_fast(), "precision": "fp8", "fp8": options}


def operations(options: dict):
    """The operations of a row, for `StepOptions`."""
    from common.xtts.fast_operations import FastOperations
    from common.xtts.operations import Operations, mixed
    from tests.bench.step_levers import LEVERS, switch_flags

    if "switched" in options:
        switch_flags(options["switched"])
    base, swapped = options["operations"]
    sets = (FastOperations, Operations) if base == "fast" else (Operations, FastOperations)
    chosen = mixed(*sets, *swapped)
    return (LEVERS[options["lever"]](chosen) if "lever" in options else chosen)()


def with_plain_attention(options: dict) -> dict:
    """The row, without the fused kernel."""
    base, swapped = options["operations"]
    without = {*swapped, *ATTENTION} if base == "fast" else {*swapped} - {*ATTENTION}
    return {**options, "operations": (base, tuple(sorted(without)))}


_TRITON_FUSIONS = "--xla_gpu_experimental_enable_fusion_block_level_rewriter=true"
_LT = "--xla_gpu_enable_cublaslt=true"
_LT_LAUNCHED = f"{_LT} --xla_gpu_enable_command_buffer=-CUBLASLT"

# Without XLA's pass that cuts a product's scratch space to what the chosen algorithm asks for. At
# run time the algorithm is looked up again (the first one in a list of one), and may ask for more.
_LT_WHOLE = f"{_LT} --xla_disable_hlo_passes=gemm-workspace-rewriter"

ROWS: dict[str, dict] = {
    "ours": _fast(),
    "ours fp8": _fp8(wgrad=True),
    "ours fp8 wgrad bf16": _fp8(),
    "ours fp8 forward": _fp8(dgrad=False),
    "ours fp8 mlp wgrad bf16": _fp8(products=("up", "down")),
    "ours, short sums": _fast(*LONG_SUMS),
    "ours, narrow residual": _fast("residual_dtype"),
    "ours, joint qkv": _fast("qkv"),
    "fp32 plain": {"precision": "fp32", "operations": PLAIN},
    "tf32 plain": {"precision": "tf32", "operations": PLAIN},
    "bf16 plain": _BF16,
    "bf16 plain, no attention dropout": {**_BF16, "attention_dropout": 0.0},
    "bf16 plain, hash dropout": {**_BF16, "operations": ("plain", ("dropout",))},
    "bf16 fused": {**_BF16, "operations": ("plain", ATTENTION), "attention_dropout": 0.0},
    "ours, stateless dropout": _fast("dropout"),
    "ours, no dropout": {**_fast(), "dropout": 0.0},
    "ours, plain attention": _fast(*ATTENTION),
    "ours, attention dropout": {**_fast(), "attention_dropout": None},
    "ours, not lean": _fast(*LEAN),
    "ours, embedding by matmul": _fast("lookup"),
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
    "ours, cublaslt outside graphs": {**_fast(), "xla": _LT_LAUNCHED},
    "fp32 plain, cublaslt": {"precision": "fp32", "operations": PLAIN, "xla": _LT},
    "fp32 plain, cublaslt outside graphs": {
        "precision": "fp32",
        "operations": PLAIN,
        "xla": _LT_LAUNCHED,
    },
    "tf32 plain, cublaslt outside graphs": {
        "precision": "tf32",
        "operations": PLAIN,
        "xla": _LT_LAUNCHED,
    },
    "ours, cublaslt switched": {**_fast(), "switched": _LT},
    "ours, cublaslt whole scratch": {**_fast(), "xla": _LT_WHOLE},
    "fp32 plain, cublaslt whole scratch": {
        "precision": "fp32",
        "operations": PLAIN,
        "xla": _LT_WHOLE,
    },
    "tf32 plain, cublaslt whole scratch": {
        "precision": "tf32",
        "operations": PLAIN,
        "xla": _LT_WHOLE,
    },
    "ours, cudnn norm": {**_fast(), "lever": "cudnn norm"},
    "ours, cudnn norm narrow": {**_fast(), "lever": "cudnn norm narrow"},
    "ours, cudnn norm forward": {**_fast(), "lever": "cudnn norm forward"},
    "ours, cudnn norm backward": {**_fast(), "lever": "cudnn norm backward"},
    "ours, plain norm": _fast("layer_norm"),
    "ours, cudnn norm by flag": {
        **_fast("layer_norm"),
        "xla": "--xla_gpu_enable_cudnn_layer_norm=true",
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
