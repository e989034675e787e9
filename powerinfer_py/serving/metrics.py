"""What `/metrics` says, in Prometheus' text format: requests as HTTP saw them, and the engine's own figures.

Each app has a registry of its own: two in one process don't meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from powerinfer_py.serving.completions import Timing
    from powerinfer_py.serving.engine import Engine

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The figures of one app.

    Args:
        engine: asked for its own figures at each scrape.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_EngineFigures(engine))
        self._answers = prometheus_client.Counter(
            "powerinfer_http_requests", "HTTP requests by their status.", ("path", "status"), registry=self._registry
        )
        self._first = prometheus_client.Histogram(
            "powerinfer_time_to_first_token_seconds",
            "From the queue to the first text of an answer.",
            registry=self._registry,
            buckets=_FIRST_S,
        )
        self._per_token = prometheus_client.Histogram(
            "powerinfer_time_per_token_seconds",
            "Mean time of a token after the first, of each answer.",
            registry=self._registry,
            buckets=_TOKEN_S,
        )

    def count_answer(self, path: str, status: int) -> None:
        """Count an HTTP request.

        Args:
            path: one of those that exist, or "other".
            status: of the answer; 499 where the client went away before it.
        """
        self._answers.labels(path, status).inc()

    def add_timing(self, timing: Timing) -> None:
        """Note how long a generation took."""
        self._first.observe(timing.first_s)
        if timing.per_token_s is not None:
            self._per_token.observe(timing.per_token_s)

    def text(self) -> bytes:
        """All figures, in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)


class _EngineFigures(Collector):
    """Figures of an engine's snapshot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # nothing is collected when this is registered

    def collect(self) -> Iterator[Metric]:
        now = self._engine.snapshot()
        yield InfoMetricFamily(
            "powerinfer",
            "What runs.",
            {
                "model": now.model,
                "sparsity": now.sparsity,
                "computed_by": now.computed_by,
                "kernels": now.kernels or "",
            },
        )
        generations = CounterMetricFamily("powerinfer_generations", "Ended generations.", labels=("finish_reason",))
        for reason, n in now.n_requests.items():
            generations.add_metric((reason,), n)
        yield generations
        for name, text, value in (
            ("rejected", "Requests that found the queue full.", now.n_rejected),
            ("prompt_tokens", "Prompt tokens computed.", now.n_prompt_tokens),
            ("cached_tokens", "Prompt tokens taken from the cache.", now.n_cached_tokens),
            ("generated_tokens", "Tokens generated.", now.n_generated_tokens),
            ("ffn_read_bytes", "Bytes of feed-forward weights read.", now.read_bytes),
            ("ffn_dense_bytes", "Bytes that a dense pass would have read.", now.dense_bytes),
        ):
            yield CounterMetricFamily(f"powerinfer_{name}", text, value)
        for name, text, gauge in (
            ("running", "Requests in the batch.", now.n_running),
            ("waiting", "Requests in the queue.", now.n_waiting),
            ("parallel", "Requests that may be in the batch.", now.n_parallel),
            ("tokens_per_second", "Tokens generated per second, lately.", now.tokens_per_s),
            ("prompt_tokens_per_second", "Prompt tokens computed per second, lately.", now.prompt_tokens_per_s),
            ("density", "Neurons used / neurons, since the start.", now.density),
            ("candidate_density", "Gate rows read / neurons, since the start.", now.candidate_density),
            ("uptime_seconds", "Since the start.", now.uptime_s),
        ):
            if gauge is not None:  # a model without a plan has no density
                yield GaugeMetricFamily(f"powerinfer_{name}", text, gauge)
