"""The tables of gpu.py, and its verdict: each target met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["proof_row", "show", "verdict"]

GIB = 2**30
PEERS = ("fsdp2", "deepspeed", "roundpipe")
# Model, cap in GiB, micro-batches, the least fraction of PEFT's tokens per second with the model on
# the device.
SPEEDS = (("8B", 4, 16, 0.9), ("32B", 24, 16, 0.85))
AHEAD_AT = (4, 16)  # micro-batches
OFF_AT_MOST = 0.05  # of the plan
LOSS_AND_GRADIENTS = 1e-5  # relative, fp32
SAME_LOSS = 1e-3  # relative, bf16
SPREAD = 1.1  # times PEFT's own, bf16
MET = "met"
MISSED = "MISSED"
UNKNOWN = "not measured"
COLUMNS = ("model", "arm", "cap GiB", "micro-b.", "tok/s", "x PEFT", "of limit", "alloc. GB", "reserved", "planned",
           "off", "host GB", "up GB", "read GB", "")  # fmt: skip


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print what was measured, and what it says of the targets."""
    _show_machine(results, console)
    table = Table(title="one optimizer step")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "arm", "") else "right")
    for row in results["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    verdicts = Table("target", "found", "verdict", title="targets")
    for one in verdict(results):
        verdicts.add_row(one["target"], one["found"], one["verdict"])
    console.print(verdicts)
    if certificate := results.get("certificate"):
        console.print("the row to send, from the certificate of `lema prove`:")
        console.print(proof_row(certificate, results), markup=False, soft_wrap=True)


def proof_row(certificate: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return a line of a table of proofs: device, verdict, what was compared, memory, versions,
    date and command.
    """
    gradients = certificate["gradients_of_first_step"]
    memory = certificate["memory"]
    device = (results.get("link") or {}).get("device") or certificate["machine"]["device"]
    within = "bitwise" if certificate["bitwise"] else f"within {certificate['tolerance']:g}"
    found = f"{gradients['count']} gradients, apart by {gradients['relative']:.1e} of their norm"
    peaks = " and ".join(
        f"{memory[arm]['peak'] / 1e6:,.0f} MB {arm}" for arm in ("streamed", "whole")
    )
    cells = (
        device,
        f"{'holds' if certificate['holds'] else 'DOES NOT HOLD'}, {within}",
        found,
        peaks,
        f"torch {certificate['versions']['torch']}",
        certificate["date"],
        f"`{certificate['command']}`",
    )
    return f"| {' | '.join(cells)} |"


def verdict(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return each target with what was found; whatever was not measured whole, on a GPU, is met
    by nothing.
    """
    real = bool(results.get("real"))
    rows = {_key(row): row for row in results["rows"] if real and _whole(row)}
    return [
        *_speeds(rows),
        *_ahead(rows),
        *_peaks(rows),
        *_parity(results.get("parity") if real else None),
    ]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["arm"], row["cap_gib"], row["micro_batches"]


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether a row was measured, under its cap, with every layer, all weights in host memory,
    and PEFT's loss.
    """
    enforced = row.get("capped") or row["cap_gib"] is None
    return bool(
        row["status"] == "measured"
        and enforced
        and row["layers"] == row["of_layers"]
        and row.get("strategy") in (None, "resident")
        and row.get("loss_off", 0.0) <= SAME_LOSS
    )


def _line(target: str, found: str, met: bool | None) -> dict[str, str]:
    return {
        "target": target,
        "found": found,
        "verdict": UNKNOWN if met is None else MET if met else MISSED,
    }


def _speeds(rows: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for model, cap, micro_batches, least in SPEEDS:
        row = rows.get((model, "lema", cap, micro_batches))
        ratio = None if row is None else row.get("ratio")
        target = (
            f"{model}, cap of {cap} GiB, {micro_batches} micro-batches: at least {least} of "
            "PEFT in memory"
        )
        yield _line(
            target,
            "" if ratio is None else f"{ratio:.3f}",
            None if ratio is None else ratio >= least,
        )


def _ahead(rows: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for peer in PEERS:
        for micro_batches in AHEAD_AT:
            known = [
                (key, _faster(rows[key[0], "lema", *key[2:]], theirs))
                for key, theirs in rows.items()
                if key[1] == peer and key[3] == micro_batches and (key[0], "lema", *key[2:]) in rows
            ]
            found = ", ".join(f"{key[0]} at {key[2]} GiB: {ratio:.2f} x" for key, ratio in known)
            met = all(ratio > 1 for _, ratio in known) if known else None
            yield _line(f"ahead of {peer} at {micro_batches} micro-batches, same cap", found, met)


def _faster(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return how many times as fast we are: by what each has of PEFT's speed, in turns with
    which each was measured.
    """
    unit = "ratio" if ours.get("ratio") and theirs.get("ratio") else "tokens_per_second"
    return float(ours[unit]) / float(theirs[unit])


def _peaks(rows: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    offs = {key: row["off"] for key, row in rows.items() if row.get("off") is not None}
    worst = max(offs, key=lambda key: abs(offs[key]), default=None)
    found = (
        ""
        if worst is None
        else f"{len(offs)} rows, the worst {offs[worst]:+.1%} ({worst[0]}, {worst[2]} GiB)"
    )
    target = f"peak device memory within {OFF_AT_MOST:.0%} of the plan"
    yield _line(target, found, None if worst is None else abs(offs[worst]) <= OFF_AT_MOST)


def _parity(found: Mapping[str, Any] | None) -> Iterator[dict[str, str]]:
    full = (found or {}).get("float32")
    target = f"fp32 loss and gradients within {LOSS_AND_GRADIENTS:g} of the cpu backend"
    if not full:
        yield _line(target, "", None)
    else:
        apart = full["device"]
        said = f"loss {apart['loss']:.1e}, gradients {apart['gradients']:.1e}"
        yield _line(target, said, max(apart["loss"], apart["gradients"]) <= LOSS_AND_GRADIENTS)
    half = (found or {}).get("bfloat16")
    target = f"bf16 gradients within {SPREAD:g} x the spread of PEFT itself"
    if not half:
        yield _line(target, "", None)
    else:
        ours, theirs = (half[name]["gradients"] for name in ("device", "peft"))
        yield _line(target, f"{ours:.1e}; PEFT {theirs:.1e}", ours <= SPREAD * theirs)


def _show_machine(results: Mapping[str, Any], console: Console) -> None:
    for error in results.get("errors", []):
        console.print(error, markup=False)
    link = results.get("link") or {}
    for name in ("page-locked", "pageable"):
        if speeds := link.get(name):
            said = (
                speeds.get("error")
                or f"up {speeds['up'] / 1e9:.1f} GB/s, down {speeds['down'] / 1e9:.1f} GB/s"
            )
            console.print(f"link, {name}: {said}")
    for model, rate in results.get("flops_per_second", {}).items():
        console.print(f"matrix products of the {model}'s layer: {rate / 1e12:.3g} TFLOP/s")
    for dtype in ("float32", "bfloat16"):
        if found := (results.get("parity") or {}).get(dtype):
            said = "; ".join(
                (
                    f"{name}: loss {one['loss']:.1e}, gradients {one['gradients']:.1e} (worst "
                    f"{one['worst_tensor']:.1e})"
                )
                for name, one in found.items()
            )
            console.print(f"parity, {dtype}: {said}", soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    layers = (
        ""
        if row["layers"] == row["of_layers"]
        else f" ({row['layers']} of {row['of_layers']} layers)"
    )
    arm = row["arm"] + (" (disk)" if row.get("strategy") == "streaming" else "")
    cap = (
        "-"
        if row["cap_gib"] is None
        else f"{row['cap_gib']:g}" + ("" if row.get("capped", True) else "*")
    )
    head = [row["model"] + layers, arm, cap, str(row["micro_batches"])]
    if row["status"] != "measured":
        why = f": {row['why']}" if row.get("why") else ""
        return [*head, *[""] * (len(COLUMNS) - 5), (row["status"] + why)[:300]]
    return [
        *head,
        f"{row['tokens_per_second']:,.0f}",
        _number(row.get("ratio"), "{:.3f}" if row.get("in_turn", True) else "{:.3f}, not in turn"),
        _number(row.get("of_limit"), "{:.2f}"),
        _number(row["allocated"] / 1e9),
        _number(row["reserved"] / 1e9),
        _number(row["planned_bytes"] / 1e9 if row.get("planned_bytes") else None),
        _number(row.get("off"), "{:+.1%}"),
        _number(row["host_bytes"] / 1e9),
        _number(row["bytes_uploaded"] / 1e9 if "bytes_uploaded" in row else None),
        _number(row["bytes_read"] / 1e9 if "bytes_read" in row else None),
        row.get("allocation", "")
        + (" LOSS IS NOT PEFT'S" if row.get("loss_off", 0.0) > SAME_LOSS else ""),
    ]


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)
