"""The services that curves can go to: Weights & Biases and MLflow, behind one small interface.

Each package is imported where it is used: by the process that sends to it, if the settings name it.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from common.run.folder import RunFolder
from common.run.settings_text import leaves
from trainer.loggers.follow import Record

log = logging.getLogger(__name__)

EXPERIMENT = "xtts"
_METRICS, _PARAMS = 1000, 100  # MLflow takes so many at a time
_LONGEST = 500  # characters of a parameter, which MLflow takes


class Service(Protocol):
    """Somewhere to send figures to. Any call may raise what the service's package raises."""

    def send(self, records: Sequence[Record]) -> None:
        """Pass on the figures of some steps. A step's figures may come twice."""

    def close(self) -> None:
        """End: nothing more comes."""


class WeightsAndBiases:
    """A W&B run with this run's id; offline if nobody has logged in.

    WANDB_PROJECT, WANDB_MODE and the package's other environment variables apply.
    """

    def __init__(self, run: RunFolder, known: dict):
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", EXPERIMENT),
            id=run.run_id,
            name=run.path.resolve().name,
            dir=str(run.path / "loggers"),
            config=leaves(run.config.model_dump()),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        # Each stage counts its own steps: W&B's one counter must not go back.
        for stage in run.stages:
            self._run.define_metric(f"{stage}/step")
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        if mode == "offline":
            log.info("offline: `wandb sync %s` sends it", Path(self._run.dir).parent)

    def send(self, records: Sequence[Record]) -> None:
        """Pass them to the package's own process, which writes and sends."""
        for r in records:
            values = {f"{r.stage}/{k}": v for k, v in r.values.items()}
            self._run.log({f"{r.stage}/step": r.step} | values)

    def close(self) -> None:
        """Wait until all is written, and sent where it is online."""
        self._run.finish()


class MLflow:
    """An MLflow run: on the server that MLFLOW_TRACKING_URI names, else in files in the run folder.

    `known`: keeps the MLflow run's id, to continue it after a restart.
    """

    def __init__(self, run: RunFolder, known: dict):
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # a database would need all of mlflow; files need only its core
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = (run.path / "loggers" / "mlruns").resolve().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        self._id = known.get("run") if known.get("uri") == uri else None
        if self._id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            found = self._client.get_experiment_by_name(name)
            experiment = (
                found.experiment_id if found is not None else self._client.create_experiment(name)
            )
            made = self._client.create_run(experiment, run_name=run.path.resolve().name)
            self._id = made.info.run_id
            known.clear()
            known.update(uri=uri, run=self._id)  # a retry would create another run
        if not known.get("described"):
            params = [
                Param(k, str(v)[:_LONGEST]) for k, v in leaves(run.config.model_dump()).items()
            ]
            for at in range(0, len(params), _PARAMS):
                self._client.log_batch(self._id, params=params[at : at + _PARAMS])
            known["described"] = True
        log.info("run %s of %s", self._id, uri)

    def send(self, records: Sequence[Record]) -> None:
        """Send them in as few requests as MLflow allows."""
        metrics = [
            self._metric(f"{r.stage}/{k}", v, round(1000 * r.time_s), r.step)
            for r in records
            for k, v in r.values.items()
        ]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def logged_in() -> bool:
    """Whether W&B has a key: from the environment, or from `wandb login`, which writes ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc().authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


SERVICES = {"wandb": WeightsAndBiases, "mlflow": MLflow}
