"""One stage over an open channel: restores its history, opens a generation, feeds batches to the
loop, closes everything again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from common.run.folder import RunFolder, most_set_aside
from common.run.published import publish
from common.run.settings_text import flat, leaves
from common.system.cores import cores
from common.system.lifecycle import Stop
from common.system.status import StatusFile, read_all
from common.transport.delivery import StopAsked
from common.transport.messages import Offer, Ready
from common.transport.server import BatchFailed, LeaseServer, NoData
from trainer import ahead, gate, profile, stages
from trainer.feed import Feed, Listeners, Quarantine, no_batch
from trainer.finale import TargetCounter, remember_entropy
from trainer.history import judgements
from trainer.history.checkpoint import Read, load_folder
from trainer.history.differing import Differing
from trainer.history.ledger import Ledger
from trainer.history.schedule import Position
from trainer.history.stage_history import restore
from trainer.lead import Lead
from trainer.loop import Loop
from trainer.patience import Patience
from trainer.profile import Profiler
from trainer.ranks.share import every
from trainer.readback import Readback
from trainer.report.clock import Clock
from trainer.report.gpu_use import GpuUse, uuid_of
from trainer.report.observe import Observer
from trainer.report.verdict import Settings
from trainer.report.watch import RECENT_STEPS, Watch
from trainer.saves import Saves
from trainer.stages import Stage
from trainer.step.contract import Step

log = logging.getLogger(__name__)

_WARM_S = 1.0  # batches of producers that are up take less


def train_stage(
    run: RunFolder,
    name: str,
    server: LeaseServer,
    status: StatusFile,
    stop: Stop,
    lead: Lead | None = None,
    read: Read = load_folder,
) -> Stage:
    """Train one stage from its newest checkpoint to its end; return it with its final networks.
    `lead`: the other trainers, if several make its steps. `read`: how a checkpoint is read.

    RunError: stopped, replaced, no data, a history that cannot be used (`Loop.run`, `restore`).
    """
    run.stage_folder(name).mkdir(exist_ok=True)
    built = stages.build(run, name)
    history, position = _restored(run, built, read)
    stage, position = _left_to_train(run, built, position)
    quarantine = _quarantine(run, stage, position)
    differing = _differing(run, stage, history.ledger)
    counter = _counter(run, stage)
    watch = _watch(run, stage, status)
    observer = _observer(run, stage, status, position, watch)
    observer.begin(leaves(run.config.model_dump()), run.path.resolve().name)
    feed = None
    try:
        _open_generation(run, stage, server, position, quarantine)
        step = _made_ready(run, stage, position, server, observer, stop, lead)
        listeners = Listeners(inspect=counter, watch=watch, differing=differing)
        feed = _feed(run, stage, server, stop, quarantine, listeners, lead)
        profiler = _profiler(run, stage, watch)
        step = gate.held(watch.clock.watch(step), stage.number, position.step, stop.is_set)
        step = step if profiler is None else profiler.wrap(step)
        most_bad = run.config.train.max_bad_steps
        readback = Readback(step.read, history.ledger, observer, feed, most_bad)
        patience = Patience(stop, status, run.config.train.save_grace_s)
        agree = lead.agree if lead is not None else lambda step: None
        saves = Saves(history, quarantine, position, step.snapshot, observer, patience, agree)
        loop = Loop(
            step, stage.schedule, stage.spec.score, feed, readback, saves, observer, _why(stop)
        )
        try:
            with _out_of_the_collectors_sight():
                loop.run(position)
            differing.look(server)
        finally:
            observer.traces(stage.step.trace_counts)
            remember_entropy(run, counter)
        if profiler is not None:
            profiler.finish(run.path / profile.FILE, stage.upload, run.config.train.save_every)
        if stage.spec.publishes:
            publish(run, stage.step.state_dict()["model"])
        return built
    finally:
        if feed is not None:
            feed.close()
        _close(history.ledger)
        observer.close()


def _made_ready(
    run: RunFolder,
    stage: Stage,
    position: Position,
    server: LeaseServer,
    observer: Observer,
    stop: Stop,
    lead: Lead | None,
) -> Step:
    """The step, compiled while the producers make the first batches; uncompiled if no step is
    left.
    """
    if lead is not None:
        lead.begin(stage, position.step, server.release)
    if position.step >= stage.schedule.total_steps:
        return stage.step
    own, timed = every if lead is None else lead.computes, profile.free_steps() is not None
    compiled = ahead.prepare(stage, position, observer, stop, own=own, all_first=timed)
    if lead is not None:
        lead.wait_ready()
    wait_ready(server, run, observer, stop, compiled.go_on)
    return compiled.watch(stage.step, observer)


def _why(stop: Stop) -> Callable[[], str | None]:
    """Why the loop must end now; None: it need not."""
    return lambda: (stop.cause or "stop") if stop.is_set() else None


def _counter(run: RunFolder, stage: Stage) -> TargetCounter | None:
    if not stage.spec.speaks:
        return None
    return TargetCounter(stage.schedule.num_eval_batches, run.dims.gpt.num_audio_tokens)


def _profiler(run: RunFolder, stage: Stage, watch: Watch) -> Profiler | None:
    """Of a profile run's last stage."""
    if not profile.free_steps() or stage.name != run.stages[-1]:
        return None
    return Profiler(watch, profile.free_steps())


