"""Plot of the ``--json`` output of ``benchmarks.recovery``: how long a kill stops training.

One bar for each peer, on a logarithmic scale, with every kill as a dot. Writes an SVG that is
readable on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, LEFT, RIGHT, TOP = 720, 44, 120, 90, 34
NAMES = {"ours": "nbelastic", "torchft": "torchft", "torchrun": "torchrun"}
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.tick { font-size: 12px; fill: #57606a }
line { stroke: #d0d7de }
.bar { fill: #54aeff } .ours { fill: #2da44e } .dot { fill: #24292f; opacity: .45 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .tick { fill: #9da7b3 } line { stroke: #3d444d } .dot { fill: #e6edf3 }
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("figures", type=Path, help="what benchmarks.recovery --json has written")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--model", default="mlp-1m")
    options = parser.parse_args()
    results = json.loads(options.figures.read_text())
    (ranks, models), *_ = results["worlds"].items()
    world = models[options.model]
    options.picture.write_text(picture(f"{ranks} ranks, {options.model}", world))
    return 0


def picture(title: str, world: dict[str, list[dict[str, Any]]]) -> str:
    """Return the SVG; `world` has the kills of each peer, with milliseconds under ``total``."""
    times = {peer: [max(kill["total"], 1.0) for kill in kills] for peer, kills in world.items()}
    every = [time for each in times.values() for time in each]
    low = math.floor(math.log10(min(every)))
    high = math.ceil(math.log10(max(every)))
    height = TOP + ROW * len(times) + 30

    def x(time: float) -> float:
        return LEFT + (math.log10(time) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<text x="0" y="18">{escape(title)}: from a kill to the next step, less one step</text>',
    ]
    for power in range(low, high + 1):
        place = x(10.0**power)
        bottom = height - 24
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>')
        label = _label(10.0**power)
        where = f'x="{place:.1f}" y="{height - 8}" text-anchor="middle"'
        parts.append(f'<text class="tick" {where}>{label}</text>')
    for row, (peer, each) in enumerate(times.items()):
        middle, y = statistics.median(each), TOP + ROW * row
        parts.append(f'<text x="0" y="{y + 27}">{escape(NAMES.get(peer, peer))}</text>')
        kind = "ours" if peer == "ours" else "bar"
        width = x(middle) - LEFT
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y + 10}" width="{width:.1f}" height="24" rx="3"/>'
        )
        parts += [f'<circle class="dot" cx="{x(t):.1f}" cy="{y + 22}" r="2.5"/>' for t in each]
        end = max(x(max(each)), x(middle)) + 8
        parts.append(f'<text x="{end:.1f}" y="{y + 27}">{_label(middle)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _label(milliseconds: float) -> str:
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.3g} s"


if __name__ == "__main__":
    sys.exit(main())
