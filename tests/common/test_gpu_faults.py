"""Errors of a GPU, in the words of TensorFlow, XLA and CUDA: one line each, and whether a restart
helps.
"""

import pytest
import tensorflow as tf

from common.gpu import faults
from common.system.errors import FAILED, HOPELESS, BadInput

CARD = "GPU GPU-5e1f (0000:01:00.0, NVIDIA H200)"
INTERNAL = tf.errors.InternalError


def said(error: Exception):
    return faults.told(error, CARD, "after step 7 of gpt", "; it goes on from step 5")


@pytest.mark.parametrize(
    "text",
    [
        "Failed to synchronize: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        "2 root error(s) found.\n  (0) INTERNAL: CUDA_ERROR_NVLINK_UNCORRECTABLE: nvlink",
        "cuDeviceGet: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "NVML: GPU is lost",
        "x" * 5000 + " CUDA_ERROR_DEVICE_UNAVAILABLE: busy or unavailable",
    ],
)
def test_a_lost_card_is_named_and_not_tried_again(text):
    error = said(INTERNAL(None, None, text))
    assert error.exit_code == HOPELESS
    message = str(error)
    assert message.startswith(f"{CARD} is lost, after step 7 of gpt: ")
    assert "Xid 79" in message
    assert message.endswith("; it goes on from step 5")
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize(
    "text",
    [
        "CUDA_ERROR_ASSERT: device-side assert triggered",
        "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
        "Failed to launch kernel: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
    ],
)
def test_a_spoilt_context_is_named_and_tried_again(text):
    error = said(INTERNAL(None, None, text))
    assert error.exit_code == FAILED
    assert text.split(":")[1] in str(error)
    assert str(error).startswith(f"{CARD} has given up this process's work")


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[32]\n"),
        INTERNAL(None, None, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB"),
        MemoryError(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_memory_that_ran_out_says_what_to_set(error):
    error = said(error)
    assert error.exit_code == HOPELESS
    assert str(error).startswith(f"out of memory on {CARD}, after step 7 of gpt")
    assert "train.recompute=true" in str(error)
    assert "\n" not in str(error)


def test_other_errors_stay_as_they_are():
    for error in (ZeroDivisionError("1/0"), BadInput("CUDA_ERROR_NO_DEVICE")):
        with pytest.raises(type(error)) as raised, faults.in_words(str, str):
            raise error
        assert raised.value is error
