"""`powerinfer serve` on Ray Serve: the same app in replicas, as many as waiting requests ask for.

Each replica has a model and an engine of its own and opens the model by path. Ray decides where replicas run; its proxies
take HTTP. `serve run powerinfer_py.serving.ray_serve:build model=X.gguf`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pydantic
from fastapi import FastAPI
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig

from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.serving.app import RETRY_AFTER_S, ServeOptions, create_app
from powerinfer_py.serving.engine import Engine, EngineOptions, load_model
from powerinfer_py.serving.serve import N_CTX, N_PARALLEL, read_keys


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RayServeOptions:
    """Arguments of `build`, with their defaults; those of one replica unless said otherwise."""

    model: str  # path on every machine that may run a replica
    plan: str | None = None
    parallel: int = Field(N_PARALLEL, ge=1)  # requests that run at the same time
    ctx_size: int = Field(N_CTX, ge=1)  # tokens of each request
    sparsity: str = "auto"
    threads: int = Field(_core.physical_cores(), ge=1)  # CPUs of Ray, too
    num_gpus: float = Field(0, ge=0)  # of Ray
    vram_budget: str | None = None
    mapped: bool = False
    min_replicas: int = Field(1, ge=0)  # of all
    max_replicas: int = Field(1, ge=1)
    queue_limit: int = Field(EngineOptions.queue_limit, ge=1)  # requests that may wait at each proxy
    timeout: float = Field(EngineOptions.timeout_s, gt=0)  # seconds
    grace: float = Field(ServeOptions.grace_s, ge=0)  # seconds that running requests have when a replica ends
    alias: str | None = None
    api_key_file: str | None = None
    allowed_hosts: str = ""  # other names of this service in the header Host, with commas between them


class Replica:
    """A model, its engine and its app.

    Args:
        options: of all replicas.
    """

    def __init__(self, options: RayServeOptions) -> None:
        self._stack = ExitStack()
        llama = self._stack.enter_context(
            load_model(
                options.model,
                options.parallel,
                options.ctx_size,
                sparsity=options.sparsity,
                plan=options.plan,
                mapped=options.mapped,
                n_threads=options.threads,
                n_threads_batch=options.threads,
                vram_budget=options.vram_budget,
                verbose=False,
            )
        )
        limits = EngineOptions(queue_limit=_max_ongoing(options), timeout_s=options.timeout)
        self._engine = self._stack.enter_context(Engine(llama, limits))
        self._app = create_app(
            self._engine,
            ServeOptions(
                api_keys=read_keys((), options.api_key_file),
                allowed_hosts=tuple(name.strip() for name in options.allowed_hosts.split(",") if name.strip()),
                alias=options.alias,
            ),
        )
        # Ray Serve has waited for running requests as long as it may when it calls __del__.
        self._stack.callback(self._app.state.serving.stop)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What answers, for Ray Serve."""
        return self._app

    def check_health(self) -> None:
        """Ray Serve replaces a replica that fails this.

        Raises:
            PlanError: the engine failed.
        """
        if self._engine.failure is not None:
            raise PlanError(self._engine.failure)

    def __del__(self) -> None:
        self._stack.close()


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and `serve deploy`.

    Args:
        args: fields of RayServeOptions, as text or as they are.

    Returns:
        The application; its one deployment is called `powerinfer`.

    Raises:
        OptionError: an argument that doesn't exist, or can't be used.
    """
    try:
        options = RayServeOptions(**args)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise OptionError(f"{name}: {first['msg']}; expected fields of RayServeOptions; correct it.") from None
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="powerinfer",
        ray_actor_options={"num_cpus": options.threads, "num_gpus": options.num_gpus},
        max_ongoing_requests=_max_ongoing(options),
        max_queued_requests=options.queue_limit,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            initial_replicas=options.min_replicas or None,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.parallel,
        ),
        graceful_shutdown_timeout_s=options.grace,
    )
    return deployment.bind(options)


def _max_ongoing(options: RayServeOptions) -> int:
    """Requests that a replica has at the same time: as many as run, and as many that wait for one of them to end."""
    return 2 * options.parallel