def _restored(run: RunFolder, stage: Stage, read: Read):
    """The stage's history, and the position from which it goes on."""
    facts = {"identity": run.identity, "dims": run.dims.to_dict()}
    settings = flat(run.config.model_dump(exclude={"run"}))
    history, position = restore(
        stage.files, run.config.train.keep, facts, stage.step.load_state_dict, settings, read
    )
    _say_if_done(stage, position)
    if stage.spec.speaks:  # settings may have changed, and checkpoints may be gone
        judgements.decide(run.path, run.config.train.best_by)
    return history, position


def _left_to_train(run: RunFolder, stage: Stage, position: Position) -> tuple[Stage, Position]:
    """The stage with its initial weights; or, if `train.patience` has ended it, one that ends here:
    nothing is leased, compiled or waited for.
    """
    schedule, since = stage.schedule, judgements.since_best(run.path)
    if position.step == 0:
        stages.first_weights(run, stage)
    if position.step >= schedule.total_steps or not schedule.worn_out(position, since):
        return stage, position
    log.warning(
        "stage %s is at step %d, where train.patience=%d ended it: nothing is left to train; a"
        " larger train.patience, or null, goes on from there",
        stage.name,
        position.step,
        schedule.patience,
    )
    ends_here = replace(schedule, total_steps=position.step)
    return replace(stage, schedule=ends_here), replace(position, evaluated=position.step)


def _say_if_done(stage: Stage, position: Position) -> None:
    if position.step >= stage.schedule.total_steps:
        log.warning(
            "stage %s is at step %d already, of %d that are asked for: nothing is left to train; a"
            " higher --max-steps, or more --epochs, goes on from there",
            stage.name,
            position.step,
            stage.schedule.total_steps,
        )


def _quarantine(run: RunFolder, stage: Stage, position: Position) -> Quarantine:
    num_clips = stage.schedule.train.num_utterances + stage.schedule.eval.num_utterances
    return Quarantine(position.quarantine, most_set_aside(run.config, num_clips))


def _differing(run: RunFolder, stage: Stage, book: Ledger) -> Differing:
    differing = Differing(run.stage_folder(stage.name), bool(run.config.deterministic))
    book.on_difference = differing.trained_again
    return differing


def _close(book: Ledger) -> None:
    """Close the ledger. Report what ends the stage, not a disk that is full by now; missing lines
    belong to steps after the last checkpoint.
    """
    try:
        book.close()
    except OSError as e:
        log.error("the last lines of %s could not be written: %s", book.path, e.strerror or e)


