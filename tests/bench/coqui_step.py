"""Coqui's own GPT class taking the same training step, where coqui-tts is installed: a baseline for
`tests.bench.step`, which starts it.

    COQUI/bin/python tests/bench/coqui_step.py '{"batch": 32, "steps": 30, "way": "fp32",
    "text_tokens": 150, "codes": 216, …}'

As its XTTS recipe trains it: rows padded as its collator pads them, its own forward pass and
losses, torch's AdamW with the recipe's settings, float32 products (`fp32`); the same with TF32
(`tf32`) and under bfloat16 autocast (`bf16`). Not in it, as it is not in our step: the mels and
DVAE codes, which its trainer computes inside the step. Coqui's package has a module `trainer`, so
that this file never runs with the project on its path. Prints one line of JSON with the keys of a
row.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "golden"))
import coqui_stubs  # noqa: F401
import torch
from torch_timing import timed
from TTS.tts.layers.xtts.gpt import GPT

WAYS = {
    "fp32": (False, False),
    "tf32": (True, False),
    "bf16": (True, True),
}  # TF32 for float32 products, bfloat16 autocast


def model_of(gpt: dict, samples_per_code: int) -> torch.nn.Module:
    """`GPT` of these sizes (names as in common/xtts/dims.py), as Coqui's `Xtts` makes it."""
    return GPT(
        layers=gpt["layers"],
        model_dim=gpt["width"],
        heads=gpt["heads"],
        start_text_token=gpt["start_text"],
        stop_text_token=gpt["stop_text"],
        max_text_tokens=gpt["max_text_tokens"],
        max_mel_tokens=gpt["max_audio_tokens"],
        max_prompt_tokens=70,
        number_text_tokens=gpt["num_text_tokens"],
        num_audio_tokens=gpt["num_audio_tokens"],
        start_audio_token=gpt["start_audio"],
        stop_audio_token=gpt["stop_audio"],
        use_perceiver_resampler=True,
        code_stride_len=samples_per_code,
    )


def measure(job: dict) -> dict:
    """A row of `tests.bench.step`; nothing is compiled, so its compile_s is the first step's."""
    device, gpt, rows = "cuda" if torch.cuda.is_available() else "cpu", job["gpt"], job["batch"]
    torch.manual_seed(0)
    tf32, bf16 = WAYS[job["way"]]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    model = model_of(gpt, job["samples_per_code"]).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-6, betas=(0.9, 0.96), eps=1e-8, weight_decay=1e-2
    )
    text = torch.randint(1, gpt["num_text_tokens"], (rows, job["text_tokens"]), device=device)
    codes = torch.randint(0, gpt["num_audio_tokens"] - 2, (rows, job["codes"]), device=device)
    mels = torch.randn(rows, 1, gpt["num_mels"], job["cond_frames"], device=device)
    text_lengths = torch.full((rows,), job["text_tokens"], device=device)
    wav_lengths = torch.full((rows,), job["codes"] * job["samples_per_code"], device=device)

    def once() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            # Clones: it writes its padding into what it is given.
            text_loss, audio_loss, _ = model(
                text.clone(), text_lengths, codes.clone(), wav_lengths, cond_mels=mels
            )
            loss = 0.01 * text_loss + audio_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(once, job["steps"], rows, model)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(json.loads(sys.argv[1]))) + "\n")
