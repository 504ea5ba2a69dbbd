"""How tests are dealt out to pytest-xdist's workers: by file, what takes longest first.

A file that comes late would keep one worker busy while the others have nothing left. Files whose tests share something
that takes long to make, a server or SGLang imported into the worker, stay on one worker.
"""

from __future__ import annotations

from typing import Any

SHARES = {
    "tests/serving/test_clients.py": "a server",
    "tests/serving/test_operations.py": "a server",
    "tests/serving/test_auto.py": "a server",
    "tests/serving/test_refusals.py": "SGLang",
    "tests/cpu/test_grammar.py": "SGLang",
    "tests/ext/test_flags.py": "SGLang",
    "tests/learner/test_estimator.py": "learnt models",
    "tests/learner/test_estimator_state.py": "learnt models",
}
SERVER_PER_TEST = ("tests/serving/test_exactness.py",)
FIRST = (
    "tests/serving/test_clients.py",
    "tests/serving/test_operations.py",
    "tests/serving/test_auto.py",
    *SERVER_PER_TEST,
    "tests/serving/test_ranks.py",
    "tests/serving/test_engine.py",
    "tests/serving/test_refusals.py",
    "tests/learner/test_process_hostile.py",
    "tests/learner/test_process.py",
)


def place(nodeid: str) -> int:
    """Sorts tests by when they should run."""
    file = _file(nodeid)
    return FIRST.index(file) if file in FIRST else len(FIRST)


def scope(nodeid: str) -> str:
    """Tests of one scope run on one worker."""
    file = _file(nodeid)
    return nodeid if file in SERVER_PER_TEST else SHARES.get(file, file)


def make_scheduler(config: Any, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
