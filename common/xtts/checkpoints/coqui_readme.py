"""The README.md of an export: what the folder is, and the code that loads it."""

from __future__ import annotations

from collections.abc import Mapping

from common.xtts.checkpoints.coqui_rules import Rules


def readme(config: Mapping, names: list[str], clips: Mapping[str, str], rules: Rules | None) -> str:
    """Ten lines on what the folder is, and the code that loads it."""
    voice = names[0] if names else None
    languages = ", ".join(config["languages"])
    shown = (
        f"{len(names)} ({', '.join(names[:10])}{', …' if len(names) > 10 else ''})"
        if names
        else "none: give a recording"
    )
    install = (
        ["import coqui_languages", "coqui_languages.install()  # this voice's text rules"]
        if rules
        else []
    )
    if voice is not None:
        latents = [f"latents, speaker = model.speaker_manager.speakers[{voice!r}].values()"]
        if clips:
            latents.append(
                "# or any recording: model.get_conditioning_latents(audio_path=[CLIP],"
                " gpt_cond_len=30, gpt_cond_chunk_len=4)"
            )
    else:
        latents = [
            'latents, speaker = model.get_conditioning_latents(audio_path=["clip.wav"],'
            " gpt_cond_len=30, gpt_cond_chunk_len=4)"
        ]
    sampling = ", ".join(
        f"{k}={config[k]}" for k in ("temperature", "repetition_penalty", "top_k", "top_p")
    )
    code = [
        "import soundfile",
        "from TTS.tts.configs.xtts_config import XttsConfig",
        "from TTS.tts.models.xtts import Xtts",
        *install,
        "config = XttsConfig()",
        'config.load_json("config.json")',
        "model = Xtts(config)",
        'model.load_checkpoint(config, checkpoint_dir=".")',
        *latents,
        f'out = model.inference("Hello there.", "en", latents, speaker, {sampling})',
        'soundfile.write("out.wav", out["wav"], 24000)',
    ]
    packages = " ".join(["coqui-tts", *(rules.packages.values() if rules else ())])
    needs = f"`pip install {packages}` (coqui-tts 0.27 or newer); run this in the folder"
    rest = ", so that coqui_languages.py is found" if rules else ""
    return "\n".join(
        [
            f"An XTTS v2 voice. Languages: {languages}. Voices: {shown}.",
            "",
            f"{needs}{rest}:",
            "",
            "```python",
            *code,
            "```",
            "",
        ]
    )
