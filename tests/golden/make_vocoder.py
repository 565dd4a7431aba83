"""Make hifigan.npz and speaker_encoder.npz: Coqui's HiFi-GAN decoder and speaker encoder at small sizes, random weights.

Environment and command as in make_audio.py: `python -P tests/golden/make_vocoder.py`. Weights are stored as float16 and loaded back from
there before anything is computed, so that each file stays below 1 MB.
"""

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import coqui_stubs  # noqa: E402, F401
import torch  # noqa: E402
from TTS.encoder.models.resnet import ResNetSpeakerEncoder  # noqa: E402
from TTS.tts.layers.xtts.hifigan_decoder import HifiDecoder  # noqa: E402
from TTS.vocoder.models.hifigan_generator import HifiganGenerator  # noqa: E402


def halve(module):
    """Round every floating tensor to float16; the state as stored."""
    state = {k: v.half() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    module.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return {f"state/{k}": v.numpy() for k, v in state.items()}


def make_hifigan():
    torch.manual_seed(0)
    decoder = HifiDecoder(decoder_input_dim=24, d_vector_dim=12)
    decoder.waveform_decoder = HifiganGenerator(
        24, 1, "1", [[1, 3, 5]] * 3, [3, 7, 11], [16, 16, 4, 4], 32, [8, 8, 2, 2], inference_padding=0, cond_channels=12,
        conv_pre_weight_norm=False, conv_post_weight_norm=False, conv_post_bias=False, cond_in_each_up_layer=True,
    )  # fmt: skip
    for name, p in decoder.waveform_decoder.named_parameters():
        if name.endswith("original0"):  # as if trained: norms that are not those of v
            p.data *= torch.empty_like(p).uniform_(0.7, 1.6)
    arrays = halve(decoder.waveform_decoder)
    latents, g = torch.randn(2, 20, 24), torch.nn.functional.normalize(torch.randn(2, 12, 1), dim=1)
    with torch.no_grad():
        arrays |= {"latents": latents.numpy(), "speaker": g[:, :, 0].numpy()}
        # One clip at a time: the original squeezes the batch axis away.
        arrays["wav"] = np.stack([decoder(latents[i : i + 1], g[i : i + 1])[0, 0].numpy() for i in range(2)])
        for n in (1, 53, 300):
            x = torch.randn(1, 2, n)
            y = torch.nn.functional.interpolate(x, scale_factor=[4.0], mode="linear")
            z = torch.nn.functional.interpolate(y, scale_factor=[24000 / 22050], mode="linear")
            arrays |= {f"interpolate_in_{n}": x.transpose(1, 2).numpy(), f"interpolate_out_{n}": z.transpose(1, 2).numpy()}
    np.savez_compressed(HERE / "hifigan.npz", **arrays)


def make_speaker_encoder():
    torch.manual_seed(1)
    encoder = ResNetSpeakerEncoder(
        input_dim=64, proj_dim=24, layers=[1, 2, 1, 1], num_filters=[8, 16, 16, 24], log_input=True, use_torch_spec=True,
        audio_config={"fft_size": 512, "win_length": 400, "hop_length": 160, "sample_rate": 16000, "preemphasis": 0.97, "num_mels": 64},
    )  # fmt: skip
    for name, buffer in encoder.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif name.endswith("num_batches_tracked"):
            buffer.fill_(7)
    for name, p in encoder.named_parameters():
        if "bn" in name or "attention.2" in name or "downsample.1" in name:
            p.data.add_(0.2 * torch.randn_like(p))
    encoder.eval()
    front = {k: v.clone() for k, v in encoder.state_dict().items() if k.startswith("torch_spec")}
    arrays = halve(encoder)
    encoder.load_state_dict(encoder.state_dict() | front)  # the front end's constants stay exact
    arrays |= {f"state/{k}": v.numpy() for k, v in front.items()}
    rng = np.random.default_rng(2)
    t = np.arange(19333) / 16000
    wav = 0.3 * np.sin(2 * np.pi * (180 + 80 * np.sin(5 * t)) * t) * (0.5 + 0.5 * np.sin(9 * t)) + 0.05 * rng.standard_normal(len(t))
    wav = np.stack([wav, rng.standard_normal(len(t)) * np.linspace(0.01, 0.3, len(t))]).astype(np.float32)
    with torch.no_grad():
        arrays["wav"] = wav
        arrays["embedding"] = encoder(torch.tensor(wav), l2_norm=True).numpy()
        arrays["mel"] = encoder.instancenorm((encoder.torch_spec(torch.tensor(wav)) + 1e-6).log()).numpy()
    np.savez_compressed(HERE / "speaker_encoder.npz", **arrays)


if __name__ == "__main__":
    make_hifigan()
    make_speaker_encoder()
