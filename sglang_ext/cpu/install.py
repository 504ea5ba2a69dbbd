"""Installs SGLang's CPU recipe into the running interpreter's environment: ``python -m sglang_ext.cpu.install``.

The published SGLang depends on several GB of CUDA packages. On a machine without a GPU it needs only what
``requirements.txt`` lists; torchvision and sglang themselves are then installed without their dependencies. A second
run changes nothing and takes a fraction of a second. Uses the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
WITHOUT_DEPENDENCIES = ("torchvision==0.28.0", "sglang==0.5.17")
# torchvision from the package index is compiled against CUDA; beside a CPU torch its operators are not registered.
BROKEN_TORCHVISION = "operator torchvision::nms does not exist"
EMPTIED = '"""Emptied: these registrations need operators that are not compiled for this machine."""\n'


def missing(requirements: list[str]) -> list[str]:
    """Those of ``name`` or ``name==version`` that are not installed at the wanted version."""
    return [r for r in requirements if not _installed(r)]


def _installed(requirement: str) -> bool:
    name, _, wanted = requirement.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not wanted or found.partition("+")[0] == wanted


def read_requirements(path: Path = REQUIREMENTS) -> list[str]:
    lines = (re.sub(r"\s*#.*", "", line).strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def pip_install(requirements: list[str], *options: str) -> None:
    # pip compiles what it installs: SGLang is imported by many processes, some where Python may write no byte code.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    print(f"installing {', '.join(requirements)} …", flush=True)
    subprocess.run([*pip, *options, *requirements], check=True)


def mend_torchvision() -> bool:
    """Empty torchvision's meta registrations if, and only if, they keep it from being imported.

    Returns whether torchvision can be imported now.
    """
    folder = importlib.metadata.distribution("torchvision").locate_file("torchvision")
    registrations = Path(str(folder)) / "_meta_registrations.py"
    if registrations.read_text() == EMPTIED:
        return True
    probe = [sys.executable, "-c", "import torchvision"]
    first = subprocess.run(probe, capture_output=True, text=True, check=False)
    if first.returncode == 0:
        return True
    if BROKEN_TORCHVISION not in first.stderr:
        print(first.stderr, file=sys.stderr)
        return False
    print(f"emptying {registrations} (its compiled operators need CUDA)", flush=True)
    registrations.unlink()  # it may be a hard link into a package cache
    registrations.write_text(EMPTIED)
    return subprocess.run(probe, check=False).returncode == 0


def main() -> int:
    if wanted := missing(read_requirements()):
        pip_install(wanted)
    if wanted := missing(list(WITHOUT_DEPENDENCIES)):
        pip_install(wanted, "--no-deps")
    if not mend_torchvision():
        print("error: torchvision cannot be imported after installation (see above)", file=sys.stderr)
        return 1
    print("SGLang's CPU recipe is installed", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        sys.exit(f"error: {' '.join(map(str, failed.cmd[:6]))} … failed with exit code {failed.returncode}")
