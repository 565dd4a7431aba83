"""Train XTTS: producers make batches on one GPU, the trainer trains on another, ZeroMQ between
them.

python launch.py [--config configs/x.yaml] [flags] [key=value ...]     train (no config: configs/demo.yaml)
python launch.py COMMAND --help                                        everything else
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TextIO

from common.gpu import choose
from common.gpu.choose import Device, Devices
from common.gpu.xla_env import cache_folder, xla_env
from common.launcher import flags, ownership, remote, resolve
from common.launcher.child import ProcessSpec, Program
from common.launcher.console import Console
from common.launcher.supervise import Supervisor
from common.run import beginning
from common.run.settings import Config
from common.system import status
from common.system.cores import cores
from common.system.errors import INTERRUPTED, OK, TERMINATED, BadInput, RunError, Stopped
from common.system.lock import holder
from producer.corpus.recordings import split, transcribe
from trainer.commands import coqui
from trainer.commands import synthesize as synthesize_command

ROOT = Path(__file__).resolve().parent


# -- the program
# --------------------------------------------------------------------------------------------------


def make_program(config: Config, run_dir: Path, devices: Devices) -> Program:
    """Every process of a run, its device and its environment.

    The trainer first: the producers connect to it.
    """
    run_dir = run_dir.resolve()
    trainer = ProcessSpec(
        name="trainer",
        role="trainer",
        argv=(sys.executable, "-m", "trainer", "--run", str(run_dir)),
        env=environment(devices.trainer, cache_folder(run_dir, "trainer")),
        device=str(devices.trainer),
        log=run_dir / "logs" / "trainer.log",
        main=True,
        by_steps=True,
        grace_s=10.0,
        save_s=30.0,
        lock=run_dir / "lock",
    )
    on = devices.producers
    producers = (
        producer_spec(f"producer-{i}", run_dir, on[i % len(on)])
        for i in range(config.producers.count)
    )
    speaks = sampler_specs(config, run_dir, devices.sampler)
    return Program(run_dir, (trainer, *producers, *speaks))


def producer_spec(name: str, run_dir: Path, device: Device) -> ProcessSpec:
    """A producer: leases batch numbers from the address in RUN/endpoint.json, sends
    batches there.
    """
    return ProcessSpec(
        name=name,
        role="producer",
        argv=(sys.executable, "-m", "producer", "--run", str(run_dir), "--name", name),
        env=environment(device, cache_folder(run_dir, name)),
        device=str(device),
        log=run_dir / "logs" / f"{name}.log",
    )


def sampler_specs(config: Config, run_dir: Path, device: Device) -> tuple[ProcessSpec, ...]:
    """The process that makes samples while the run trains; none where the settings ask for no
    samples before the run's end.
    """
    if not config.sample_every:
        return ()
    return (
        ProcessSpec(
            name="sampler",
            role="sampler",
            argv=(sys.executable, "-m", "trainer.previews.sampler", "--run", str(run_dir)),
            env=environment(device, cache_folder(run_dir, "sampler")),
            device=str(device),
            log=run_dir / "logs" / "sampler.log",
            optional=True,
            leave_s=60.0,  # at the run's end, to finish what it is at
        ),
    )


def environment(device: Device, xla_cache: Path | None = None) -> dict[str, str | None]:
    """A child's environment: its one device, XLA's settings for it, and this project importable
    whatever the working directory holds.
    """
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {
        **choose.child_env(device, os.environ),
        **xla_env(os.environ, device, xla_cache),
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
    }


# -- commands
# --------------------------------------------------------------------------------------------------


def train(config: Config, out: TextIO | None = None) -> int:
    """Create or resume the run and see it through.

    Returns the exit code; BadInput before any process starts.
    """
    devices = choose.choose_gpus(config, choose.list_gpus(), os.environ)
    with ownership.own_run(config.run_dir):
        ownership.check_bind(config.transport.bind)
        run = _prepare(config, devices, out)
        program = make_program(run.config, config.run_dir, devices)
        return _supervise(program, devices.notes, out)


def train_command(args: argparse.Namespace) -> int:
    """Create or resume a run: producers and trainer, supervised."""
    for answer in flags.answers(args):
        tell(answer)
    if not args.config:
        tell(f"settings: {resolve.settings_file(args)} (--config names another file)")
    return train(resolve.config_of(args))


def trainer_command(args: argparse.Namespace) -> int:
    """Start a run's trainer alone, while its producers stay up."""
    config, changed = resolve.existing_run(args)
    devices = choose.choose_gpus(config, choose.without_use(choose.list_gpus()), os.environ)
    ownership.make_room(config.run_dir, args.replace, tell)
    ownership.check_bind(config.transport.bind)
    if changed:
        _prepare(config, devices)
    program = make_program(config, config.run_dir, devices)
    # Neither restarted nor followed here: the run's own launcher adopts this trainer, and two would
    # race.
    alone = tuple(
        replace(p, restarts=0, lock=None) for p in program.processes if p.role != "producer"
    )
    return _supervise(Program(program.run_dir, alone), devices.notes)


