"""Makes sampling.npz: codes that Coqui's own inference draws from small random weights, greedily and with recorded noise.

Environment: see make_gpt.py. Run: coqui/bin/python -P tests/golden/make_sampling.py

Noise: for one sample `torch.multinomial` draws q ~ Exp(1) and takes argmax(p / q). The q of every step is recorded and kept; the script
asserts that the recorded draws give what the real function gives from the same generator state.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import coqui_stubs  # noqa: F401
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from TTS.tts.layers.xtts.gpt import GPT

DIMS = {"layers": 2, "width": 32, "heads": 4, "num_text_tokens": 40, "num_audio_tokens": 66, "start_text": 5, "stop_text": 0,
        "max_text_tokens": 12, "max_audio_tokens": 70, "num_latents": 32, "perceiver_depth": 2, "perceiver_heads": 8,
        "perceiver_head_dim": 64, "cond_blocks": 6, "cond_groups": 16, "num_mels": 80}
DECODING = ("text_embedding", "text_pos", "mel_embedding", "mel_pos", "gpt.", "final_norm", "mel_head")  # nothing else is read
CASES = {
    "greedy": {"stop_bias": -20.0, "do_sample": False, "repetition_penalty": 2.0},
    "greedy_plain": {"stop_bias": -20.0, "do_sample": False, "repetition_penalty": 1.0},
    "published": {"stop_bias": 0.5, "do_sample": True, "temperature": 0.75, "repetition_penalty": 5.0, "top_k": 50, "top_p": 0.85},
    "narrow": {"stop_bias": 1.0, "do_sample": True, "temperature": 0.65, "repetition_penalty": 1.5, "top_k": 10, "top_p": 0.5},
    "free": {"stop_bias": 3.0, "do_sample": True, "temperature": 1.0, "repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0},
}
TEXT = [7, 12, 30, 9, 21, 7]


def make_model():
    torch.manual_seed(3)
    d = DIMS
    model = GPT(layers=d["layers"], model_dim=d["width"], heads=d["heads"], start_text_token=d["start_text"],
                stop_text_token=d["stop_text"], max_text_tokens=d["max_text_tokens"], max_mel_tokens=d["max_audio_tokens"],
                max_prompt_tokens=70, number_text_tokens=d["num_text_tokens"], num_audio_tokens=d["num_audio_tokens"],
                start_audio_token=d["num_audio_tokens"] - 2, stop_audio_token=d["num_audio_tokens"] - 1,
                use_perceiver_resampler=True, code_stride_len=1024).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif "embedding" in name:
                p.copy_(0.7 * torch.randn_like(p))
            elif "c_proj" in name:
                p.copy_(0.3 * torch.randn_like(p))
            elif "gpt.h." in name or "mel_head" in name:
                p.copy_(0.3 * torch.randn_like(p))
            p.copy_(p.half().float())
    return model


def set_biases(model, stop):
    with torch.no_grad():
        model.mel_head.bias[-1] = stop
        # START as a drawn code would be unlike anything a trained model does.
        model.mel_head.bias[-2] = -20.0


class Recorder:
    """Stands in for torch.multinomial: the same draws, kept."""

    def __init__(self):
        self.q, self.real = [], torch.multinomial

    def __call__(self, probabilities, num_samples, **_):
        assert num_samples == 1
        state = torch.get_rng_state()
        expected = self.real(probabilities, 1)
        torch.set_rng_state(state)
        q = torch.empty_like(probabilities).exponential_(1)
        drawn = torch.argmax(probabilities / q, -1, keepdim=True)
        assert torch.equal(drawn, expected), "torch.multinomial no longer computes argmax(p / q)"
        self.q.append(q[0].numpy().copy())
        return drawn


def generate(model, latents, options, seed):
    recorder = Recorder()
    torch.manual_seed(seed)
    torch.multinomial = recorder
    model.init_gpt_for_inference()
    codes = model.generate(cond_latents=latents, text_inputs=torch.tensor([TEXT], dtype=torch.int32), num_return_sequences=1, num_beams=1,
                           length_penalty=1.0, output_attentions=False, **options)
    torch.multinomial = recorder.real
    n = codes.shape[1]
    states = model(torch.tensor([TEXT]), torch.tensor([len(TEXT)]), codes, torch.tensor([n * 1024]), cond_latents=latents,
                   return_attentions=False, return_latent=True)
    return codes[0].numpy(), np.array(recorder.q, np.float32), states[0].numpy()


def processors(options):
    """The list that GenerationMixin builds for these options, in its order."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])])
    if options["do_sample"]:
        chain.append(TemperatureLogitsWarper(options["temperature"]))
        if options["top_k"]:
            chain.append(TopKLogitsWarper(options["top_k"]))
        if options["top_p"] < 1:
            chain.append(TopPLogitsWarper(options["top_p"]))
    return chain


def main():
    model = make_model()
    out = {"meta": np.array(json.dumps({"dims": DIMS, "text": TEXT, "cases": CASES}))}
    rng = np.random.default_rng(5)
    latents = torch.from_numpy(rng.standard_normal((1, DIMS["num_latents"], DIMS["width"])).astype(np.float32))
    logits = (rng.standard_normal((3, DIMS["num_audio_tokens"])) * 3).astype(np.float32)
    history = rng.integers(0, DIMS["num_audio_tokens"], (3, 12))
    out.update({"latents": latents.numpy(), "logits": logits, "history": history.astype(np.int32)})
    with torch.no_grad():
        for seed, (name, options) in enumerate(CASES.items()):
            # Greedy cases must not stop before 50 codes; sampled ones should stop somewhere.
            set_biases(model, options["stop_bias"])
            codes, q, states = generate(model, latents, {k: v for k, v in options.items() if k != "stop_bias"}, seed)
            out.update({f"{name}/codes": codes.astype(np.int32), f"{name}/noise": q, f"{name}/states": states,
                        f"{name}/scores": processors(options)(torch.from_numpy(history), torch.from_numpy(logits.copy())).numpy()})
            print(name, len(codes), len(set(codes.tolist())), codes.tolist())
        out.update({f"weight/{k}": v.numpy().astype(np.float16) for k, v in model.state_dict().items()
                    if k.startswith(DECODING) and not k.startswith("gpt.wte")})
    path = Path(__file__).with_name("sampling.npz")
    np.savez_compressed(path, **out)
    print(f"{path}: {path.stat().st_size} bytes, {len(out)} arrays")


if __name__ == "__main__":
    main()
