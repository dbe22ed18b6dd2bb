"""The server's routes: those of the Tinker API, its page, and its metrics.

What is wrong with a request is answered with 4xx and one sentence; what the server cannot do now,
with 429 or 5xx, upon which clients of the API ask again by themselves. An answer that is not there
yet is a 408, as the API has it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import lema
from lema.errors import ConfigError, DataError, DiskError, LemaError, MemoryLimitError
from lema_tools.learner import protocol
from lema_tools.learner.access import Gate, Tokens
from lema_tools.learner.jobs import Busy
from lema_tools.learner.names import CheckpointName
from lema_tools.learner.overview import gauges, overview
from lema_tools.learner.service import Gone, NotThere, Service
from lema_tools.learner.store import CheckpointFile, ModelFile

__all__ = ["REFUSED", "application"]

PROTOBUF = "application/x-protobuf"
LARGEST_CHUNK = 4_000_000  # bytes of rows that a client sends in one request
API = "/api/v1"
# What the API has and this server has not, each with its reason.
REFUSED = {
    "/create_custom_loss": "custom losses are computed by the client (two calls)",
    "/save_weights_external": "save_weights_for_sampler writes the published format already",
    "/copy_weights": "checkpoints belong to one client and do not move",
    "/auth/token": "secrets are used as they are",
    "/retrieve_futures": "answers are asked for one by one",
    "/audit": "there is no audit log",
    "/billing/usage/events": "nothing is billed",
    "/billing/usage/checkpoints/current": "nothing is billed",
    "/sessions/search": "sessions are listed, not searched",
}


def _owner(request: Request) -> str:
    owner: str = request.scope["owner"]
    return owner


Owner = Annotated[str, Depends(_owner)]
"""The name of the client, which `Gate` has found."""


def application(service: Service, tokens: Tokens, *, most_bytes: int, rate: float = 200.0) -> Gate:
    """Return the server as an ASGI application; see `Gate`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="LEMA learner",
        version=lema.__version__,
        description="The Tinker API of a model whose layers stream.",
        lifespan=lifespan,
        redoc_url=None,
    )
    for add in (_errors, _about, _sessions, _models, _requests, _checkpoints, _sampling, _pages):
        add(app, service)
    return Gate(app, tokens, most_bytes=most_bytes, rate=rate)


def _errors(app: FastAPI, _: Service) -> None:
    """Say what each error of LEMA's is in HTTP."""
    statuses: dict[type[Exception], int] = {
        NotThere: 404,
        Gone: 410,
        Busy: 429,
        DiskError: 507,
        DataError: 400,
        ConfigError: 400,
        MemoryLimitError: 400,
        LemaError: 503,
    }

    def answering(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(_: Request, error: Exception) -> Response:
            text = str(error) if isinstance(error, LemaError) else "too many requests wait"
            return JSONResponse({"error": text}, status)

        return answer

    for kind, status in statuses.items():
        app.add_exception_handler(kind, answering(status))

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()
        ]
        return JSONResponse({"error": "; ".join(problems)[:2000]}, 422)

    app.add_exception_handler(RequestValidationError, malformed)


