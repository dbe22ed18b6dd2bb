"""Draw a trace: one row per track, one bar per span, a colour per layer.

    lema train CONFIG --trace trace.json
    python benchmarks/trace_picture.py trace.json docs/trace.png

Without a trace, a small model is trained for a few steps on files dropped from the page cache, and
that is drawn:

    python benchmarks/trace_picture.py --demo docs/trace.png
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

TRACKS = [
    "read",
    "upload",
    "stall: disk",
    "stall: upload",
    "forward",
    "backward",
    "boundaries",
    "optimizer",
]
WITHOUT_LAYER = "0.55"  # grey


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="[TRACE] PICTURE")
    parser.add_argument(
        "--demo", action="store_true", help="trace a small model instead of reading a trace"
    )
    parser.add_argument(
        "--steps", type=int, default=1, help="draw this many optimizer steps, the last ones"
    )
    parser.add_argument("--tokens", type=int, default=192, help="of one step of the demo")
    parser.add_argument(
        "--directory", type=Path, help="where to write the demo's model (a disk, not memory)"
    )
    arguments = parser.parse_args()
    if len(arguments.files) != (1 if arguments.demo else 2):
        parser.error("give a trace and a picture, or --demo and a picture")
    if arguments.demo:
        events = _trace_of_a_small_model(arguments.tokens, arguments.directory)
    else:
        events = json.loads(arguments.files[0].read_text())["traceEvents"]
    draw(_last_steps(events, arguments.steps), arguments.files[-1])
    print(f"wrote {arguments.files[-1]}")


def draw(events: list[dict[str, Any]], png: Path) -> None:
    """Draw the spans of a trace."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    start = min(span["ts"] for span in spans)
    whole = max(span["ts"] + span["dur"] for span in spans) - start
    # a row where nothing shows is left out
    used = {span["tid"] for span in spans if span["dur"] > whole / 1000}
    spans = [span for span in spans if span["tid"] in used]
    rows = sorted(used, key=lambda row: (_track(names[row]), names[row]))
    num_layers = 1 + max(
        (layer for span in spans if (layer := _layer(span["name"])) is not None), default=0
    )
    colours = colormaps["viridis"].resampled(num_layers)
    figure = Figure(figsize=(12, 0.8 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="milliseconds")
    for span in spans:
        layer = _layer(span["name"])
        place = rows.index(span["tid"])
        colour = WITHOUT_LAYER if layer is None else colours(layer)
        left = (span["ts"] - start) / 1e3
        width = span["dur"] / 1e3
        gap = min(0.3, span["dur"] / whole * 100)  # thin bars have no room for an edge
        axes.broken_barh(
            [(left, width)],
            (place - 0.4, 0.8),
            facecolors=colour,
            edgecolors="white",
            linewidth=gap,
        )
    axes.set_yticks(range(len(rows)), [names[row] for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    shown = sorted({0, num_layers // 2, num_layers - 1})
    patches = [Patch(color=colours(layer), label=f"layer {layer}") for layer in shown]
    patches.append(Patch(color=WITHOUT_LAYER, label="head and loss, optimizer"))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=130)


def _track(name: str) -> int:
    return next(
        (place for place, track in enumerate(TRACKS) if name.startswith(track)), len(TRACKS)
    )


def _layer(name: str) -> int | None:
    word, _, number = name.partition(" ")
    return int(number) if word == "layer" and number.isdigit() else None


def _last_steps(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return what ended within the last optimizer steps."""
    ends = sorted(event["ts"] + event["dur"] for event in events if event.get("cat") == "optimizer")
    begin, end = ([0.0, *ends][-count - 1], ends[-1]) if ends else (0.0, float("inf"))
    return [
        event
        for event in events
        if event["ph"] == "M" or (event["ts"] >= begin and event["ts"] + event["dur"] <= end)
    ]


def _trace_of_a_small_model(tokens: int, directory: Path | None) -> list[dict[str, Any]]:
    import torch
    from common import Shape, forget_pages, write_model

    from lema import LemaConfig, LemaModel
    from lema.backend.trace import Trace
    from lema.engine.head.loss import split_batch

    shape = Shape(hidden=1024, intermediate=2816, layers=12, vocabulary=8000)
    trace = Trace()
    with tempfile.TemporaryDirectory(dir=directory) as name:
        write_model(Path(name), shape)
        config = LemaConfig(
            name, device="cpu", gradient_checkpointing=True, save_steps=0, output_dir=f"{name}/out"
        )
        with closing(LemaModel(config, trace=trace)) as model:
            model.initialize_lora()
            trainer = model.get_trainer()
            ids = torch.randint(0, shape.vocabulary, (4, tokens // 4))
            for more in (True, True, False):
                forget_pages(Path(name))
                trainer.accumulate(split_batch({"input_ids": ids, "labels": ids}, 1), more=more)
        trace.write(file := Path(name) / "trace.json")
        found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


if __name__ == "__main__":
    main()
