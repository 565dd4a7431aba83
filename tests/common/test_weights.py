"""Names, layouts and sizes of the weights, and what happens when a state dict does not fit."""

import keras
import numpy as np
import pytest

from common.xtts import weights
from common.xtts.dims import SIZES
from common.xtts.gpt import Gpt
from common.xtts.layers import Conv1d, GroupNorm, Linear, Module, Window
from tests.support.gpt_cases import MICRO, load_golden


def unallocated(gpt):
    """A model whose variables have shapes but no memory."""
    with keras.StatelessScope(initialize_variables=False):
        return Gpt(gpt)


@pytest.fixture(scope="module")
def full_size():
    return unallocated(SIZES["xtts"].gpt)


def test_full_size_has_the_published_numbers(full_size):
    assert len(weights.tensors(full_size)) == 426
    assert weights.num_parameters(full_size) == 441_018_563


def test_decay_groups_at_full_size(full_size):
    def group(*decays):
        return [
            np.prod(t.torch_shape, dtype=np.int64) for t in full_size.tensors() if t.decay in decays
        ]

    parity, never = group("yes", "parity"), group("no")
    assert (len(parity), sum(parity)) == (147, 431_628_288)
    assert (len(never), sum(never)) == (279, 9_390_275)
    assert len(group("yes")) == 145


def test_full_size_keys_and_shapes(full_size):
    shapes = {key: t.torch_shape for key, t in weights.tensors(full_size).items()}
    expected = {
        "conditioning_encoder.init.weight": (1024, 80, 1),
        "conditioning_encoder.attn.5.qkv.weight": (3072, 1024, 1),
        "conditioning_encoder.attn.0.norm.bias": (1024,),
        "text_embedding.weight": (6681, 1024),
        "gpt.h.29.attn.c_attn.weight": (1024, 3072),
        "gpt.h.0.mlp.c_proj.weight": (4096, 1024),
        "gpt.ln_f.weight": (1024,),
        "mel_pos_embedding.emb.weight": (608, 1024),
        "text_pos_embedding.emb.weight": (404, 1024),
        "mel_head.weight": (1026, 1024),
        "conditioning_perceiver.latents": (32, 1024),
        "conditioning_perceiver.norm.gamma": (1024,),
        "conditioning_perceiver.layers.1.0.to_out.weight": (1024, 512),
        "conditioning_perceiver.layers.0.1.0.weight": (5460, 1024),
        "conditioning_perceiver.layers.0.1.2.weight": (1024, 2730),
    }
    assert {key: shapes.get(key) for key in expected} == expected


def test_keys_and_shapes_are_those_of_coquis_class():
    golden = load_golden()
    ours = {key: t.torch_shape for key, t in weights.tensors(unallocated(golden.gpt)).items()}
    assert ours == {key: array.shape for key, array in golden.weights.items()}


@pytest.mark.parametrize(("size", "low", "high"), [("tiny", 5e5, 2e6), ("small", 35e6, 45e6)])
def test_sizes(size, low, high):
    assert low < weights.num_parameters(unallocated(SIZES[size].gpt)) < high


def test_round_trip_keeps_every_bit():
    state = load_golden().weights
    model = Gpt(load_golden().gpt)
    weights.load_state_dict(model, state)
    back = weights.state_dict(model)
    assert list(back) == [t.key for t in model.tensors()]
    for key, array in state.items():
        np.testing.assert_array_equal(back[key], array)
        assert back[key].flags.c_contiguous


class Small(Module):
    def __init__(self):
        super().__init__("small")
        self.conv = [Conv1d(2, 3, Window(3, stride=2, padding=1), name="encoder.0.0")]
        self.head = Linear(3, 4, name="head")

    def call(self, x):
        return self.head(self.conv[0](x))


def test_layouts_are_torchs():
    """A convolution and a linear layer computed from torch-layout weights by their definitions."""
    rng = np.random.default_rng(0)
    model = Small()
    state = {
        key: rng.standard_normal(t.torch_shape).astype(np.float32)
        for key, t in weights.tensors(model).items()
    }
    assert set(state) == {"encoder.0.0.weight", "encoder.0.0.bias", "head.weight", "head.bias"}
    weights.load_state_dict(model, state)
    for length in (6, 7):
        x = rng.standard_normal((1, length, 2)).astype(np.float32)
        padded = np.pad(x[0], ((1, 1), (0, 0)))
        out = []
        for start in range(0, length, 2):
            window = padded[start : start + 3]  # [k, in]
            conv = (
                np.einsum("oik,ki->o", state["encoder.0.0.weight"], window)
                + state["encoder.0.0.bias"]
            )
            out.append(state["head.weight"] @ conv + state["head.bias"])
        np.testing.assert_allclose(model(x)[0], out, rtol=1e-4, atol=1e-5)


def test_group_norm_by_its_definition():
    rng = np.random.default_rng(0)
    norm = GroupNorm(2, 6, name="norm")
    norm.initialise(0)
    x = rng.standard_normal((2, 5, 6)).astype(np.float32) * 3 + 1
    group = x[1, :, 3:]
    expected = (group - group.mean()) / np.sqrt(group.var() + 1e-5)
    np.testing.assert_allclose(norm(x)[1, :, 3:], expected, rtol=1e-4, atol=1e-5)


def test_a_misfit_is_named_and_changes_nothing():
    model = Small()
    before = weights.state_dict(model)
    state = {key: array + 1 for key, array in before.items()}
    state["head.scale"] = state.pop("head.bias")
    state["head.weight"] = np.zeros((5, 3), np.float32)
    with pytest.raises(weights.WeightsError) as error:
        weights.load_state_dict(model, state)
    message = str(error.value)
    assert "1 missing: head.bias" in message
    assert "1 extra: head.scale" in message
    assert "head.weight is (5, 3), needs (4, 3)" in message
    for key, array in weights.state_dict(model).items():
        np.testing.assert_array_equal(array, before[key])


def test_at_most_twenty_names():
    with pytest.raises(weights.WeightsError, match="and 12 more"):
        weights.check("x", {f"k{i}": (1,) for i in range(32)}, {})


def test_leftovers_of_other_versions_are_passed_over():
    model = Gpt(MICRO)
    state = weights.state_dict(model)
    leftovers = (
        "gpt.wte.weight",
        "gpt.h.0.attn.bias",
        "gpt.h.1.attn.masked_bias",
        "gpt_inference.transformer.ln_f.weight",
    )
    weights.load_state_dict(model, {**state, **{key: np.zeros(1) for key in leftovers}})
    with pytest.raises(weights.WeightsError, match="1 extra: gpt.wpe.weight"):
        weights.load_state_dict(model, {**state, "gpt.wpe.weight": np.zeros(1)})


def test_variables_without_a_key_are_refused():
    model = Small()
    model.stray = model.add_weight(shape=(1,), name="stray")
    with pytest.raises(weights.WeightsError, match="without a checkpoint key: small/stray"):
        weights.tensors(model)


def test_prefixes():
    state = {"a": np.ones(1), "b": np.zeros(2)}
    file = {**weights.with_prefix("gpt.", state), "mel_stats": np.ones(80)}
    assert set(file) == {"gpt.a", "gpt.b", "mel_stats"}
    assert set(weights.without_prefix("gpt.", file)) == {"a", "b"}
