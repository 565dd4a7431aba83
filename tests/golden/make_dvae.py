"""Make dvae.npz: weights, encoder outputs, codes, mels and one training update of Coqui's DiscreteVAE at a small size.

Environment and command as in make_audio.py: `python -P tests/golden/make_dvae.py`.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import coqui_stubs  # noqa: E402, F401
import torch  # noqa: E402
from TTS.tts.layers.xtts.dvae import DiscreteVAE  # noqa: E402


def main():
    torch.manual_seed(0)
    dvae = DiscreteVAE(
        channels=80, normalization=None, positional_dims=1, num_tokens=16, codebook_dim=10, hidden_dim=12, num_resnet_blocks=2,
        kernel_size=3, num_layers=2, use_transposed_convs=False,
    )  # fmt: skip
    # Spread the encoder's outputs, so that the codes differ along the clip.
    for p in dvae.parameters():
        p.data *= 1.6
    dvae.eval()
    arrays = {}
    lengths = (32, 33, 34, 35)
    mels = {n: torch.randn(2, 80, n) * 1.5 - 1 for n in lengths}
    with torch.no_grad():
        # One code near each of the 16 encoder outputs of the first batch: the codes differ, and none is a near tie.
        z = dvae.encoder(mels[32]).transpose(1, 2).reshape(-1, 10)
        dvae.codebook.embed.copy_(z[torch.randperm(16)].T + 0.1 * z.std() * torch.randn(10, 16))
        for n in lengths:
            arrays[f"mel_{n}"] = mels[n].transpose(1, 2).numpy()
            arrays[f"z_{n}"] = dvae.encoder(mels[n]).transpose(1, 2).numpy()
            arrays[f"codes_{n}"] = dvae.get_codebook_indices(mels[n]).numpy().astype(np.int32)
        codes = dvae.get_codebook_indices(mels[32])
        arrays["decoded_32"] = dvae.decode(codes)[0].transpose(1, 2).numpy()
        dvae.codebook.embed_avg.copy_(dvae.codebook.embed * 3)
        dvae.codebook.cluster_size.fill_(3)
        arrays |= {f"state/{k}": v.clone().numpy() for k, v in dvae.state_dict().items()}
        # One moving-average update of the codebook in training mode.
        dvae.codebook.train()
        _, _, commitment = dvae.codebook(dvae.encoder(mels[32]).transpose(1, 2))
        arrays["commitment_32"] = commitment.numpy()
        for k in ("embed", "cluster_size", "embed_avg"):
            arrays[f"updated/{k}"] = getattr(dvae.codebook, k).clone().numpy()
    np.savez_compressed(pathlib.Path(__file__).with_name("dvae.npz"), **arrays)
    print({k: v.shape for k, v in arrays.items() if "/" not in k}, [len(np.unique(arrays[f"codes_{n}"])) for n in lengths])


if __name__ == "__main__":
    main()