@contextmanager
def _out_of_the_collectors_sight() -> Iterator[None]:
    """Networks and traced programs stay while a stage runs, and a full garbage collection that
    looks at all of them holds every thread: so
    the end of a step would be noticed late (0.3 s with 340 000 objects, of the smallest size;
    nothing measurable without them). Afterwards they are garbage like any other.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _feed(
    run: RunFolder,
    stage: Stage,
    server: LeaseServer,
    stop: Stop,
    quarantine: Quarantine,
    listeners: Listeners,
    lead: Lead | None,
) -> Feed:
    return Feed(
        server,
        planned=stages.planned_batches(run, stage),
        upload=stage.upload,
        data_timeout_s=run.config.transport.data_timeout_s,
        should_stop=stop.is_set,
        quarantine=quarantine,
        listeners=listeners,
        others=lead,
    )


def _watch(run: RunFolder, stage: Stage, status: StatusFile) -> Watch:
    c = run.config
    settings = Settings(
        leases=c.producers.leases,
        high_water_mark=c.transport.high_water_mark,
        mel_dtype=c.transport.mel_dtype,
        bind=c.transport.bind.split(":")[0],
        cache_codes=c.producers.cache_codes,
        producers_on=(
            "cpu" if c.data_gpu == "cpu" or uuid_of(status.value.device) is None else "gpu"
        ),
        cores=cores(),
    )

    # Remote producers have no file here; the sampler's card is a producer's.
    def labels():
        return [
            ("trainer" if s.role == "follower" else s.role, s.device)
            for s in read_all(run.path)
            if s.here and s.alive and s.role in ("trainer", "follower", "producer")
        ]

    return Watch(
        settings,
        Clock(),
        GpuUse(labels),
        recent=profile.all_steps(profile.free_steps() or RECENT_STEPS),
    )


def _observer(
    run: RunFolder, stage: Stage, status: StatusFile, position: Position, watch: Watch
) -> Observer:
    return Observer(
        run.stage_folder(stage.name),
        status,
        stage=(stage.number, stage.name),
        total_steps=max(stage.schedule.total_steps, position.step),
        log_every=run.config.train.log_every,
        window=run.config.transport.high_water_mark,
        step=position.step,
        watch=watch,
    )


def _open_generation(
    run: RunFolder, stage: Stage, server: LeaseServer, position: Position, quarantine: Quarantine
) -> None:
    """Tell the producers the stage, and lease batches from the position on."""
    planned = stages.planned_batches(run, stage)

    def set_aside(plan: str, g: int) -> list[int]:
        return quarantine.of(planned(plan, g)[0]) if len(quarantine) else []

    feature_hash = run.feature_hash(stage.name)
    generation = run.next_generation()
    accept = Acceptance(feature_hash, bool(run.config.deterministic))
    server.open(
        generation,
        Offer(stage.name, feature_hash),
        stage.schedule.batches(position),
        accept,
        set_aside,
    )
    log.info(
        "stage %s, generation %d: steps %d to %d",
        stage.name,
        generation,
        position.step + 1,
        stage.schedule.total_steps,
    )


class Acceptance:
    """Decides which producers may make batches: those with the run's features and, if bits must be
    equal, the same device arithmetic.
    """

    def __init__(self, feature_hash: str, deterministic: bool):
        self.feature_hash, self.deterministic = feature_hash, deterministic
        self._probe: str | None = None
        self._warned = False

    def __call__(self, ready: Ready) -> str | None:
        """Why the producer is refused; None: it is not."""
        if ready.feature_hash != self.feature_hash:
            return (
                "its features are not this run's (config, vocabulary, statistics, DVAE or code"
                " differ): start it from this run's folder, or a new bundle of it"
            )
        if self._probe is None:
            self._probe = ready.probe
        if ready.probe == self._probe:
            return None
        if self.deterministic:
            return (
                "its device computes other bits than the first producer's, and the run is"
                " deterministic: use the same kind of device"
            )
        if not self._warned:
            log.warning(
                "producer %s computes slightly other features than the first one: ids and crops"
                " match, bits do not",
                ready.name,
            )
            self._warned = True
        return None


def wait_ready(
    server: LeaseServer,
    run: RunFolder,
    observer: Observer,
    stop: Stop,
    meanwhile: Callable[[], None],
) -> None:
    """Wait until `min_ready` batches are waiting for step 1. `meanwhile` is called, now and then,
    where that takes longer than warm producers need.

    RunError: none came within `data_timeout_s`, or none can be made.
    """
    transport, began = run.config.transport, time.monotonic()
    wanted = min(transport.min_ready, transport.high_water_mark)

    def tell(ready: int, peers: int) -> None:
        observer.waiting(ready, wanted, peers)
        if time.monotonic() - began > _WARM_S:
            meanwhile()

    try:
        server.wait_ready(
            wanted,
            transport.data_timeout_s,
            stop.is_set,
            tell,
        )
        observer.ready()
    except StopAsked:
        raise stop.error() from None
    except (NoData, BatchFailed) as e:
        raise no_batch(e) from e
