"""`launch.py check` fails where it should, and says what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap

import pytest

import launch
import tests.support.arithmetic  # noqa: F401 - registers the size
from common.gpu import device
from common.gpu.choose import CPU, Device
from common.gpu.listing import Gpu, Listing
from common.gpu.memory import Account, Context, limit_mb
from common.launcher import check
from common.run import settings
from common.system.errors import BadInput, Stopped

NONE = Listing(reason="no NVIDIA driver answers (NVML: Driver Not Loaded)")


def cards(n: int) -> Listing:
    return Listing(
        tuple(Gpu(i, f"0000:0{i}:00.0", f"GPU-{i}", "Card", 24_000, 24_000) for i in range(n)),
        driver="580.1",
    )


def never(*args, **kwargs):
    raise AssertionError("the three steps must not be tried")


def checked(listing: Listing, train=never, **values) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = check.run(settings.parse(values), train, lines.append, listing)
    return code, lines


# -- devices ---------------------------------------------------------------------------------------


def test_no_gpu_fails_also_where_devices_are_auto():
    code, lines = checked(NONE, devices="auto")
    assert code == 2
    assert (
        "FAIL driver: no NVIDIA driver answers (NVML: Driver Not Loaded) → install the NVIDIA"
        " driver" in lines[1]
    )
    assert lines[2].startswith("FAIL devices: ")
    assert lines[-1].startswith("something is wrong")


def test_one_gpu_where_two_were_asked_for_fails():
    code, lines = checked(cards(1), data_gpu="0", model_gpu="1")
    assert code == 2
    assert "ok   driver: NVIDIA 580.1, 1 GPU(s)" in lines
    assert "FAIL devices: model_gpu=1: no such GPU; valid: 0" in lines[2]
    assert "GPU-0" in lines[2]


def test_index_99_fails_with_the_range():
    code, lines = checked(cards(2), data_gpu="99", model_gpu="1")
    assert code == 2
    assert "data_gpu=99: no such GPU; valid: 0 to 1" in lines[2]


def fake_tensorflow(folder, body: str) -> dict[str, str]:
    """An environment in which `import tensorflow` runs `body`."""
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow" / "__init__.py").write_text(textwrap.dedent(body))
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_library_that_tensorflow_cannot_import_fails(tmp_path):
    env = fake_tensorflow(
        tmp_path, "raise ImportError('libcudnn.so.9: cannot open shared object file')"
    )
    (finding,) = check.device_findings("model", Device("gpu", "GPU-1", 1), env)
    assert not finding.ok
    assert "libcudnn.so.9" in str(finding)
    assert "pip install 'tensorflow[and-cuda]'" in str(finding)


GPU_BUILD_WITHOUT_GPU = """
    __version__ = "2.99.0"
    class errors:
        OpError = RuntimeError
    class sysconfig:
        get_build_info = staticmethod(
            lambda: {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
        )
    class config:
        list_physical_devices = staticmethod(lambda kind: [])
"""


@pytest.mark.skipif(device.cudnn_version() != "", reason="cuDNN is installed here")
def test_c26_a_missing_cuda_library_is_named_with_its_package(tmp_path):
    env = fake_tensorflow(tmp_path, GPU_BUILD_WITHOUT_GPU)
    findings = check.device_findings("data", Device("gpu", "GPU-0", 0), env)
    assert [f.ok for f in findings] == [True, False]
    assert "built for cuDNN 9, CUDA runtime found none, cuDNN found none" in str(findings[0])
    assert "sees 0 GPUs with CUDA_VISIBLE_DEVICES=GPU-0" in str(findings[1])
    assert "libcudnn.so.9 (nvidia-cudnn-cu12)" in str(findings[1])


def test_the_one_missing_library_is_told_from_those_that_load(monkeypatch):
    class Tf:
        __version__ = "2.99.0"

        class sysconfig:
            get_build_info = staticmethod(lambda: {"is_cuda_build": True})

    monkeypatch.setattr(
        device, "_load", lambda name: None if name == "libcufft.so.11" else object()
    )
    assert device.diagnose(Tf).startswith("cannot load libcufft.so.11 (nvidia-cufft-cu12);")


def test_a_full_card_is_told_from_a_broken_one():
    full = RuntimeError(
        "cudaSetDevice() on GPU:0 failed. Status: out of memory\n[Op:MatMul]"
    )  # as TensorFlow 2.21 words it
    said = device._refusal("GPU-1", full, never)
    assert said.startswith(
        "the GPU GPU-1 is full: cudaSetDevice() on GPU:0 failed. Status: out of memory;"
        " `nvidia-smi`"
    )
    broken = device._refusal(
        "GPU-1", RuntimeError("DNN library initialization failed"), lambda: "cuDNN found none"
    )
    assert (
        broken
        == "the GPU GPU-1 cannot compute: DNN library initialization failed; cuDNN found none"
    )


def test_a_child_that_crashes_fails_with_its_last_words(tmp_path):
    env = fake_tensorflow(
        tmp_path,
        "import os, sys; sys.stderr.write('CUDA error 719\\n'); sys.stderr.flush(); os.abort()",
    )
    (finding,) = check.device_findings("model", Device("gpu", "GPU-1", 1), env)
    assert not finding.ok
    assert "killed by signal 6" in finding.detail


# -- three steps -----------------------------------------------------------------------------------


def pretend(
    steps: int,
    code: int = 0,
    bad_digest: bool = False,
    says: str = "",
    raises: Exception | None = None,
    logged: str = "",
):
    """A `launch.train` that leaves such a run behind."""

    def train(small, out):
        if raises is not None:
            raise raises
        small.run_dir.mkdir(parents=True)
        lines = [{"step": i + 1, "loss": 5.0 - i, "step_ms": 10.0} for i in range(steps)]
        (small.run_dir / "ledger.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        events = [{"kind": "deliver", "digest": f"d{i}"} for i in range(steps)] + [
            {"kind": "bad_digest"}
        ] * bad_digest
        (small.run_dir / "channel.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events))
        if logged:
            (small.run_dir / "logs").mkdir()
            (small.run_dir / "logs" / "trainer.log").write_text(logged)
        out.write(says)
        return code

    return train


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """Settings for a check whose devices are in order."""
    monkeypatch.setattr(check, "device_findings", lambda role, device, env: [])
    return {
        "data_gpu": "cpu",
        "model_gpu": "cpu",
        "run": str(tmp_path / "runs" / "x"),
        "model": {"size": "arithmetic"},
        "dvae": {"batch_size": 4},
    }


def test_evidence_of_three_steps_passes_and_leaves_nothing_behind(on_cpu, tmp_path):
    code, lines = checked(NONE, pretend(3), **on_cpu)
    assert code == 0, lines
    assert "ok   driver: none needed: the CPU was asked for" in lines
    assert any("3 batches with equal digests at both ends, the first d0" in x for x in lines)
    assert lines[-1] == "all in order"
    assert list((tmp_path / "runs").iterdir()) == []


def test_it_says_which_batch_fits(on_cpu):
    account = str(
        Account(card_mb=24_000, free_mb=3_900, limit_mb=16_600, step_mb=10_500, state_mb=5_400)
    )
    assert account.startswith("GPU memory: the largest step needs 10.5 GB, 5.4 of it between steps")
    logged = "".join(
        f"2026-11-29 03:00:0{i},000 INFO trainer: {text}\n"
        for i, text in enumerate(("began", account))
    )
    _, lines = checked(NONE, pretend(3, logged=logged), **on_cpu)
    assert [x for x in lines if x.startswith("ok   memory: ")] == [
        "ok   memory: " + account.removeprefix("GPU memory: ")
    ]


def test_how_many_rows_fit():
    """12 rows take 5 100 MB beside the state: 425 each. 97 % of what the limit leaves are 10 864
    MB; without a limit, of what is free.
    """
    limited = Account(
        card_mb=24_000, free_mb=3_900, limit_mb=16_600, step_mb=10_500, state_mb=5_400
    )
    assert limited.rows(12) == 25
    assert dataclasses.replace(limited, limit_mb=None).rows(12) == 18
    assert dataclasses.replace(limited, limit_mb=5_000).rows(12) == 0


@pytest.mark.parametrize(
    ("given", "context", "whole", "expected"),
    [
        (16_000, None, False, 16_000),  # NVML says nothing: as the launcher said
        (
            16_000,
            Context(400, 20_000),
            False,
            16_000,
        ),  # the launcher left 1200 for it: 400 and 700 fit
        (16_000, Context(900, 20_000), False, 15_600),
        (1_200, Context(900, 20_000), False, 1_024),
        (
            None,
            Context(500, 23_000),
            True,
            22_300,
        ),  # a small card, alone on it: at once, but for the driver's part
        (None, Context(500, 23_000), False, None),
        (None, Context(500, 140_000), True, None),  # a large one: as needed
        (None, None, True, None),
    ],
)
def test_tensorflow_gets_what_the_driver_leaves(given, context, whole, expected):
    assert limit_mb(given, context, whole) == expected


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (pretend(3, bad_digest=True), "FAIL wire"),
        (pretend(2, code=1, says="12:00:00 ERROR trainer: ResourceExhaustedError: OOM\n"),
            "lower batching.batch_size"),
        (pretend(0, code=1, says="12:00:00 ERROR trainer: no kernel\n"),
            "FAIL model: no step of size arithmetic, batch 8 was made: ERROR"),
        (pretend(3, raises=BadInput("no space")), "FAIL steps: no space"),
    ],
)  # fmt: skip
def test_missing_evidence_fails(on_cpu, train, words):
    code, lines = checked(NONE, train, **on_cpu)
    assert code == 2
    assert any(words in x for x in lines), lines


def test_real_steps_through_the_real_launcher(on_cpu):
    code, lines = checked(NONE, launch.train, **on_cpu)
    assert code == 0, lines
    assert any(x.startswith("ok   steps: 3 real steps") for x in lines)


@pytest.mark.slow
def test_the_cpu_proves_itself_in_a_child():
    findings = check.device_findings("model", CPU, os.environ)
    assert [f.ok for f in findings] == [True, True]
    assert "CPU: a matrix product and a convolution are right" in findings[1].detail


@pytest.mark.parametrize(
    "train", [pretend(0, raises=Stopped("stopped by SIGTERM")), pretend(0, 143)]
)
def test_a_check_that_is_stopped_has_found_nothing_wrong(on_cpu, train):
    with pytest.raises(Stopped, match="^stopped"):
        checked(NONE, train, **on_cpu)
