"""Draw what the device ran, from a record (``python -m bench.timeline RECORD --from 236 --to 244 --output FILE.svg``).

One row for each stream: mixed batches and decode steps, and the prefill beside them, each with its TPCs and tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from learner.record_file import RecordReader
from learner.records import Iteration, StreamRecord

COLOURS = {"decode": "#4878a8", "prefill": "#c9782f", "mixed": "#7a6aa0"}
ROWS = {"decode": 1, "mixed": 1, "prefill": 0}
_ROOM_MS = 60.0  # that a label with TPCs takes in a figure of half a second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--from", dest="first", type=int, default=1, help="first iteration (default: 1)")
    parser.add_argument("--to", dest="last", type=int, default=20, help="last iteration (default: 20)")
    parser.add_argument("--output", type=Path, required=True, help=".svg, .png or .pdf")
    parser.add_argument("--title", default="")
    given = parser.parse_args()
    with RecordReader(given.record) as reader:
        tpcs = reader.header.device.tpcs
        shown = [one for one in itertools.islice(reader, given.last) if given.first <= one.iteration]
    if not shown:
        print(f"error: {given.record} has no iterations from {given.first} to {given.last}", file=sys.stderr)
        return 1
    draw(shown, tpcs, given.output, given.title)
    return 0


def draw(shown: list[Iteration], tpcs: int, output: Path, title: str) -> None:
    """A figure of these iterations on a device of so many TPCs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6), layout="constrained")
    axes = figure.subplots()
    start_s = min(one.time_s + min(s.step_start_s[0] for s in one.streams) for one in shown)
    for one in shown:
        offset_s = one.time_s - start_s
        for stream in one.streams:
            starts = [1e3 * (offset_s + at) for at in stream.step_start_s]
            widths = [1e3 * (end - at) for at, end in zip(stream.step_start_s, stream.step_end_s, strict=True)]
            row = ROWS[stream.phase]
            axes.broken_barh(
                list(zip(starts, widths, strict=True)),
                (row - 0.38, 0.76),
                facecolors=COLOURS[stream.phase],
                edgecolors="white",
                linewidth=0.8,
            )
            length_ms = starts[-1] + widths[-1] - starts[0]
            if text := _label(stream, tpcs, len(one.streams) > 1, length_ms):
                middle = (starts[0] + starts[-1] + widths[-1]) / 2
                height = row + (0.46 if row else 0.0)
                colour = "black" if row else "white"
                axes.text(middle, height, text, ha="center", va="bottom" if row else "center", color=colour, fontsize=8)
    axes.set_yticks([0, 1], ["prefill", "decode,\nmixed"])
    axes.set_ylim(-0.6, 1.9)
    axes.set_xlabel("milliseconds")
    if title:
        axes.set_title(title, fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(output)


def _label(stream: StreamRecord, tpcs: int, window: bool, length_ms: float) -> str:
    if stream.phase == "decode":
        return f"{len(stream.step_end_s)} steps of {len(stream.q)} on {stream.tpcs} of {tpcs} TPCs" if window else ""
    tokens, where = f"{sum(stream.q)} tokens", f" on {stream.tpcs} of {tpcs} TPCs"
    return tokens + (where if window and length_ms > _ROOM_MS else "")


if __name__ == "__main__":
    sys.exit(main())
