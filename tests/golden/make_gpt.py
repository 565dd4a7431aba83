"""Makes gpt.npz: Coqui's own GPT class on small random weights, its outputs, losses, gradients' effect and AdamW state.

Environment, apart from the project's (Coqui installs a package named `trainer`, so run with -P and never beside ours):

    python3 -m venv coqui
    coqui/bin/pip install torch==2.13.0 'transformers==4.55.4' coqpit-config einops 'torchaudio==2.11.*'
    coqui/bin/pip install --no-deps coqui-tts==0.28.0 coqui-tts-trainer monotonic-alignment-search
    coqui/bin/pip install fsspec librosa soundfile inflect num2words anyascii pysbd requests psutil tqdm rich tensorboard six matplotlib
    coqui/bin/python -P tests/golden/make_gpt.py

Weights are rounded to float16, so that the file holds them exactly in half the room. Dropout is off (eval mode) in all of it.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import coqui_stubs  # noqa: F401
import torch
from TTS.tts.layers.xtts.gpt import GPT
from TTS.tts.layers.xtts.trainer.gpt_trainer import GPTTrainer

DIMS = {"layers": 2, "width": 32, "heads": 4, "num_text_tokens": 40, "num_audio_tokens": 34, "start_text": 5, "stop_text": 0,
        "max_text_tokens": 12, "max_audio_tokens": 20, "num_latents": 32, "perceiver_depth": 2, "perceiver_heads": 8,
        "perceiver_head_dim": 64, "cond_blocks": 6, "cond_groups": 16, "num_mels": 80}
OPTIMIZER = {"betas": [0.9, 0.96], "eps": 1e-8, "weight_decay": 1e-2}
LEARNING_RATE = 1e-3
NUM_STEPS, NUM_BATCHES, FRAMES, KEPT = 20, 2, 20, 64


def make_model():
    torch.manual_seed(0)
    d = DIMS
    model = GPT(layers=d["layers"], model_dim=d["width"], heads=d["heads"], start_text_token=d["start_text"],
                stop_text_token=d["stop_text"], max_text_tokens=d["max_text_tokens"], max_mel_tokens=d["max_audio_tokens"],
                max_prompt_tokens=70, number_text_tokens=d["num_text_tokens"], num_audio_tokens=d["num_audio_tokens"],
                start_audio_token=d["num_audio_tokens"] - 2, stop_audio_token=d["num_audio_tokens"] - 1,
                use_perceiver_resampler=True, code_stride_len=1024).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Larger than at birth, and nothing left at 0 or 1: every tensor must matter in the outputs.
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif "embedding" in name:
                p.copy_(0.5 * torch.randn_like(p))
            elif "proj_out" in name or "c_proj" in name:
                p.copy_(0.2 * torch.randn_like(p))
            elif "gpt.h." in name:
                p.copy_(0.15 * torch.randn_like(p))
            p.copy_(p.half().float())
    return model


def make_batch(generator, num_rows=3):
    g = generator
    text_lengths = g.integers(2, 11, num_rows)
    wav_lengths = g.integers(3 * 1024, 14 * 1024, num_rows)
    wav_lengths[0] = 5 * 1024  # an exact multiple: the DVAE makes one code more than the GPT uses
    codes = g.integers(0, DIMS["num_audio_tokens"] - 2, (num_rows, wav_lengths.max() // 1024 + 1))
    text = np.zeros((num_rows, text_lengths.max()), np.int64)
    for row, length in enumerate(text_lengths):
        text[row, :length] = g.integers(6, DIMS["num_text_tokens"], length)
    cond_mel = (g.standard_normal((num_rows, 1, DIMS["num_mels"], FRAMES)) * 2 - 3).astype(np.float16).astype(np.float32)
    return {"text": text, "text_lengths": text_lengths, "codes": codes, "wav_lengths": wav_lengths, "cond_mel": cond_mel}


def forward(model, batch, cond_idxs=None):
    t = {k: torch.from_numpy(v.copy()) for k, v in batch.items()}
    idxs = None if cond_idxs is None else torch.from_numpy(cond_idxs.copy())
    return model(t["text"], t["text_lengths"], t["codes"], t["wav_lengths"], cond_mels=t["cond_mel"], cond_idxs=idxs)


def text_logits_of(model, batch):
    kept = []
    handle = model.text_head.register_forward_hook(lambda module, inputs, output: kept.append(output))
    forward(model, batch)
    handle.remove()
    return kept[0]


def kept_indices(size):
    return np.linspace(0, size - 1, min(size, KEPT)).astype(np.int64)


def train(model, batches):
    config = SimpleNamespace(optimizer_wd_only_on_weights=True, optimizer="AdamW", lr=LEARNING_RATE,
                             optimizer_params={**OPTIMIZER, "betas": tuple(OPTIMIZER["betas"])})
    optimizer = GPTTrainer.get_optimizer(SimpleNamespace(config=config, xtts=SimpleNamespace(gpt=model)))
    decayed = optimizer._group_names[0]
    losses = []
    for step in range(NUM_STEPS):
        text, mel, _ = forward(model, batches[step % len(batches)])
        loss = 0.01 * text + mel
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append([text.item(), mel.item()])
    out = {"losses": np.array(losses, np.float64), "decayed": np.array(json.dumps(sorted(decayed)))}
    for name, p in model.named_parameters():
        state, keep = optimizer.state[p], kept_indices(p.numel())
        for kind, tensor in (("gradient", gradients[name]), ("parameter", p), ("exp_avg", state["exp_avg"]),
                             ("exp_avg_sq", state["exp_avg_sq"])):
            out[f"{kind}/{name}"] = tensor.detach().reshape(-1)[keep].numpy()
    return out


def main():
    model = make_model()
    generator = np.random.default_rng(7)
    batches = [make_batch(generator) for _ in range(NUM_BATCHES)]
    meta = {"dims": DIMS, "learning_rate": LEARNING_RATE, "optimizer": OPTIMIZER, "steps": NUM_STEPS, "frames": FRAMES}
    out = {"meta": np.array(json.dumps(meta))}
    out.update({f"weight/{k}": v.numpy().astype(np.float16) for k, v in model.state_dict().items()})
    for i, batch in enumerate(batches):
        out.update({f"batch{i}/{k}": v.astype(np.float32 if v.dtype == np.float32 else np.int32) for k, v in batch.items()})
    first = batches[0]
    # start and end in samples: 256 to a mel frame, and the original counts them as if they were codes.
    cond_idxs = np.array([[256, 900], [0, 512], [512, 512 + 256 * 4]], np.int64)
    with torch.no_grad():
        text, mel, mel_logits = forward(model, first)
        masked_text, masked_mel, _ = forward(model, first, cond_idxs)
        style = model.get_style_emb(torch.from_numpy(first["cond_mel"])).transpose(1, 2)
        encoded = model.conditioning_encoder(torch.from_numpy(first["cond_mel"][:, 0])).transpose(1, 2)
        row = {k: torch.from_numpy(v[:1].copy()) for k, v in first.items()}
        length, n = int(first["text_lengths"][0]), int(first["wav_lengths"][0]) // 1024
        latents = model(row["text"][:, :length], torch.tensor([length]), row["codes"][:, :n], torch.tensor([n * 1024]),
                        cond_latents=style[:1], return_latent=True)
        out.update({"encoded": encoded.numpy(), "style": style.numpy(), "text_logits": text_logits_of(model, first).numpy(),
                    "mel_logits": mel_logits.transpose(1, 2).numpy(), "losses_first": np.array([text.item(), mel.item()]),
                    "losses_masked": np.array([masked_text.item(), masked_mel.item()]), "cond_idxs": cond_idxs,
                    "latents": latents.numpy()})
    out.update({f"train/{k}": v for k, v in train(model, batches).items()})
    path = Path(__file__).with_name("gpt.npz")
    np.savez_compressed(path, **out)
    print(f"{path}: {path.stat().st_size} bytes, {len(out)} arrays; losses {out['train/losses'][[0, -1]].tolist()}")


if __name__ == "__main__":
    main()
