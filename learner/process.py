"""The learner process: ``python -m learner.process --address ipc:///… --state-dir …``, or ``conflux learner``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import threadpoolctl  # type: ignore[import-untyped]
import zmq

from learner.address import AddressError, check_address, is_private
from learner.logs import log_to_stderr
from learner.pool import EstimatorPool
from learner.private import PrivateDirectory, remove_socket_of
from learner.server import SAVE_S, LearnerServer, bound_socket
from learner.store import StateStore, default_state_dir

logger = logging.getLogger("learner")

USAGE_ERROR = 2

NICENESS = 5
THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def parser() -> argparse.ArgumentParser:
    """The options of ``conflux learner``."""
    options = argparse.ArgumentParser(
        prog="conflux learner",
        description="Learn latency models from the timings of schedulers, and publish them to the schedulers.",
        allow_abbrev=False,
    )
    options.add_argument(
        "--address",
        "--bind",
        metavar="ADDRESS",
        help="where to listen: ipc:///PATH or tcp://HOST:PORT (default: a new private unix socket, which is printed). "
        "Whoever reaches the address can feed the learner: nothing is authenticated",
    )
    options.add_argument("--state-dir", type=Path, help="where learnt models are kept (default: ~/.cache/conflux)")
    options.add_argument("--no-save", action="store_true", help="neither read nor write learnt models")
    options.add_argument("--save-interval", type=float, default=SAVE_S, metavar="SECONDS", help="time between saves")
    options.add_argument("--watch-stdin", action="store_true", help="exit when stdin closes, as it does with a parent")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a learner until it is told to stop. Returns the exit status; wrong options give 2 and one line on stderr."""
    options = parser().parse_args(argv)
    own: PrivateDirectory | None = None
    os.umask(0o077)  # the socket and the state are this user's alone
    context = zmq.Context()
    try:
        if not 0.0 < options.save_interval < 1e6:
            raise AddressError(f"--save-interval {options.save_interval} is no positive number of seconds")
        if options.address is None:
            own = PrivateDirectory()
        address = check_address(options.address) if own is None else own.address
        store = None if options.no_save else StateStore(options.state_dir or default_state_dir())
        socket = bound_socket(context, address)
    except (AddressError, OSError, RuntimeError, zmq.ZMQError) as error:
        reason = f"cannot listen on {options.address}: {error}" if isinstance(error, zmq.ZMQError) else str(error)
        print(f"conflux learner: error: {' '.join(reason.split())}", file=sys.stderr)
        context.term()
        if own is not None:
            own.remove()
        return USAGE_ERROR
    log_to_stderr()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    print(address, flush=True)
    try:
        _serve(socket, store, address, options, stopping)
    finally:
        socket.close()
        context.term()
        if own is not None:
            own.remove()
        elif options.watch_stdin:
            remove_socket_of(address)  # a supervisor that was killed cannot
    return 0


def _serve(
    socket: zmq.Socket[bytes],
    store: StateStore | None,
    address: str,
    options: argparse.Namespace,
    stopping: list[int],
) -> None:
    learner_id = uuid.uuid4().hex
    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle("conflux::learner")
    logger.info("listening on %s; state in %s", address, store.directory if store is not None else "memory only")
    if not is_private(address):
        logger.warning("other machines can reach %s, and nothing is authenticated", address)

    def stop() -> bool:
        # A child that the parent forked may hold the other end of stdin open after the parent's death.
        return bool(stopping) or (options.watch_stdin and os.getppid() != parent)

    # One thread of linear algebra: what is loaded by now is told so, the rest reads the environment when it is loaded.
    os.environ.update(dict.fromkeys(THREAD_COUNTS, "1"))
    # Takes seconds, in which schedulers are to be answered and heard; the first fit waits for it.
    loading = threading.Thread(target=_load, name="load")
    loading.start()
    with threadpoolctl.threadpool_limits(1):
        pool = EstimatorPool(store, learner_id, may_fit=lambda: not loading.is_alive())
        server = LearnerServer(socket, pool, learner_id, save_interval_s=options.save_interval)
        why = server.run(stop, sys.stdin.fileno() if options.watch_stdin else None)
    logger.info("ending: %s; received %d, rejected %d", why, server.counts.received, server.rejected)


def _load() -> None:
    # Where the program ends meanwhile Python refuses what is left of the import.
    with contextlib.suppress(RuntimeError):
        importlib.import_module("sklearn.linear_model")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is closed, and scikit-learn may still be loading
