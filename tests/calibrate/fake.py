"""A measuring child without a GPU: ``python fake.py TROUBLE``, with the input and output of the real one.

TROUBLE is JSON: set index (as a string) → "hang", "crash", "hung" or "fail"; "start" → "crash" or "hang";
"link" → bytes per second, "hang" or "crash".
"""

from __future__ import annotations

import json
import os
import sys
import time

TOTAL_TPCS = 66


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def act(trouble: object) -> None:
    if trouble == "hang":
        time.sleep(600)
    if trouble == "crash":
        os.kill(os.getpid(), 9)


def main() -> None:
    work, trouble = json.loads(sys.stdin.read()), json.loads(sys.argv[1])
    act(trouble.get("start"))
    say(
        step="ready", name="NVIDIA H200", sms=2 * TOTAL_TPCS, torch="2.11.0", cuda="13.0", used_by_others=0.0,
        reads_by="a plain kernel",
    )  # fmt: skip
    if work["peer"]:
        act(trouble.get("link"))
        say(step="link", bytes_per_s=trouble.get("link", 0.0), method="a copy")
    for index, tpcs, green_sms in work["sets"]:
        what = trouble.get(str(index))
        act(what)
        if what in ("hung", "fail"):
            say(step="failed", index=index, reason="a GEMM did not end", hung=what == "hung")
            if what == "hung":
                os._exit(3)
            continue
        share = (len(tpcs) or green_sms // 2 or TOTAL_TPCS) / TOTAL_TPCS
        flop = [2.0 * m * k * n for m, k, n in work["shapes"]]
        gemm_s = [[each / (600e12 * share)] * work["repeats"] for each in flop]
        read_bytes = 1 << 30
        read_s = [read_bytes / (4e12 * min(1.0, 2 * share))] * work["repeats"]
        say(step="set", index=index, gemm_s=gemm_s, read_s=read_s, read_bytes=read_bytes)


if __name__ == "__main__":
    main()