def producer_command(args: argparse.Namespace) -> int:
    """Add one more producer to a run, at any time; with --bundle on another host."""
    far = remote.open_bundle(args)
    config, changed = (far.config, ()) if far else resolve.existing_run(args)
    if changed:
        raise BadInput(
            f"a producer takes the run's settings as they are; it cannot set {', '.join(changed)}"
        )
    name, number, held = ownership.extra_name(config.run_dir, *([far.prefix] if far else []))
    with held:
        device = choose.choose_one(config, args.gpu, number, choose.list_gpus(), os.environ)
        spec = producer_spec(name, config.run_dir.resolve(), device)
        if far:
            far.wait_for_trainer(tell)
            spec = replace(spec, argv=(*spec.argv, *far.argv))
        elif holder(config.run_dir / "lock") is None:
            tell(
                f"no trainer runs in {config.run_dir}; the producer waits for one: launch.py"
                f" trainer --run {config.run_dir}"
            )
        return _supervise(Program(config.run_dir.resolve(), (replace(spec, main=True),)), ())


def bundle_command(args: argparse.Namespace) -> int:
    """Write the file that producers on other hosts need (transport.bind=tcp://...)."""
    return remote.write_bundle(resolve.run_dir_of(args), args.out, tell)


def scan_command(args: argparse.Namespace) -> int:
    """Say which recordings are usable, and why the others are not."""
    from rich.console import Console as RichConsole

    from producer.corpus.figures import Figures
    from producer.corpus.page.render import write_page
    from producer.corpus.rows import read_rows
    from producer.corpus.scan import scan
    from producer.creation.prepare import make_vocabulary

    config = resolve.config_of(args)
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise BadInput(f"--html {args.html}: no such folder; make it first")
    with tempfile.TemporaryDirectory(prefix="scan-") as folder:
        rows = read_rows(config)
        start = (
            None
            if config.model.weights is None
            else beginning.locate(config.model.weights, verify=False)
        )
        tokenizer = make_vocabulary(config, rows, None, lambda text: None, start)
        path = Path(folder) / "manifest.sqlite"
        report = scan(config, path, tokenizer, rows=rows, progress=not args.json).report
        if args.json or args.html:
            figures = Figures.of(path, config)
        if args.html:
            write_page(report, figures, path, Path(args.html))
    if args.json:
        tell(json.dumps(report.to_json() | figures.to_json(), ensure_ascii=False))
    else:
        report.print(RichConsole(), texts=args.texts)
        if args.html:
            tell(f"report: {args.html}")
        if not args.config:
            tell(f"settings: {resolve.settings_file(args)} (--config names another file)")
    if args.strict:
        report.require_all()
    return OK


