"""Train XTTS: producers make batches on one GPU, the trainer trains on another, ZeroMQ between
them.

python launch.py [--config X.yaml] [flags] [key=value ...]    train (no config: configs/demo.yaml)
python launch.py COMMAND --help                               everything else
"""  # PYTHON_ARGCOMPLETE_OK: the shell may complete this program's lines (docs/operations.md)

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

from common.gpu import choose
from common.gpu.choose import Device, Devices
from common.gpu.listing import list_gpus
from common.launcher import (
    completion,
    config_command,
    finetune,
    flags,
    hosts,
    ownership,
    remote,
    resolve,
    show_status,
)
from common.launcher.child import Program
from common.launcher.console import Console
from common.launcher.examples import EXAMPLES
from common.launcher.flags import Command, switch
from common.launcher.program import environment, make_program, page_of, producer_spec
from common.launcher.supervise import Supervisor
from common.run.folder import RunFolder
from common.run.settings import Config
from common.system import home, status
from common.system.cores import cores
from common.system.errors import (
    FAILED,
    INTERRUPTED,
    OK,
    TERMINATED,
    BadInput,
    RunError,
    Stopped,
    disk_refuses,
)
from common.system.lock import Holder, holder
from producer.corpus.recordings import sort, split, transcribe
from trainer.commands import coqui
from trainer.commands import page as page_command
from trainer.commands import synthesize as synthesize_command

ROOT = Path(__file__).resolve().parent
PROFILES = ("XTTS_PROFILE", "XTTS_TRACE")  # what `launch.py profile` asks of its processes


# -- commands --------------------------------------------------------------------------------------


def train(config: Config, out: TextIO | None = None) -> int:
    """Create or resume the run and see it through.

    Returns the exit code; BadInput before any process starts.
    """
    devices = choose.choose_gpus(config, list_gpus(), os.environ)
    with ownership.own_run(config.run_dir) as trainer:
        if trainer is not None:
            config, at_work = _beside(trainer, config, devices, out)
            if at_work:
                program = make_program(config, config.run_dir, devices)
                return _supervise(program, devices.notes, out)
        ownership.check_binds(config)
        run = _prepare(config, devices, out)
        program = make_program(run.config, config.run_dir, devices)
        return _supervise(program, devices.notes, out)


def _beside(
    trainer: Holder, config: Config, devices: Devices, out: TextIO | None
) -> tuple[Config, bool]:
    """(settings, whether the trainer that works in the run already stays): it stays where it has
    all the settings that are asked for, else it saves and makes room.
    """
    from producer.creation import prepare, resume

    existing = RunFolder(config.run_dir)
    wanted = prepare.resumed(config, existing, devices.trainer.kind == "cpu", cores())
    changed = resume.changes(existing.config, wanted)
    if not changed:
        tell(f"{trainer} is at work in {config.run_dir}: going on with it", out)
        return existing.config, True
    tell(f"{trainer} is at work with other settings ({'; '.join(changed)})", out)
    ownership.make_room(config.run_dir, True, lambda text: tell(text, out))
    return config, False


def train_command(args: argparse.Namespace) -> int:
    """Create or resume a run: producers and trainer, supervised."""
    for answer in flags.answers(args):
        tell(answer)
    if not args.config:
        tell(f"settings: {resolve.settings_file(args)} (--config names another file)")
    return train(resolve.config_of(args))


def trainer_command(args: argparse.Namespace) -> int:
    """Start a run's trainer alone, while its producers stay up; or a further one on its host."""
    if (rank := hosts.rank_of(args, os.environ)) == 0:
        return train_command(args)
    if rank is not None:
        return hosts.further_trainer(args, rank, list_gpus, tell, _supervise)
    config, changed = resolve.existing_run(args)
    devices = choose.choose_gpus(config, choose.without_use(list_gpus()), os.environ)
    ownership.make_room(config.run_dir, args.replace, tell)
    ownership.check_binds(config)
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
    if not far and status.run_is_over(config.run_dir):
        tell(
            f"{config.run_dir} is finished, and nothing is left to produce; to go on, start"
            f" launch.py trainer --run {config.run_dir} with a larger train.max_steps first"
        )
        return OK
    name, number, held = ownership.extra_name(config.run_dir, *([far.prefix] if far else []))
    with held:
        device = choose.choose_one(config, args.gpu, number, list_gpus(), os.environ)
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
    """Show which recordings are usable, and why the others are not."""
    from producer.creation import scan_command

    code = scan_command.run(args, resolve.config_of(args), tell)
    if not args.config and not args.json:
        tell(f"settings: {resolve.settings_file(args)} (--config names another file)")
    return code