def _about(app: FastAPI, service: Service) -> None:
    @app.get(f"{API}/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def client_config() -> dict[str, Any]:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_bytes_count": LARGEST_CHUNK,
            "use_pyqwest_transport": True,
            "sample_max_concurrent_requests": 64,
            "sample_enable_stuck_detection": False,
        }

    @app.post(f"{API}/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}

    @app.post(f"{API}/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # and thrown away

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {
            "model_name": service.name,
            "max_context_length": service.learner.longest,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def refuse(path: str, reason: str) -> None:
        async def refused() -> Response:
            return JSONResponse({"error": f"this server does not have {path}: {reason}"}, 400)

        app.add_api_route(API + path, refused, methods=["GET", "POST"], include_in_schema=False)

    for path, reason in REFUSED.items():
        refuse(path, reason)


def _sessions(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_session")
    async def create_session(owner: Owner, asked: protocol.CreateSession) -> dict[str, Any]:
        name = await service.create_session(owner, asked.user_metadata or {})
        return {"session_id": name, "type": "create_session"}

    @app.post(f"{API}/session_heartbeat")
    async def heartbeat(owner: Owner, asked: protocol.OfSession) -> dict[str, Any]:
        service.hear(owner, asked.session_id)
        return {"type": "session_heartbeat"}

    @app.get(f"{API}/sessions")
    async def sessions(
        owner: Owner,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        return {"sessions": service.sessions(owner)[offset : offset + limit]}

    @app.get(f"{API}/sessions/{{session}}")
    async def session_of(owner: Owner, session: str) -> dict[str, Any]:
        found = service.session(owner, session)
        models = service.models_of(owner, session)
        return {
            "training_run_ids": [str(model) for model in models],
            "sampler_ids": service.samplers_of(owner, session),
            "user_metadata": dict(found.metadata),
        }

    @app.post(f"{API}/sessions/{{session}}/finish", status_code=204)
    async def finish(owner: Owner, session: str) -> Response:
        await service.finish(owner, session)
        return Response(status_code=204)


def _future(name: str, **more: object) -> dict[str, Any]:
    return {"request_id": name, **more}


def _models(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_model")
    async def create_model(owner: Owner, asked: protocol.CreateModel) -> dict[str, Any]:
        service.check_base(asked.base_model)
        if asked.optimizer_config.type != "adamw":
            raise DataError("this server has no optimizer but adamw", where="optimizer_config")
        if asked.lora_config is None:
            raise DataError("this server trains adapters alone", where="lora_config")
        name = await service.create_model(
            owner,
            asked.session_id,
            asked.model_seq_id,
            asked.lora_config,
            asked.user_metadata or {},
        )
        return _future(name)

    @app.post(f"{API}/get_info")
    async def get_info(owner: Owner, asked: protocol.OfModel) -> dict[str, Any]:
        model, what = service.model(owner, asked.model_id)
        return {
            "type": "get_info",
            "model_id": str(model),
            "model_data": {
                "arch": service.learner.opened.skeleton.config.model_type,
                "model_name": service.name,
                "tokenizer_id": service.name,
            },
            "is_lora": True,
            "lora_rank": what.spec.rank,
            "model_name": service.name,
        }

    @app.post(f"{API}/unload_model")
    async def unload(owner: Owner, asked: protocol.OfModel) -> dict[str, Any]:
        model = await service.unload(owner, asked.model_id)
        return _future(f"{model}:0")

    def run(model: object, what: ModelFile) -> dict[str, Any]:
        checkpoints = service.checkpoints(what.owner, str(model))
        of_kind = {
            kind: [_checkpoint(one) for one in checkpoints if f"/{kind}/" in one.path]
            for kind in ("weights", "sampler_weights")
        }
        return {
            "training_run_id": str(model),
            "base_model": service.name,
            "model_owner": what.owner,
            "is_lora": True,
            "lora_rank": what.spec.rank,
            "last_request_time": _time(what.created),
            "last_checkpoint": next(iter(of_kind["weights"][::-1]), None),
            "last_sampler_checkpoint": next(iter(of_kind["sampler_weights"][::-1]), None),
            "user_metadata": dict(what.metadata),
        }

    @app.get(f"{API}/training_runs")
    async def runs(
        owner: Owner,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        mine = [*service.models_of(owner).items()]
        page = [run(model, what) for model, what in mine[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(mine)}
        return {"training_runs": page, "cursor": cursor}

    @app.get(f"{API}/training_runs/{{model_id}}")
    async def run_of(owner: Owner, model_id: str) -> dict[str, Any]:
        return run(*service.model(owner, model_id))


def _requests(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/forward_backward")
    async def forward_backward(owner: Owner, request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").split(";")[0] != PROTOBUF:
            raise DataError(f"rows are sent as {PROTOBUF}", where="content-type")
        return _future(await service.accept_rows(owner, await request.body()))

    @app.post(f"{API}/optim_step")
    async def optim_step(owner: Owner, asked: protocol.OptimStep) -> dict[str, Any]:
        what = asked.adam_params.model_dump()
        name = await service.accept(owner, asked.model_id, asked.seq_id, "optim_step", what)
        return _future(name)

    @app.post(f"{API}/save_weights")
    async def save_weights(owner: Owner, asked: protocol.SaveWeights) -> dict[str, Any]:
        model, _ = service.model(owner, asked.model_id)
        name = CheckpointName.of(model, "weights", asked.path or f"request-{asked.seq_id}")
        what = {
            "name": name.name,
            "overwrite": asked.overwrite,
            "metadata": service.texts(asked.user_metadata),
        }
        return _future(await service.accept(owner, asked.model_id, asked.seq_id, "save", what))

    @app.post(f"{API}/save_weights_for_sampler")
    async def save_for_sampler(
        owner: Owner, asked: protocol.SaveWeightsForSampler
    ) -> dict[str, Any]:
        model, _ = service.model(owner, asked.model_id)
        if asked.kind != "snapshot":
            raise DataError("weights in flight are not published, but snapshots", where="kind")
        own = asked.path or f"ephemeral-{asked.seq_id:010d}"
        name = CheckpointName.of(model, "sampler_weights", own)
        what: dict[str, Any] = {
            "name": name.name,
            "overwrite": asked.path is None,
            "metadata": service.texts(asked.user_metadata),
        }
        if asked.sampling_session_seq_id is not None:
            what["sampling_session"] = service.know_sampler(
                owner, model.session, asked.sampling_session_seq_id, name
            )
        future = await service.accept(owner, asked.model_id, asked.seq_id, "save_for_sampler", what)
        return _future(future)

    @app.post(f"{API}/load_weights")
    async def load_weights(owner: Owner, asked: protocol.LoadWeights) -> dict[str, Any]:
        service.check_base(asked.base_model)
        if asked.model_id is not None and asked.seq_id is not None:
            service.checkpoint(owner, asked.path)
            what = {"path": asked.path, "optimizer": asked.optimizer}
            name = await service.accept(owner, asked.model_id, asked.seq_id, "load", what)
            return _future(name)
        if asked.session_id is None or asked.model_seq_id is None:
            raise DataError("a checkpoint is loaded by a model, or by a new one of a session")
        if asked.optimizer_config is not None and asked.optimizer_config.type != "adamw":
            raise DataError("this server has no optimizer but adamw", where="optimizer_config")
        name = await service.create_from(
            owner,
            asked.session_id,
            asked.model_seq_id,
            asked.path,
            asked.user_metadata or {},
            optimizer=asked.optimizer,
        )
        return _future(name)

    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(owner: Owner, asked: protocol.RetrieveFuture) -> Response:
        result = await service.retrieve(owner, asked.request_id)
        if result is None:
            if service.answers.closing:
                return JSONResponse({"error": "the server ends; ask it again"}, 503)
            waits = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(waits, 408)
        if result.kind == "proto":
            return Response(result.body, media_type=PROTOBUF)
        return Response(result.body, media_type="application/json")

    @app.post(f"{API}/cancel_future", status_code=204)
    async def cancel_future(_: protocol.CancelFuture) -> Response:
        return Response(status_code=204)  # what was begun is finished


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(what: CheckpointFile) -> dict[str, Any]:
    name = CheckpointName.read(what.path)
    return {
        "checkpoint_id": name.id,
        "checkpoint_type": "training" if name.kind == "weights" else "sampler",
        "time": _time(what.created),
        "tinker_path": what.path,
        "size_bytes": what.nbytes,
        "public": False,
        "user_metadata": dict(what.metadata),
    }


def _checkpoints(app: FastAPI, service: Service) -> None:
    @app.get(f"{API}/training_runs/{{model_id}}/checkpoints")
    async def of_model(owner: Owner, model_id: str) -> dict[str, Any]:
        return {"checkpoints": [_checkpoint(one) for one in service.checkpoints(owner, model_id)]}

    @app.delete(f"{API}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}", status_code=204)
    async def delete(owner: Owner, model_id: str, kind: str, name: str) -> Response:
        await service.delete_checkpoint(owner, model_id, kind, name)
        return Response(status_code=204)

    @app.get(f"{API}/checkpoints")
    async def all_checkpoints(
        owner: Owner,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        mine = service.checkpoints(owner)
        page = [_checkpoint(one) for one in mine[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(mine)}
        return {"checkpoints": page, "cursor": cursor}

    @app.post(f"{API}/weights_info")
    async def weights_info(owner: Owner, asked: protocol.WeightsInfo) -> dict[str, Any]:
        _, what = service.checkpoint(owner, asked.tinker_path)
        spec = what.spec
        return {
            "base_model": service.name,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }


def _sampling(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_sampling_session")
    async def create(owner: Owner, asked: protocol.CreateSamplingSession) -> dict[str, Any]:
        name = service.create_sampler(
            owner,
            asked.session_id,
            asked.sampling_session_seq_id,
            asked.model_path,
            asked.base_model,
        )
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @app.get(f"{API}/samplers/{{name}}")
    async def sampler(owner: Owner, name: str) -> dict[str, Any]:
        found = service.sampler(owner, name)
        path = None if found.checkpoint is None else str(found.checkpoint)
        return {"sampler_id": name, "base_model": service.name, "model_path": path}

    @app.post(f"{API}/asample")
    async def asample(owner: Owner, asked: protocol.Sample) -> dict[str, Any]:
        name, sequences = await service.sample(owner, asked)
        return _future(name, sample_sequence_ids=sequences)


def _pages(app: FastAPI, service: Service) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page(owner: Owner) -> HTMLResponse:
        return HTMLResponse(overview(service, owner))

    @app.get("/metrics", response_class=PlainTextResponse, include_in_schema=False)
    async def metrics(_: Owner) -> PlainTextResponse:
        lines = service.meter.exposition(gauges(service))
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")