def split_command(args: argparse.Namespace) -> int:
    """Cut long recordings with subtitles or segments at pauses into a corpus."""
    return split.run(args, tell)


def transcribe_command(args: argparse.Namespace) -> int:
    """Write down what is said in recordings, with confidences for review."""
    return transcribe.run(args, tell)


def check_command(args: argparse.Namespace) -> int:
    """Check this machine: driver, versions, each GPU, and three real steps."""
    from common.launcher import check

    return check.run(resolve.config_of(args), train, tell)


def profile_command(args: argparse.Namespace) -> int:
    """Measure where the time of a step and of a batch goes, on your own data; the run itself does
    not change.
    """
    from trainer.commands import profile

    out = sys.stderr if args.json else None
    exists = (resolve.config_of(args).run_dir / "identity.json").is_file()
    config, changed = resolve.existing_run(args) if exists else (resolve.config_of(args), None)
    devices = choose.choose_gpus(config, choose.without_use(choose.list_gpus()), os.environ)

    def supervise(run) -> int:
        program = make_program(run.config, run.path, devices)
        with Console(program, out) as view:
            return Supervisor(program, view).run()

    return profile.run(
        config,
        changed,
        args.steps,
        lambda c: _prepare(c, devices, out),
        supervise,
        as_json=args.json,
    )


def status_command(args: argparse.Namespace) -> int:
    """Show what each process of a run is doing."""
    from rich.console import Console as RichConsole

    run_dir = resolve.run_dir_of(args)
    if not status.read_all(run_dir):
        raise BadInput(f"no process has reported in {run_dir}; --run names the run folder")
    RichConsole(width=None if sys.stdout.isatty() else 160, markup=False).print(
        status.table(run_dir)
    )
    return OK


def stop_command(args: argparse.Namespace) -> int:
    """Stop a run; its trainer saves first."""
    ownership.stop_run(resolve.run_dir_of(args), tell)
    return OK


def import_command(args: argparse.Namespace) -> int:
    """Turn Coqui's XTTS v2 files into a folder of weights: to fine-tune (model.weights), or to
    speak with.
    """
    return coqui.import_files(args, tell)


def export_command(args: argparse.Namespace) -> int:
    """Write a folder that Coqui's XTTS loads: from imported weights, or from a run that began with
    them.
    """

    def device() -> tuple[Device, dict[str, str | None]]:
        chosen = synthesize_command.device_of(args.device)
        return chosen, environment(chosen)

    return coqui.export(args, tell, device)


def synthesize(args: argparse.Namespace) -> int:
    """Say a text in the voice of reference clips, with a run's checkpoint or imported weights."""
    return synthesize_command.run(args, environment, tell)


@dataclass(frozen=True)
class Command:
    """A subcommand: what it runs, the flags of the table it takes (None: all), and its own."""

    run: Callable[[argparse.Namespace], int]
    flags: tuple[str, ...] | None
    own: dict[str, dict] | None = None


def _switch(text: str) -> dict:
    return {"action": "store_true", "help": text}


COMMANDS = {
    "train": Command(train_command, None),
    "trainer": Command(
        trainer_command,
        ("--run", "--model-gpu"),
        {"--replace": _switch("take over from the running trainer, which saves first")},
    ),
    "producer": Command(producer_command, ("--run",), remote.PRODUCER_FLAGS),
    "bundle": Command(bundle_command, ("--run",), remote.BUNDLE_FLAGS),
    "scan": Command(
        scan_command,
        ("--train-data", "--val-data"),
        {
            "--strict": _switch("exit 2 if any row is rejected"),
            "--texts": _switch(
                "show up to twenty texts of each language before and after cleaning"
            ),
            "--json": _switch("print JSON (docs/data.md says what is in it)"),
            "--html": {"metavar": "FILE", "help": "write the report as a page to look at"},
        },
    ),
    "split": Command(split_command, (), split.FLAGS),
    "transcribe": Command(transcribe_command, (), transcribe.FLAGS),
    "check": Command(check_command, ("--data-gpu", "--model-gpu")),
    "profile": Command(
        profile_command,
        None,
        {
            "--steps": {
                "metavar": "N",
                "type": int,
                "default": 100,
                "help": "steps to measure (100)",
            },
            "--json": _switch("print JSON"),
        },
    ),
    "status": Command(status_command, ("--run",)),
    "stop": Command(stop_command, ("--run",)),
    "synthesize": Command(synthesize, ("--run",), synthesize_command.FLAGS),
    "import-coqui": Command(import_command, (), coqui.IMPORT_FLAGS),
    "export-coqui": Command(export_command, ("--run",), coqui.EXPORT_FLAGS),
}