def split_command(args: argparse.Namespace) -> int:
    """Cut long recordings with subtitles or segments at pauses into a corpus."""
    return split.run(args, tell)


def transcribe_command(args: argparse.Namespace) -> int:
    """Transcribe recordings, with confidences for review."""
    return transcribe.run(args, tell)


def check_command(args: argparse.Namespace) -> int:
    """Check this machine: driver, versions, each GPU, and three real steps."""
    from common.launcher import check

    return check.run(resolve.config_of(args), train, tell)


def profile_command(args: argparse.Namespace) -> int:
    """Measure where the time of steps and batches goes, on your data; the run does not change."""
    from trainer.commands import profile

    out = sys.stderr if args.json else None
    exists = (resolve.config_of(args).run_dir / "identity.json").is_file()
    config, changed = resolve.existing_run(args) if exists else (resolve.config_of(args), None)
    devices = choose.choose_gpus(config, choose.without_use(list_gpus()), os.environ)

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
        trace_file=args.trace,
    )


def status_command(args: argparse.Namespace) -> int:
    """Show what each process of a run is doing."""
    return show_status.run(args, tell)


def stop_command(args: argparse.Namespace) -> int:
    """Stop a run; its trainer saves first."""
    ownership.stop_run(resolve.run_dir_of(args), tell)
    return OK


def report_command(args: argparse.Namespace) -> int:
    """Write a run's page: RUN/report.html, or one page about several runs."""
    return page_command.run(args, tell)


def serve_command(args: argparse.Namespace) -> int:
    """Show a run's page in a browser while it trains, and /metrics for Prometheus."""
    return page_command.serve(args, tell)


def explain_command(args: argparse.Namespace) -> int:
    """Explain the settings."""
    return config_command.run(args, tell)


def import_command(args: argparse.Namespace) -> int:
    """Turn Coqui's XTTS v2 files into a folder of weights, for fine-tuning (model.weights) and
    speaking.
    """
    return coqui.import_files(args, tell)


def export_command(args: argparse.Namespace) -> int:
    """Write a folder that Coqui's XTTS loads: from imported weights, or from a run that started
    from them.
    """

    def device() -> tuple[Device, dict[str, str | None]]:
        chosen = synthesize_command.device_of(args.device)
        return chosen, environment(chosen)

    return coqui.export(args, tell, device)


def synthesize(args: argparse.Namespace) -> int:
    """Say a text in the voice of reference clips, with a run's checkpoint or imported weights."""
    return synthesize_command.run(args, environment, tell)


def finetune_command(args: argparse.Namespace) -> int:
    """Turn a folder of recordings into a voice: a folder that any Coqui tool loads."""
    from producer.creation.begin import languages_of

    return finetune.run(
        args, tell, finetune.Tools(main, sort.sort, languages_of, transcribe.language_of)
    )


