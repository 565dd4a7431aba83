"""Makes training.npz: ten training steps of Coqui's own XTTS trainer code, from samples to losses, and where the weights went.

Environment: see make_gpt.py; run as `coqui/bin/python -P tests/golden/make_training.py`. The GPT begins with the weights of gpt.npz, the
corpus is training_case.py's. Dropout is off (eval mode); everything else is the recipe's: dataset collation, mels and DVAE codes of the
padded batch, prompt masking, losses, gradient accumulation, AdamW groups.
"""

import sys
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import coqui_stubs  # noqa: F401
import torch
from TTS.tts.layers.tortoise.arch_utils import TorchMelSpectrogram
from TTS.tts.layers.xtts.dvae import DiscreteVAE
from TTS.tts.layers.xtts.trainer.dataset import XTTSDataset
from TTS.tts.layers.xtts.trainer.gpt_trainer import GPTTrainer

import training_case as case
from make_gpt import kept_indices, make_model

DVAE = {"channels": 80, "normalization": None, "positional_dims": 1, "num_tokens": 32, "codebook_dim": 12, "hidden_dim": 16,
        "num_resnet_blocks": 1, "kernel_size": 3, "num_layers": 2, "use_transposed_convs": False}


def make_dvae(trainer):
    torch.manual_seed(1)
    dvae = DiscreteVAE(**DVAE).eval()
    with torch.no_grad():
        for p in dvae.parameters():
            p.mul_(1.6)
            p.copy_(p.half().float())
        wavs = [torch.from_numpy(case.wave(i) / np.float32(32768))[None, None] for i in range(case.NUM_UTTERANCES)]
        z = torch.cat([dvae.encoder(trainer.torch_mel_spectrogram_dvae(w))[0].T for w in wavs])
        dvae.codebook.embed.copy_((z[torch.randperm(len(z))[:32]].T + 0.3 * z.std(0)[:, None] * torch.randn(12, 32)).half().float())
    return dvae


def make_trainer(gpt):
    """What GPTTrainer's methods need of `self`."""
    spectrograms = {}
    for name, options in (("style_encoder", {"filter_length": 2048, "hop_length": 256, "win_length": 1024, "normalize": False,
                                             "sampling_rate": 22050, "mel_fmin": 0, "mel_fmax": 8000, "n_mel_channels": 80}),
                          ("dvae", {"sampling_rate": 22050})):
        spectrogram = TorchMelSpectrogram(mel_norm_file=None, **options)
        spectrogram.mel_norms = torch.from_numpy(case.MEL_STATS)
        spectrograms[f"torch_mel_spectrogram_{name}"] = spectrogram
    optim = SimpleNamespace(optimizer_wd_only_on_weights=True, optimizer="AdamW", lr=case.OPTIMIZER["learning_rate"],
                            optimizer_params={k: case.OPTIMIZER[k] for k in ("betas", "eps", "weight_decay")},
                            audio=SimpleNamespace(sample_rate=22050, dvae_sample_rate=22050))
    trainer = SimpleNamespace(config=optim, xtts=SimpleNamespace(gpt=gpt), **spectrograms,
                              args=SimpleNamespace(gpt_loss_text_ce_weight=0.01, gpt_loss_mel_ce_weight=1.0))
    trainer.forward = MethodType(GPTTrainer.forward, trainer)
    trainer.dvae = make_dvae(trainer)
    return trainer


def sample(i, seed):
    """An item of the dataset, as XTTSDataset.__getitem__ returns it with gpt_use_masking_gt_prompt_approach."""
    wav = torch.from_numpy(case.wave(i) / np.float32(32768))[None]
    start, length = case.prompt(wav.shape[1], seed)
    clip = torch.nn.functional.pad(wav[:, start : start + length], (0, case.COND_MAX - length))
    text = torch.tensor(case.tokens(i), dtype=torch.int32)
    return {"text": text, "text_lengths": torch.tensor(len(text)), "wav": wav, "wav_lengths": torch.tensor(wav.shape[1]),
            "filenames": str(i), "conditioning": clip.unsqueeze(0), "cond_lens": torch.tensor(float("nan")),
            "cond_idxs": torch.tensor([start, start + length])}


def main():
    gpt = make_model()
    trainer = make_trainer(gpt)
    optimizer = GPTTrainer.get_optimizer(trainer)
    out, losses, group = {f"dvae/{k}": v.numpy().astype(np.float16) for k, v in trainer.dvae.state_dict().items()
                          if k.startswith(("encoder", "decoder")) or k == "codebook.embed"}, [], []
    for b in range(case.NUM_BATCHES):
        items = [sample(i, seed) for i, seed in zip(*case.batch(b))]
        batch = GPTTrainer.format_batch_on_device(trainer, XTTSDataset.collate_fn(None, items))
        out[f"codes/{b}"] = batch["audio_codes"].numpy().astype(np.uint8)
        _, loss = GPTTrainer.train_step(trainer, batch, None)
        # Trainer.optimize: the loss is divided by the number of batches in a whole group, in the epoch's last, short one too.
        (loss["loss"] / case.ACCUMULATE).backward()
        group.append([float(loss[k].detach()) for k in ("loss", "loss_text_ce", "loss_mel_ce")])
        if (b + 1) % case.ACCUMULATE == 0 or b + 1 == case.NUM_BATCHES:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(np.sum(group, 0) / case.ACCUMULATE)
            group = []
    out["losses"] = np.array(losses, np.float64)
    for name, p in gpt.named_parameters():
        out[f"parameter/{name}"] = p.detach().reshape(-1)[kept_indices(p.numel())].numpy()
    path = Path(__file__).with_name("training.npz")
    np.savez_compressed(path, **out)
    used = np.unique(np.concatenate([out[f"codes/{b}"].ravel() for b in range(case.NUM_BATCHES)]))
    print(f"{path}: {path.stat().st_size} bytes, {len(used)} of 32 codes used; losses {out['losses'][:, 0].tolist()}")


if __name__ == "__main__":
    main()