# -- steps the commands share
# --------------------------------------------------------------------------------------------------


def tell(text: str, out: TextIO | None = None) -> None:
    """A line on stdout; a closed terminal does not end the run."""
    with contextlib.suppress(OSError, ValueError):
        (out or sys.stdout).write(text + "\n")
        (out or sys.stdout).flush()


def _prepare(config: Config, devices: Devices, out: TextIO | None = None):
    from producer.creation.prepare import prepare_run

    return prepare_run(
        config,
        on_cpu=devices.trainer.kind == "cpu",
        cores=cores(),
        out=lambda text: tell(text, out),
    )


def _supervise(program: Program, notes: tuple[str, ...], out: TextIO | None = None) -> int:
    for line in (*notes, *program.describe(), f"logs: {program.run_dir / 'logs'}"):
        tell(line, out)
    with Console(program, out) as view:
        code = Supervisor(program, view).run()
    if not any(p.role == "trainer" for p in program.processes):
        return code
    if code == OK:
        note = _show_summary(program.run_dir, out)
        tell(
            f"done: {program.run_dir} (curves.png, samples/, summary.json; all curves: tensorboard"
            f" --logdir {program.run_dir}){note}",
            out,
        )
    elif (
        code in (INTERRUPTED, TERMINATED)
        and (s := status.read(program.run_dir, "trainer")) is not None
    ):
        tell(
            f"stopped; {s.stage_name or 'nothing'} is saved up to step {s.saved_step}, and the same"
            " command resumes there",
            out,
        )
    return code


def _show_summary(run_dir: Path, out: TextIO | None) -> str:
    """Show the figures that the trainer left, as a table; what the last line has to say of them
    besides.
    """
    path, differing = run_dir / "summary.json", 0
    if path.is_file():
        from rich.console import Console as RichConsole

        from trainer.report import summary

        view = RichConsole(
            file=out or sys.stdout, width=None if sys.stdout.isatty() else 110, markup=False
        )
        figures = json.loads(path.read_text())
        view.print(summary.table(figures))
        differing = sum(stage.get("differing", 0) for stage in figures["stages"].values())
    return (
        f"; {differing} batches were made twice, with different bytes (differing.jsonl)"
        if differing
        else ""
    )


def _parser(name: str) -> flags.Parser:
    command = COMMANDS[name]
    text = command.run.__doc__
    if name == "train":
        text += "\n\ncommands (launch.py COMMAND --help):\n" + "\n".join(
            f"  {n:<12} {c.run.__doc__}" for n, c in COMMANDS.items()
        )
    parser = flags.build(
        "launch.py" if name == "train" else f"launch.py {name}", text, command.flags
    )
    for flag, options in (command.own or {}).items():
        parser.add_argument(flag, **options)
    return parser


def _terminated(number: int, frame) -> NoReturn:
    raise Stopped(f"stopped by {signal.Signals(number).name}")


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a Persian path must not end a command in a terminal that knows ASCII alone
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell script's background job starts with it ignored
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _terminated)
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    try:
        args = flags.parse(_parser(name), rest)
        return COMMANDS[name].run(args)
    except RunError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
