"""XTTS at full size against Coqui's own classes, by hand, on a CPU: import, logits, losses, every
gradient, export.

    python tests/bench/parity_full.py --coqui COQUI/bin/python [--work DIR]

COQUI is a virtual environment of its own (tests/golden/make_gpt.py says how to make it). Needs 12
GB of memory and 10 GB of disk, and takes some minutes. Coqui's `Xtts` with random weights →
model.pth → `launch.py import-coqui` → our networks, same batch → `launch.py export-coqui` → Coqui's
`Xtts`, strict. Each step runs in a process of its own; the figures are printed, and what is outside
of its bound ends it with exit code 1.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {"logits": 1e-3, "loss": 1e-5, "gradient": 1e-3, "memory": 2.5}
TEXT_LENGTHS, WAV_SAMPLES, FRAMES = (21, 14), (38 * 1024 + 77, 29 * 1024), 517


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


# -- in Coqui's environment
# --------------------------------------------------------------------------------------------------


def _xtts():
    sys.path.insert(0, str(ROOT / "tests" / "golden"))
    import coqui_stubs  # noqa: F401
    import torch
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts, XttsArgs

    torch.manual_seed(0)
    args = XttsArgs(
        gpt_number_text_tokens=6681,
        gpt_start_text_token=261,
        gpt_stop_text_token=0,
        gpt_num_audio_tokens=1026,
        gpt_start_audio_token=1024,
        gpt_stop_audio_token=1025,
        gpt_use_perceiver_resampler=True,
    )
    return Xtts.init_from_config(XttsConfig(model_args=args))


def coqui_make(work: Path) -> None:
    """model.pth, dvae.pth, batch.npz; losses and logits of Coqui's GPT in coqui.npz, all its
    gradients in gradients.pth.
    """
    model = _xtts()
    import torch
    from TTS.tts.layers.xtts.dvae import DiscreteVAE

    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.gpt.named_parameters():
            # Nothing left at 0 or 1, and token embeddings as big as the rest: every tensor must
            # matter.
            if p.ndim == 1:
                p.add_(0.05 * torch.randn_like(p))
            elif "embedding" in name or "proj_out" in name:
                p.copy_(0.05 * torch.randn_like(p))
        model.mel_stats.copy_(torch.linspace(2, 5, 80))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    torch.save({"config": model.config, "model": model.state_dict(), "step": 0}, work / "model.pth")
    dvae = DiscreteVAE(channels=80, normalization=None, positional_dims=1, num_tokens=1024,
        codebook_dim=512, hidden_dim=512,
                       num_resnet_blocks=3, kernel_size=3, num_layers=2,
                       use_transposed_convs=False)  # fmt: skip
    torch.save(dvae.state_dict(), work / "dvae.pth")
    say(
        f"  {sum(p.numel() for p in model.gpt.parameters()):,} parameters,"
        f" {len(model.state_dict())} entries in model.pth"
    )
    rng = np.random.default_rng(0)
    text = np.zeros((2, max(TEXT_LENGTHS)), np.int64)
    for row, length in enumerate(TEXT_LENGTHS):
        text[row, :length] = rng.integers(262, 6681, length)
    codes = rng.integers(0, 1024, (2, max(WAV_SAMPLES) // 1024 + 1))
    cond = (rng.standard_normal((2, 1, 80, FRAMES)) * 2 - 3).astype(np.float32)
    np.savez(work / "batch.npz", text=text, codes=codes, cond=cond)
    gpt = model.gpt.eval()
    kept = []
    gpt.text_head.register_forward_hook(
        lambda module, inputs, output: kept.append(output.detach().numpy())
    )
    began = time.perf_counter()
    loss_text, loss_mel, mel_logits = gpt(
        torch.from_numpy(text),
        torch.tensor(TEXT_LENGTHS),
        torch.from_numpy(codes),
        torch.tensor(WAV_SAMPLES),
        cond_mels=torch.from_numpy(cond),
    )
    (0.01 * loss_text + loss_mel).backward()
    say(f"  forward and backward: {time.perf_counter() - began:.0f} s")
    np.savez(
        work / "coqui.npz",
        text_logits=kept[0],
        mel_logits=mel_logits.detach().numpy(),
        losses=[loss_text.item(), loss_mel.item()],
    )
    torch.save({name: p.grad for name, p in gpt.named_parameters()}, work / "gradients.pth")


def coqui_check(work: Path) -> None:
    """What was exported loads with strict=True, and is equal to the bit to what was made."""
    model = _xtts()
    import torch

    state = model.get_compatible_checkpoint_state_dict(work / "exported" / "model.pth")
    model.load_state_dict(state, strict=True)
    before = torch.load(work / "model.pth", weights_only=False, mmap=True)["model"]
    after = model.state_dict()
    differs = [
        k
        for k in before
        if not torch.equal(before[k], after[k]) or before[k].dtype != after[k].dtype
    ]
    say(f"  strict=True: loaded; {len(after)} entries, {len(differs)} differ {differs[:5]}")
    if differs or set(before) != set(after):
        sys.exit(1)


# -- in ours
# --------------------------------------------------------------------------------------------------


def compare(work: Path) -> None:
    """Our networks on the same batch: figures.json."""
    sys.path.insert(0, str(ROOT))
    from types import SimpleNamespace

    import tensorflow as tf
    from safetensors.numpy import load_file

    from common.xtts import weights
    from common.xtts.checkpoints import pretrained, pth
    from common.xtts.gpt import Gpt
    from tests.support.gpt_cases import pack
    from trainer.step.gpt import GptStep, StepOptions

    dims = pretrained.read_dims(work / "pretrained")
    model = Gpt(dims.gpt)
    weights.load_state_dict(model, load_file(work / "pretrained" / "model.safetensors"))
    with np.load(work / "batch.npz") as b, np.load(work / "coqui.npz") as c:
        batch_in, coqui = dict(b), dict(c)
    numbers = [-(-n // 1024) for n in WAV_SAMPLES]
    texts = [row[:n] for row, n in zip(batch_in["text"], TEXT_LENGTHS, strict=True)]
    codes = [row[:n] for row, n in zip(batch_in["codes"], numbers, strict=True)]
    text_len = max(TEXT_LENGTHS) + 1
    rows = pack(
        dims.gpt,
        texts,
        codes,
        max(t + 1 + n + 4 for t, n in zip(TEXT_LENGTHS, numbers, strict=True)),
        text_len,
    )
    mel = np.ascontiguousarray(batch_in["cond"][:, 0].transpose(0, 2, 1))
    batch = {
        k: tf.constant(v)
        for k, v in {**rows, "cond_mel": mel, "weights": np.ones(2, np.float32)}.items()
    }
    step = SimpleNamespace(
        model=model, dims=dims, options=StepOptions()
    )  # without the optimizer's memory
    tensors = list(weights.tensors(model).values())
    variables = [t.variable.value for t in tensors]

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            out = GptStep.losses(step, batch, None)
        hidden = model.hidden(
            model.style_latents(batch["cond_mel"]), batch["ids"], batch["positions"]
        )[:, dims.gpt.num_latents :]
        return (
            out,
            model.text_logits(hidden[:, :text_len]),
            model.audio_logits(hidden),
            tape.gradient(out["loss"], variables),
        )

    began = time.perf_counter()
    out, text_logits, audio_logits, gradients = run()
    say(
        f"  forward and backward: {time.perf_counter() - began:.0f} s, graph mode, compilation"
        " included"
    )
    logits = []
    for row, (length, n) in enumerate(zip(TEXT_LENGTHS, numbers, strict=True)):
        logits.append(
            np.abs(text_logits[row, : length + 1] - coqui["text_logits"][row, : length + 1]).max()
        )
        ours = audio_logits[row, length + 1 : length + 1 + n + 4]
        logits.append(np.abs(ours - coqui["mel_logits"][row, :, : n + 4].T).max())
    losses = [
        abs(float(out[k]) / want - 1)
        for k, want in zip(("text_ce", "audio_ce"), coqui["losses"], strict=True)
    ]
    worst = []
    with pth.PthFile(work / "gradients.pth") as file:
        assert set(file.value) == {t.key for t in tensors}
        for t, gradient in zip(tensors, gradients, strict=True):
            want = file.value[t.key].read()
            got = weights.to_torch(t, np.asarray(gradient))
            worst.append((float(np.linalg.norm(got - want) / np.linalg.norm(want)), t.key))
    worst.sort(reverse=True)
    for error, key in worst[:5]:
        say(f"  gradient {key}: {error:.1e}")
    figures = {
        "parameters": weights.num_parameters(model),
        "tensors": len(tensors),
        "logits": float(max(logits)),
        "loss": max(losses),
        "gradient": worst[0][0],
        "losses": [float(out["text_ce"]), float(out["audio_ce"])],
    }
    (work / "figures.json").write_text(json.dumps(figures))


# -- the steps
# --------------------------------------------------------------------------------------------------


def run(title: str, *argv: str) -> float:
    """Run a process to its end; returns its peak memory in bytes. Exits with it where it fails."""
    say(title)
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen(argv, cwd=ROOT)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(
                [
                    peak,
                    *(
                        int(line.split()[1]) * 1024
                        for line in status.splitlines()
                        if line.startswith("VmHWM")
                    ),
                ]
            )
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(0.02)
    say(f"  {time.perf_counter() - began:.0f} s, peak memory {peak / 1e9:.2f} GB")
    if process.returncode:
        sys.exit(process.returncode)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coqui", required=True, help="the interpreter of Coqui's environment")
    parser.add_argument("--work", type=Path, default=Path("runs/parity_full"))
    parser.add_argument("--role", choices=["make", "compare", "check"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        {"make": coqui_make, "compare": compare, "check": coqui_check}[args.role](args.work)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    own = (__file__, "--coqui", args.coqui, "--work", str(work), "--role")
    launch, model = (sys.executable, str(ROOT / "launch.py")), work / "model.pth"
    run("Coqui: random weights, losses, gradients", args.coqui, "-P", *own, "make")
    size = model.stat().st_size
    folder, out = str(work / "pretrained"), str(work / "exported" / "model.pth")
    files = ("--model", str(model), "--dvae", str(work / "dvae.pth"), "--out", folder)
    imported = run("import-coqui", *launch, "import-coqui", *files)
    run("ours: losses, gradients", sys.executable, *own, "compare")
    exported = run("export-coqui", *launch, "export-coqui", "--weights", folder, "--out", out)
    run("Coqui: load what was exported", args.coqui, "-P", *own, "check")
    figures = json.loads((work / "figures.json").read_text())
    figures["memory"] = max(imported, exported) / size
    say(
        f"{figures['parameters']:,} parameters in {figures['tensors']} tensors; file"
        f" {size / 1e9:.3f} GB; losses {figures['losses']}"
    )
    failed = (figures["parameters"], figures["tensors"]) != (441_018_563, 426)
    for name, bound in BOUNDS.items():
        unit = {
            "logits": "absolute",
            "loss": "relative",
            "gradient": "relative, worst tensor",
            "memory": "times the file",
        }[name]
        say(
            f"{name:10} {figures[name]:.2e} (bound {bound:g}, {unit})"
            f" {'ok' if figures[name] <= bound else 'FAILED'}"
        )
        failed |= not figures[name] <= bound
    sys.exit(failed)


if __name__ == "__main__":
    main()