COMMANDS = {
    "train": Command(train_command, None),
    "finetune": Command(finetune_command, finetune.TABLE, finetune.FLAGS, finetune.WORDS),
    "trainer": Command(trainer_command, ("--run", "--model-gpu"), hosts.TRAINER_FLAGS),
    "producer": Command(producer_command, ("--run",), remote.PRODUCER_FLAGS),
    "bundle": Command(bundle_command, ("--run",), remote.BUNDLE_FLAGS),
    "scan": Command(
        scan_command,
        ("--train-data", "--val-data"),
        {
            "--strict": switch("exit 2 if any row is rejected"),
            "--texts": switch("show up to twenty texts of each language before and after cleaning"),
            "--json": switch("print JSON (explained in docs/data.md)"),
            "--html": {"metavar": "FILE", "help": "write the report as a web page"},
        },
    ),
    "split": Command(split_command, (), split.FLAGS, None),
    "transcribe": Command(transcribe_command, (), transcribe.FLAGS, None),
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
            "--trace": {
                "metavar": "FILE",
                "type": Path,
                "help": "write what each process did when, for ui.perfetto.dev",
            },
            "--json": switch("print JSON"),
        },
    ),
    "status": Command(status_command, ("--run",), show_status.FLAGS),
    "stop": Command(stop_command, ("--run",)),
    "serve": Command(serve_command, ("--run",), page_command.SERVE_FLAGS),
    "report": Command(report_command, ("--run",), page_command.FLAGS),
    "config": Command(explain_command, (), config_command.FLAGS, config_command.WORDS),
    "synthesize": Command(synthesize, ("--run",), synthesize_command.FLAGS),
    "import-coqui": Command(import_command, (), coqui.IMPORT_FLAGS, None),
    "export-coqui": Command(export_command, ("--run",), coqui.EXPORT_FLAGS),
}


# -- steps the commands share ----------------------------------------------------------------------


def tell(text: str, out: TextIO | None = None) -> None:
    """A line on stdout; a closed terminal does not end the run."""
    with contextlib.suppress(OSError, ValueError):
        (out or sys.stdout).write(text + "\n")
        (out or sys.stdout).flush()


def _prepare(config: Config, devices: Devices, out: TextIO | None = None):
    from producer.creation.prepare import prepare_run

    with ownership.preparing(config.run_dir):
        return prepare_run(
            config,
            on_cpu=devices.trainer.kind == "cpu",
            cores=cores(),
            out=lambda text: tell(text, out),
        )


def _supervise(program: Program, notes: tuple[str, ...], out: TextIO | None = None) -> int:
    for line in (*notes, *program.describe(), f"logs: {program.run_dir / 'logs'}"):
        tell(line, out)
    trains = any(p.role == "trainer" for p in program.processes)
    with page_of(program) if trains else contextlib.nullcontext(), Console(program, out) as view:
        code = Supervisor(program, view).run()
    if not trains:
        return code
    if code == OK:
        from trainer.report import summary

        note = summary.show(program.run_dir, out or sys.stdout)
        tell(
            f"done: {program.run_dir} (report.html, samples/, summary.json; all curves: tensorboard"
            f" --logdir {program.run_dir}){note}",
            out,
        )
    elif (
        code in (INTERRUPTED, TERMINATED)
        and (s := status.read(program.run_dir, "trainer")) is not None
    ):
        how = (
            f"stopped; {s.stage_name} is saved up to step {s.saved_step}, and the same command"
            " resumes there"
            if s.stage_name
            else "stopped while starting; the same command goes on"
        )
        tell(f"{how}; to look at: {program.run_dir / 'report.html'}", out)
    return code


def _parser(name: str) -> flags.Parser:
    command = COMMANDS[name]
    text = inspect.cleandoc(command.run.__doc__)
    if name == "train":
        text += "\n\ncommands (launch.py COMMAND --help):\n" + "\n".join(
            f"  {n:<12} {' '.join(c.run.__doc__.split())}" for n, c in COMMANDS.items()
        )
    parser = flags.build(
        "launch.py" if name == "train" else f"launch.py {name}",
        text,
        command.flags,
        tuple(f"python launch.py {e}" for e in EXAMPLES[name]),
        command.words,
    )
    for flag, options in (command.own or {}).items():
        parser.add_argument(flag, **options)
    if name == "train":
        parser.add_argument("--version", action="version", version=flags.version(ROOT))
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
    home.settle(os.environ)
    for name in PROFILES:  # a user's own would make any run one that is profiled
        os.environ.pop(name, None)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell script's background job starts with it ignored
    for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, _terminated)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _terminated)
    if completion.asked(os.environ):
        completion.complete(_parser, COMMANDS)
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    try:
        args = flags.parse(_parser(name), rest)
        return COMMANDS[name].run(args)
    except Stopped as e:  # as was asked for
        sys.stderr.write(f"{e}\n")
        return e.exit_code
    except RunError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except Exception as e:  # the process's edge
        refusal = disk_refuses(e)
        if refusal is None:
            raise
        sys.stderr.write(f"error: {refusal}\n")
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
