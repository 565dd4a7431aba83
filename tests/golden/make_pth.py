"""Makes torch.pth, torch_legacy.pth and torch.npz: small files as PyTorch and Coqui write them, and the values that are in them.

Environment and command: see make_gpt.py; run as `coqui/bin/python -P tests/golden/make_pth.py`.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import coqui_stubs  # noqa: F401
import torch
from TTS.tts.configs.xtts_config import XttsConfig
from TTS.tts.models.xtts import XttsArgs, XttsAudioConfig


def main():
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(2, 3, 3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(1, 2, 5)).sum().backward()
    optimizer.step()
    model = OrderedDict(
        whole=base, transposed=base.t(), view=base[1:3, 2:5], column=base[:, 3], expanded=base[:1].expand(5, 6), scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 3), bfloat16=base.bfloat16(), float16=base.half(), float64=base.double(), int64=torch.arange(4) - 1,
        uint8=torch.arange(3, dtype=torch.uint8), bool=torch.tensor([True, False]), parameter=torch.nn.Parameter(base + 1),
    )
    model.update({f"conv.{k}": v for k, v in module.state_dict().items()})
    config = XttsConfig(model_args=XttsArgs(gpt_layers=2, gpt_n_heads=7, gpt_use_perceiver_resampler=True), audio=XttsAudioConfig())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20])
    whole = {"config": config, "model": model, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "scaler": None,
             "step": 1000, "epoch": 3, "date": "October 26, 2023", "model_loss": {"train_loss": np.float64(1.5), "eval_loss": 2.0}}
    here = Path(__file__).parent
    torch.save(whole, here / "torch.pth")
    torch.save({"model": {"whole": base}}, here / "torch_legacy.pth", _use_new_zipfile_serialization=False)
    np.savez_compressed(here / "torch.npz", **{k: v.detach().float().numpy() if v.dtype == torch.bfloat16 else v.detach().numpy()
                                               for k, v in model.items()})
    print({p.name: p.stat().st_size for p in sorted(here.glob("torch*"))})


if __name__ == "__main__":
    main()
