"""What a run starts from:

`model.weights` names imported weights, a Coqui model, or another run's checkpoint.

    pretrained/                  a folder made by import-coqui
    my_voice/                    a folder of Coqui's files (model.pth, config.json, …), an exported
                                 one for example
    runs/a   runs/a@best   runs/a@1200   runs/a/checkpoints/step-00001200
                                 a run of this project: its best checkpoint (where it was evaluated,
                                 else the newest), or the one named

Whatever it is, the new run keeps it as RUN/pretrained, a folder of weights
(`common/xtts/checkpoints/pretrained.py`), hard-linked where the disk allows, so that it takes no
extra room. From then on the run needs nothing outside its folder. Loads no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from common.run.proof import SETTINGS, Proof
from common.run.settings_text import bounded_bytes, read_yaml
from common.run.stages import FAMILY
from common.system.documents import read_json
from common.system.errors import BadInput
from common.system.files import file_digest
from common.xtts.checkpoints import coqui, coqui_folder, pretrained
from common.xtts.checkpoints.coqui_folder import CoquiFiles
from common.xtts.checkpoints.pretrained import CoquiError
from common.xtts.checkpoints.pth_zip import PthError
from common.xtts.dims import ModelDims

FOLDER = "pretrained"  # in a run
BEST = "best.json"  # if another score than the held-out loss names the best checkpoint
LIST = f"{FOLDER}/dims.json"  # contains the digests of the other files in the folder
_WHICH = re.compile(r"(.+)@(best|newest|\d+)")
_STEP = re.compile(r"step-(\d{8,})")
_COMING = (
    "`launch.py import-coqui --model MODEL --out pretrained/` makes a folder of weights of Coqui's"
    " files"
)


@dataclass(frozen=True)
class Beginning:
    """The files a run starts from; None: there is none.

    Attributes:
        text: as model.weights names it.
        pieces: the folder with vocoder, speaker encoder, settings and voices.
        coquis: Coqui's own files, still to be imported; there is no file of the GPT yet then.
        text_settings: the section `text` of the run that the checkpoint belongs to.
    """

    text: str
    dims: ModelDims
    gpt: Path | None = None
    dvae: Path | None = None
    mel_stats: Path | None = None
    vocab: Path | None = None
    pieces: Path | None = None
    coquis: CoquiFiles | None = None
    is_folder: bool = False  # already a folder of weights, and complete
    text_settings: dict = field(default_factory=dict)

    def make(self, folder: Path) -> None:
        """Create `folder` and fill it with these files.

        BadInput: files are gone or have changed, or there is no room for them.
        """
        try:
            folder.mkdir(parents=True)
            with as_bad_input(self.text):
                if self.coquis is not None:
                    coqui.fill_folder(self.coquis, folder)
                elif self.is_folder:
                    self._link_folder(folder)
                else:
                    self._link_parts(folder)
        except OSError as e:  # that run may train on, and drop a checkpoint in the meantime
            raise BadInput(
                f"model.weights={self.text}: {e.filename or folder}: {e.strerror}; try again, or"
                " name another"
            ) from e

    def _link_folder(self, folder: Path) -> None:
        for name in pretrained.file_digests(self.pieces):
            if name not in ("vocab", "config"):
                pretrained.verified(self.pieces, name)
        for path in sorted(self.pieces.iterdir()):
            if path.suffix in (".safetensors", ".json"):
                _link(path, folder / path.name)

    def _link_parts(self, folder: Path) -> None:
        digests, vocoder = {}, None
        own = {"model": self.gpt, "dvae": self.dvae, "mel_stats": self.mel_stats}
        for name, path in own.items():
            if path is not None:
                _link(path, folder / f"{name}.safetensors")
        _link(self.vocab, folder / "vocab.json")
        if self.pieces is not None:
            vocoder = pretrained.read_vocoder_dims(self.pieces)
            for name in (
                "hifigan.safetensors",
                "speaker_encoder.safetensors",
                "speakers.safetensors",
                "config.json",
            ):
                if (self.pieces / name).is_file():
                    _link(self.pieces / name, folder / name)
        for path in sorted(folder.iterdir()):
            digests[path.stem] = pretrained.digest_of(path)
        pretrained.write_document(folder, self.dims, vocoder, digests)


def locate(text: str, verify: bool = True) -> Beginning:
    """Find what model.weights names. `verify`: read a checkpoint whole and compare its digest.

    BadInput: a run cannot start from it; says what it is instead.
    """
    named = None if Path(text).exists() else _WHICH.fullmatch(text)
    path, which = (Path(named.group(1)), named.group(2)) if named else (Path(text), None)
    step = _STEP.fullmatch(path.name)
    if step and path.parent.name == "checkpoints":
        path, which = path.parent.parent, step.group(1)
    if (path / "identity.json").is_file():
        return _of_run(text, path, which, verify)
    if which is not None:
        raise BadInput(
            f"model.weights={text}: {path} is not a run folder, but {'@' + which} names a"
            " checkpoint of one"
        )
    with as_bad_input(text):
        if (path / "dims.json").is_file():
            return _of_weights(text, path)
        if path.is_dir() and coqui_folder.is_model_folder(path):
            files = coqui_folder.files_of(path)
            return Beginning(
                text, coqui.read_sizes(files), vocab=files.vocab, dvae=files.dvae, coquis=files
            )
    if path.is_file():
        raise BadInput(
            f"model.weights={text} is a file: name the folder it is in, or import it; {_COMING}"
        )
    what = "is not a folder of imported weights" if path.is_dir() else "is not there"
    raise BadInput(f"model.weights={text} {what}, nor a run or a model of Coqui's; {_COMING}")


def absolute(text: str) -> str:
    """`text` with an absolute path: processes may start in another folder."""
    named = None if Path(text).expanduser().exists() else _WHICH.fullmatch(text)
    path, which = (named.group(1), f"@{named.group(2)}") if named else (text, "")
    return f"{Path(path).expanduser().absolute()}{which}"


def _of_weights(text: str, folder: Path) -> Beginning:
    def there(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    return Beginning(
        text,
        pretrained.read_dims(folder),
        gpt=folder / "model.safetensors",
        dvae=there("dvae.safetensors"),
        mel_stats=there("mel_stats.safetensors"),
        vocab=there("vocab.json"),
        pieces=folder,
        is_folder=True,
    )


def _of_run(text: str, run: Path, which: str | None, verify: bool) -> Beginning:
    identity = Proof.read(run).identity
    if identity.get("kind", FAMILY) != FAMILY:
        raise BadInput(f"model.weights={text}: {run} trains no networks")
    try:
        gpt = checkpoint_of(run, which, verify)
    except BadInput as e:
        raise BadInput(f"model.weights={text}: {e}") from e
    dims = ModelDims.from_dict(identity["dims"])
    own = {
        "dvae": run / "dvae" / "model.safetensors",
        "mel_stats": run / "mel_stats.safetensors",
        "vocab": run / "vocab.json",
    }
    settings = _settings(run).get("text") or {}
    return Beginning(text, dims, gpt=gpt, pieces=pieces_of(run), text_settings=settings, **own)


def _settings(run: Path) -> dict:
    """A run's settings as plain values; not as `Config`, whose module imports this one.

    BadInput: they cannot be read.
    """
    recorded, path = Proof.read(run).settings, run / SETTINGS
    if recorded is not None:
        return recorded
    try:
        found = read_yaml(bounded_bytes(path).decode(), str(path))
        if not isinstance(found, dict):
            raise ValueError("no settings are in it")
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise BadInput(f"{path} cannot be read: {e}; restore it from a copy") from e
    return found


def pieces_of(run: Path, given: str | os.PathLike | None = None) -> Path | None:
    """The folder with a run's vocoder, speaker encoder and voices; None: the run started from
    nothing, or from a run that did.

    Args:
        given: a folder that the user names because the run's own is gone (in runs made before runs
        kept it).

    Raises:
        BadInput: it no longer exists, or `given` is no such folder.
    """
    own = run / FOLDER
    if given is not None:
        own = Path(given)
        with as_bad_input(os.fspath(given), "--weights"):
            pretrained.read_dims(own)
    elif not (own / "dims.json").is_file():
        text = (_settings(run).get("model") or {}).get("weights")
        if text is None:
            return None
        own = Path(text)
    if pretrained.has_vocoder(own):
        return own
    if (own / "dims.json").is_file() and pretrained.read_vocoder_dims(own) is None:
        return None
    raise BadInput(
        f"{run} started from the weights in {own}, and their vocoder is no longer there: name the"
        " folder, --weights FOLDER"
    )


def checkpoint_of(run: Path, which: str | None, verify: bool = True) -> Path:
    """The GPT in one of a run's checkpoints, after comparing its digest.

    `which`: a step, "newest" or "best"; None: the best, or the newest if the run was never
    evaluated.

    Raises:
        BadInput: no such checkpoint, or it is damaged.
    """
    if which is not None and which not in ("best", "newest") and not which.isdigit():
        raise BadInput(f"--step {which}: a number, newest or best")
    folder = run / "checkpoints"
    names = {p: _STEP.fullmatch(p.name) for p in folder.iterdir()} if folder.is_dir() else {}
    found = {int(match.group(1)): p for p, match in names.items() if match}
    if not found:
        raise BadInput(f"{run} has no checkpoint yet")
    newest, wanted = max(found), which
    try:
        best = _judged_best(run, found)
        if best is None:
            best = read_json(found[newest] / "state.json").get("best_step")
        wanted = which or ("newest" if best is None else "best")
        step = {"newest": newest, "best": best}.get(wanted) if not wanted.isdigit() else int(wanted)
        path = found[step] / "model.safetensors"
        whole = (
            not verify
            or file_digest(path) == read_json(found[step] / "state.json")["digests"]["model"]
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = "" if isinstance(e, KeyError) and e.args[0] not in found else f" ({e})"
        raise BadInput(
            f"{run} has no whole checkpoint {wanted or newest}; it has {sorted(found)}{why}"
        ) from e
    if not whole:
        raise BadInput(
            f"{path} is damaged (its digest differs); choose another --step of {sorted(found)}"
        )
    return path


def _judged_best(run: Path, found: Container[int]) -> int | None:
    """The step that RUN/best.json names, if it is in `found`; the trainer rewrites a damaged
    best.json.
    """
    try:
        step = read_json(run / BEST)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if step in found else None


@contextlib.contextmanager
def as_bad_input(text: str, setting: str = "model.weights") -> Iterator[None]:
    """Report faults of files as faults of the setting that names them."""
    try:
        yield
    except (CoquiError, PthError) as e:
        raise BadInput(f"{setting}={text}: {e}") from e


def _link(source: Path, to: Path) -> None:
    """Give the file another name; copy it where the disk has no links.

    Neither run ever writes into such files.
    """
    try:
        os.link(source, to)
    except OSError:
        shutil.copyfile(source, to)
