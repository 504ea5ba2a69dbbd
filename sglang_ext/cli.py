"""The ``conflux`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_ext.config import add_arguments

COMMANDS = {
    "doctor": "what this machine can do, what conflux will do on it, and what you could change",
    "calibrate": "measure this device's curves of compute and bandwidth",
    "learner": "run a learner of its own, for --conflux-learner ADDRESS",
    "replay": "accuracy of the latency model on a file written with --conflux-record; with --trace, a request trace on "
    "simulated time",
}
_EPILOG = "Serve with:  python -m sglang.launch_server --model-path MODEL --backend conflux [options below]"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="conflux",
        description="A backend for SGLang that shares a GPU between prefill and decode by a learnt latency model.",
        epilog=_EPILOG,
    )
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), help="; ".join(map(": ".join, COMMANDS.items())))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `conflux COMMAND --help`")
    add_arguments(parser)
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments or ["--help"])
        parser.error(f"say what to do: conflux COMMAND, with one of {', '.join(COMMANDS)}")
    command, rest = arguments[0], arguments[1:]
    if command == "doctor":
        from sglang_ext.doctor.command import doctor

        return doctor(rest)
    if command == "calibrate":
        from sglang_ext.calibrate.command import calibrate

        return calibrate(rest)
    if command == "learner":
        from learner.process import main as run

        return run(rest)
    if command == "replay":
        if any(argument.partition("=")[0] == "--trace" for argument in rest):
            from sglang_ext.simulate.command import simulate

            return simulate(rest)
        from learner.cli import replay

        return replay(rest)
    parser.error(f"there is no command {command!r}: choose one of {', '.join(COMMANDS)}")
    return 2
