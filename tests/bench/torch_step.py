"""The same training step in PyTorch, as fast as plain PyTorch goes: bfloat16 autocast, SDPA, fused
AdamW, torch.compile.

A baseline for `tests.bench.step`: conditioning encoder, perceiver, GPT-2 stack, heads, losses,
gradients, update; rows packed as ours, so that plain causal attention serves. Its numbers are
timings; nothing else is compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Multi-head attention through SDPA, on [B, T, C]."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """GPT-2's block."""

    def __init__(self, g, attention_dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(g.width), nn.LayerNorm(g.width)
        self.attention = Attention(g.width, g.heads, True, attention_dropout)
        self.fc, self.proj = nn.Linear(g.width, 4 * g.width), nn.Linear(4 * g.width, g.width)
        self.dropout = g.dropout

    def forward(self, x):
        x = x + F.dropout(self.attention(self.ln_1(x)), self.dropout)
        return x + F.dropout(
            self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")), self.dropout
        )


class Conditioning(nn.Module):
    """Conditioning encoder and perceiver: mel [B, S, 80] -> latents [B, L, C]."""

    def __init__(self, g):
        super().__init__()
        self.init = nn.Linear(g.num_mels, g.width)
        self.norms = nn.ModuleList(
            nn.GroupNorm(g.cond_groups, g.width) for _ in range(g.cond_blocks)
        )
        self.attentions = nn.ModuleList(
            Attention(g.width, g.heads, False, 0.0) for _ in range(g.cond_blocks)
        )
        self.latents = nn.Parameter(torch.randn(g.num_latents, g.width) * 0.02)
        inner, hidden = g.perceiver_heads * g.perceiver_head_dim, int(g.width * 8 / 3)
        layers = [(g.width, inner), (g.width, 2 * inner), (inner, g.width)]
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    *(nn.Linear(i, o, bias=False) for i, o in layers),
                    nn.Linear(g.width, 2 * hidden),
                    nn.Linear(hidden, g.width),
                ]
            )
            for _ in range(g.perceiver_depth)
        )
        self.heads = g.perceiver_heads

    def forward(self, mel):
        x = self.init(mel)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = norm(x.transpose(1, 2)).transpose(1, 2)
            x = x + attention(x)
        z = self.latents.expand(len(x), -1, -1)
        for to_q, to_kv, to_out, up, down in self.layers:
            q, (k, v) = to_q(z), to_kv(torch.cat([z, x], 1)).chunk(2, -1)
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
            z = z + to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            value, gate = up(z).chunk(2, -1)
            z = z + down(value * F.gelu(gate))
        return F.normalize(z, dim=-1) * z.shape[-1] ** 0.5


class Gpt(nn.Module):
    """The stack, to its loss."""

    def __init__(self, g, attention_dropout: float):
        super().__init__()
        self.g = g
        self.conditioning = Conditioning(g)
        self.tokens = nn.Embedding(g.num_text_tokens + g.num_audio_tokens, g.width)
        self.places = nn.Embedding(g.num_text_positions + g.num_audio_positions, g.width)
        self.blocks = nn.ModuleList(Block(g, attention_dropout) for _ in range(g.layers))
        self.ln_f, self.final_norm = nn.LayerNorm(g.width), nn.LayerNorm(g.width)
        self.text_head, self.audio_head = (
            nn.Linear(g.width, g.num_text_tokens),
            nn.Linear(g.width, g.num_audio_tokens),
        )

    def forward(self, mel, ids, positions, text_targets, audio_targets):
        latents = self.conditioning(mel)
        x = torch.cat([latents, self.tokens(ids) + self.places(positions)], 1)
        x = F.dropout(x, self.g.dropout)
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(self.ln_f(x))[:, self.g.num_latents :]
        text = self.text_head(x[:, : text_targets.shape[1]])
        text_ce = F.cross_entropy(
            text.flatten(0, 1).float(), text_targets.flatten(), ignore_index=-1
        )
        audio_ce = F.cross_entropy(
            self.audio_head(x).flatten(0, 1).float(), audio_targets.flatten(), ignore_index=-1
        )
        return 0.01 * text_ce + audio_ce


def measure(
    dims, batch: int, bucket, steps: int, *, compile: bool, attention_dropout: float = 0.0
) -> dict:
    """The same keys as a row of ours."""
    from tests.bench.step import make_batch
    from tests.bench.torch_timing import timed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(dims.gpt, attention_dropout)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-6, betas=(0.9, 0.96), weight_decay=0.01, fused=device == "cuda"
    )
    arrays = {k: torch.from_numpy(v).to(device) for k, v in make_batch(dims, bucket).items()}
    inputs = [arrays["cond_mel"].float()]
    inputs += [arrays[k].long() for k in ("ids", "positions", "text_targets", "audio_targets")]
    run = torch.compile(model) if compile else model

    def once():
        with torch.autocast(device, torch.bfloat16):
            loss = run(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(once, steps, batch, model)
