"""`parity: coqui`: turns on, all at once, the behaviours of Coqui's XTTS trainer that are probably
unintended.

Each has its own option, whose default is right for training. Three of the ten are ours too and have
no option: silence, not masked, follows a short conditioning clip; an evaluation ignores no target
and takes its conditioning clip from the start; texts with unknown characters are left out. Source:
coqui-tts, TTS/tts/layers/xtts/trainer/{gpt_trainer,dataset}.py.
"""

from __future__ import annotations

import copy
from typing import Any

from common.system.errors import BadInput

PARITY: dict[str, dict[str, Any]] = {
    "coqui": {
        "text.coqui_cleaning": (
            True
        ),  # numbers, symbols and quotes as XTTS reads them, mistakes included
        "model.parity_init": True,  # from nothing: token embeddings N(0, 1)
        "batching.sampling": "balanced",  # every language equally often, with replacement
        "batching.prompt": "own",
        "batching.mask_prompt": (
            "last_row"
        ),  # only the last row of a batch, and mel frames taken for codes
        "batching.text_stop_input": False,  # hidden in training, but visible at synthesis
        "batching.stop_labels": 4,  # STOP is a target four times
        "batching.code_phases": 1,
        "batching.padded_codes": True,  # a clip's codes depend on the longest clip in its batch
        "train.mean_of_means": True,  # micro-batches of a group count alike, whatever their sizes
        "train.decay_latents": True,  # weight decay on what is not a weight
        "train.code_dropout": 0.0,
        "train.precision": "fp32",
        "train.optim.schedule": ("constant"),  # its milestones count epochs and are never reached
        "train.optim.warmup_steps": 0,
        "transport.mel_dtype": "float32",
    }
}


def with_parity(tree: dict, where: str) -> dict:
    """A copy of the tree with the settings that its `parity` stands for.

    BadInput: the tree sets one of them otherwise. Leaves an unknown `parity` and sections of a
    wrong type to the check of types.
    """
    tree, against = copy.deepcopy(tree), []
    for key, value in PARITY.get(str(tree.get("parity")), {}).items():
        node: Any = tree
        *parents, last = key.split(".")
        for name in parents:
            section = node.get(name) or {}
            if not isinstance(section, dict):
                return tree
            node[name] = dict(section)  # a section that a YAML alias names twice becomes two
            node = node[name]
        if node.setdefault(last, value) != value:
            against.append(f"{key}={node[last]} (parity has {value})")
    if against:
        raise BadInput(
            f"{where}: parity={tree['parity']} means all of XTTS's behaviours, but"
            f" {', '.join(against)}; leave these out, or parity"
        )
    return tree
