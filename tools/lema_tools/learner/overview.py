"""The server's own page: what it does, what waits, and how the adapters of a client train."""

import time
from collections.abc import Mapping

from lema.config.units import human_bytes, human_count, human_duration
from lema_tools.learner.service import Service
from lema_tools.page import escape, page, table, tiles
from lema_tools.svg import Series, chart

__all__ = ["gauges", "overview"]


def gauges(service: Service) -> dict[str, float]:
    """Return what is so now, for Prometheus."""
    memory = service.learner.opened.backend.memory()
    return {
        "waiting_requests": sum(service.jobs.waiting().values()),
        "waiting_tasks": service.jobs.num_tasks,
        "models": len(service.jobs.waiting()),
        "device_memory_used_bytes": memory.used,
        "device_memory_peak_bytes": memory.peak,
        "adapters_on_device": len(service.learner.adapters),
        "adapter_bytes": service.learner.adapter_bytes,
        "tokens_per_second": service.meter.tokens_per_second(),
        "uptime_seconds": time.time() - service.meter.began,
    }


def overview(service: Service, owner: str) -> str:
    """Return the page of a client, as HTML."""
    mine = {name: of for name, of in service.meter.models().items() if of.owner == owner}
    waiting = {str(model): count for model, count in service.jobs.waiting().items()}
    rows = [
        (
            name,
            of.rank,
            of.steps,
            human_count(of.tokens),
            waiting.get(name, 0),
            f"{of.losses[-1]:.4g}" if of.losses else "",
        )
        for name, of in mine.items()
    ]
    headers = ("model", "rank", "steps", "tokens", "waiting", "last loss a token")
    sections = [("models", f"Adapters of {owner}", table(rows, headers))]
    curves = [
        chart(name, [Series(name, tuple(enumerate(of.losses, 1)), at)])
        for at, (name, of) in enumerate(mine.items())
        if of.losses
    ]
    if curves:
        sections.append(("losses", "Loss of a token, request by request", "".join(curves)))
    head = f"<h1>{escape(service.name)}</h1><p>A learner: the Tinker API.</p>{_numbers(service)}"
    links = '<a href="/metrics">Metrics</a> for Prometheus, and the <a href="/docs">routes</a>.'
    return page(f"{service.name} - LEMA learner", head, sections, links)


def _numbers(service: Service) -> str:
    """Return what the server has done, in large numbers."""
    counts = service.meter.counts()
    now = gauges(service)
    passes = counts.get("passes", 0)
    adapters = counts.get("pass_adapters", 0) / passes if passes else 0.0
    nbytes = counts.get("weight_bytes", 0)
    of_pass = human_bytes(nbytes / passes if passes else 0)
    tokens = human_count(counts.get("tokens", 0))
    peak = human_bytes(now["device_memory_peak_bytes"])
    return tiles(
        [
            ("Waiting", f"{now['waiting_requests']:g}", "requests of all clients"),
            ("Passes", human_count(passes), f"{adapters:.2g} adapters in each"),
            ("Rows", human_count(counts.get("rows", 0)), f"{tokens} tokens"),
            ("Speed", f"{now['tokens_per_second']:.1f}", "tokens a second, last minute"),
            ("Weights read", human_bytes(nbytes), f"{of_pass} a pass"),
            ("Optimizer steps", human_count(counts.get("optimizer_steps", 0)), "of all adapters"),
            ("Device memory", human_bytes(now["device_memory_used_bytes"]), f"at most {peak}"),
            ("Adapters", f"{now['adapters_on_device']:g}", _of_adapters(service, now)),
            ("Up for", human_duration(now["uptime_seconds"]), ""),
        ]
    )


def _of_adapters(service: Service, now: Mapping[str, float]) -> str:
    """Return what the adapters on the device take of what they may take."""
    taken = human_bytes(now["adapter_bytes"])
    budget = service.learner.budget
    return taken if budget is None else f"{taken} of {human_bytes(budget.nbytes)} on the device"
