"""Ray, really started here: profile and train as tasks equal the local run, and Ray Serve answers as `serve` does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tiny_models
import yaml
from test_profile import Stopper, write_text
from test_train import DEAR_GATE

from powerinfer_py import cli
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.tools import calibration, predictor_cost, ray_tasks, window_runs
from powerinfer_py.tools import profile_activations as pa
from powerinfer_py.tools import train_predictors as tp

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
N_CTX = 32
N_WINDOWS = 20
# What a tiny model writes until its context is full: never its EOS.
LONG = {"prompt": "a", "max_tokens": 1000, "extra_body": {"logit_bias": {"2": -100}}, "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """A Ray on this machine for all tests here; its address."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # of Ray Serve: how often waiting requests are counted
        environment.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.2")
        environment.setenv("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.2")
        started = ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield started.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", 40)


@pytest.fixture
def options(tmp_path: Path, text: Path) -> pa.ProfileOptions:
    """Silu, one thread, with Ray."""
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=3)
    out = tmp_path / "m.powerinfer.gguf"
    return pa.ProfileOptions(model, (text,), out, tokens=N_WINDOWS * N_CTX, ctx=N_CTX, threads=1, ray=ray_tasks.LOCAL)


@pytest.fixture
def train_options(tmp_path: Path, text: Path) -> tp.TrainOptions:
    """Three ReLU layers, linear predictors, with Ray."""
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=3, gate_ranks=(12, 24, 40))
    plan = tiny_models.write_tiny_plan(model, activation="relu", order_seed=3)
    rates = tmp_path / "rates.json"
    predictor_cost.write_rates(DEAR_GATE, rates)
    limits = {"tokens": N_WINDOWS * N_CTX, "ctx": N_CTX, "threads": 1}
    return tp.TrainOptions(
        model, (text,), plan, kind="linear", device="cpu", rates=rates, recall=0.98, ray=ray_tasks.LOCAL, **limits
    )


def profile(options: pa.ProfileOptions, steps: Stopper | None = None) -> bytes:
    pa.make_profile(options, steps or Stopper(), lambda text: None)
    return options.out.read_bytes()


def local_profile(options: pa.ProfileOptions) -> bytes:
    return profile(dataclasses.replace(options, ray=None, out=options.out.with_name("local.powerinfer.gguf")))


def train(options: tp.TrainOptions, steps: Stopper | None = None) -> tuple[bytes, list[Any]]:
    """The plan, and the report's layers but for how long they took."""
    found = tp.make_training(options, steps or Stopper(), lambda text: None)
    return options.out.read_bytes(), [dataclasses.replace(layer, seconds=0) for layer in found.layers]


def local_train(options: tp.TrainOptions) -> tuple[bytes, list[Any]]:
    return train(dataclasses.replace(options, ray=None, jobs=1, out=options.out.with_name("local.powerinfer.gguf")))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# -- profile and train -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "relu"])
def test_profile_writes_what_a_local_run_does(options: pa.ProfileOptions, activation: str | None) -> None:
    options = dataclasses.replace(options, activation=activation)
    with_ray, local = Stopper(), Stopper()
    expected = profile(dataclasses.replace(options, ray=None), local)
    assert profile(options, with_ray) == expected
    assert (with_ray.n, with_ray.phases) == (local.n, local.phases)


def test_train_writes_what_a_local_run_does(train_options: tp.TrainOptions) -> None:
    expected = local_train(train_options)
    assert train(train_options) == expected
    assert all(layer.kind == "linear" for layer in expected[1])


# Stopped while thresholds are tried, while activations are counted.
@pytest.mark.parametrize("at", [20, -4])
def test_a_stopped_profile_goes_on_with_or_without_ray(options: pa.ProfileOptions, at: int) -> None:
    whole = Stopper()
    expected = profile(options, whole)
    options.out.unlink()
    with pytest.raises(KeyboardInterrupt):
        profile(options, Stopper(at if at > 0 else whole.n + at))
    rest = Stopper()
    resumed = dataclasses.replace(options, resume=True, ray=None if at == 20 else options.ray)
    assert profile(resumed, rest) == expected
    assert rest.n <= whole.n


def test_a_stopped_training_keeps_finished_layers(train_options: tp.TrainOptions) -> None:
    expected = local_train(train_options)
    with pytest.raises(KeyboardInterrupt):
        train(train_options, Stopper(N_WINDOWS + 3 + 3 + 1))  # text, active sets, sizes, one predictor
    assert list(train_options.folder.glob("layer-*.predictor.npz"))
    steps = Stopper()
    assert train(dataclasses.replace(train_options, resume=True), steps) == expected
    assert "sizes" in steps.phases and not train_options.folder.exists()


def test_ctrl_c_ends_a_run_on_a_cluster_and_leaves_a_state(options: pa.ProfileOptions, cluster: str) -> None:
    options.text[0].write_text(options.text[0].read_text() * 20)
    command = [sys.executable, "-m", "powerinfer_py.cli", "profile", options.model, "--text", *options.text]
    command += ["--tokens", "100000", "--ctx", str(N_CTX), "-t", "1", "-o", options.out, "--no-plot", "--ray", cluster]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    state = options.out.with_name(options.out.name + ".state.npz")
    wait_until(lambda: state.exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert out == "" and err.count("\n") == 1 and "--resume goes on" in err
    assert state.exists() and not options.out.exists()


def test_a_task_whose_worker_dies_is_done_again(
    options: pa.ProfileOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = local_profile(options)
    died = tmp_path / "died"

    def die_once(*values: Any) -> Any:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return window_runs.measure_window(*values)

    monkeypatch.setattr(calibration, "measure_window", die_once)
    assert profile(options) == expected
    assert died.exists()


def test_errors_of_tasks_are_ours(options: pa.ProfileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*values: Any) -> None:
        raise PlanError("m.gguf: found this; expected that; do something.")

    monkeypatch.setattr(calibration, "measure_window", refuse)
    with pytest.raises(PlanError, match=r"^m\.gguf: found this; expected that; do something\.$"):
        profile(options)
    monkeypatch.setattr(calibration, "measure_window", lambda *values: 1 // 0)
    with pytest.raises(PlanError, match=r"^ray: a task raised ZeroDivisionError: integer division .*--verbose"):
        profile(options)


def test_notes_of_workers_are_handed_on(options: pa.ProfileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(ray_tasks, "_RunnerTask", _task_of_other_kernels)
    pa.make_profile(dataclasses.replace(options, activation="relu"), Stopper(), notes.append)
    assert any("this machine with others: sums in another order" in note for note in notes)


def _task_of_other_kernels(**fields: Any) -> Any:
    return dataclasses.replace(_RUNNER_TASK(**fields), kernels="others")


_RUNNER_TASK = ray_tasks._RunnerTask


def test_a_worker_refuses_another_file(
    options: pa.ProfileOptions,
    train_options: tp.TrainOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = ray_tasks.FileStamp.of
    wrong = ".gguf"

    def stamp(path: Path) -> ray_tasks.FileStamp:
        found = of(path)
        return dataclasses.replace(found, digest="0" * 64) if path.name.endswith(wrong) else found

    monkeypatch.setattr(ray_tasks.FileStamp, "of", stamp)
    expected = r"{}: \S+ has a file of \d+ bytes, digest \w{{12}}\.\.\.; expected \d+, 000000000000\.\.\.; put it on a file system"
    with pytest.raises(PlanError, match=expected.format(r"m\.gguf")):
        profile(options)
    wrong = ".x.npy"
    with pytest.raises(PlanError, match=expected.format(r"layer-00\d\.x\.npy")):
        train(train_options)


def test_a_stamp_tells_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = np.random.default_rng(0).integers(256, size=3 << 20, dtype=np.uint8)
    data.tofile(path)
    stamp = ray_tasks.FileStamp.of(path)
    stamp.check()
    for change in (0, len(data) - 1):
        other = data.copy()
        other[change] ^= 1
        other.tofile(path)
        with pytest.raises(PlanError, match="has a file of 3145728 bytes"):
            stamp.check()
    path.unlink()
    with pytest.raises(PlanError, match="No such file or directory; expected the file"):
        stamp.check()


@pytest.mark.parametrize(
    ("verb", "flags", "found"),
    [
        ("profile", ["--verbose"], "verbose: it shows Ray's messages; expected --ray too"),
        ("train", ["--verbose"], "verbose: it shows Ray's messages; expected --ray too"),
        ("train", ["--ray", "--jobs", "2"], "jobs: with --ray, Ray decides"),
    ],
)
def test_wrong_options_are_one_line(
    train_options: tp.TrainOptions, capsys: pytest.CaptureFixture[str], verb: str, flags: list[str], found: str
) -> None:
    assert cli.main([verb, str(train_options.model), "--text", str(train_options.text[0]), *flags]) == 1
    errors = capsys.readouterr().err
    assert found in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "found"),
    [("nowhere", "expected `auto` or host:port"), ("127.0.0.1:1", "127.0.0.1:1: Connection refused; expected a Ray")],
)
def test_an_address_without_ray_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, address: str, found: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OptionError, match=found):
        ray_tasks.Cluster(address, 1, print)


def test_without_ray_it_is_said_what_to_install(options: pa.ProfileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"--ray: ray isn't installed; .*pip install 'powerinfer_py\[ray\]'"):
        ray_tasks.Cluster(ray_tasks.LOCAL, 1, print)


def test_tasks_that_no_machine_can_run_are_noted() -> None:
    notes: list[str] = []
    with ray_tasks.Cluster(ray_tasks.LOCAL, 64, notes.append):
        pass
    assert "a task needs 64 CPUs and no machine of the cluster has more than 2" in notes[0]
    assert ray.is_initialized()  # it isn't the cluster's to end


# -- Ray Serve -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Service:
    """The example's configuration, running: a tiny model, one request at a time in each of two replicas at most."""

    url: str
    process: subprocess.Popen[bytes]

    def client(self) -> openai.OpenAI:
        http = httpx.Client(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key-1", max_retries=0, timeout=60, http_client=http)

    def stats(self) -> dict[str, Any]:
        """Of one replica."""
        return httpx.get(f"{self.url}/powerinfer/stats", headers={"Authorization": "Bearer key-1"}).json()

    def long_stream(self) -> Any:
        """A stream that goes on for as long as the context does; its first chunk has come."""
        stream = self.client().completions.create(model="tiny", stream=True, **LONG)
        next(stream)
        return stream


def n_replicas() -> int:
    (deployment,) = ray.serve.status().applications["powerinfer"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cluster: str) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = yaml.safe_load((ROOT / "examples" / "ray-serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    model = tiny_models.write_tiny_model(folder / "tiny.gguf", tied=True)
    (folder / "keys.txt").write_text("key-1\n")
    application["args"] |= {"model": str(model), "alias": "tiny", "parallel": 1, "ctx_size": 1024}
    application["args"]["api_key_file"] = str(folder / "keys.txt")
    (deployment,) = application["deployments"]
    # at once, instead of after some seconds
    deployment["autoscaling_config"] |= {"target_ongoing_requests": 1, "upscale_delay_s": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster, str(folder / "config.yaml")]
    with (folder / "log").open("w+b") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        service = Service(f"http://127.0.0.1:{port}", process)

        def is_healthy() -> bool:
            log.seek(0)
            assert process.poll() is None, log.read().decode()
            try:
                return httpx.get(f"{service.url}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_healthy)
        yield service
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{service.url}/health")


def test_service_answers_the_openai_client(service: Service) -> None:
    client = service.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    question = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the an"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**question).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **question)]
    assert len(chunks) > 10 and answer.message.content
    assert "".join(chunk.delta.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].finish_reason == answer.finish_reason


def test_service_checks_hosts_and_keys(service: Service) -> None:
    assert httpx.get(f"{service.url}/v1/models").status_code == 401
    assert httpx.get(f"{service.url}/v1/models", headers={"Host": "elsewhere.org"}).status_code == 403


def test_stream_comes_in_pieces_and_ends_when_its_client_goes(service: Service) -> None:
    stream = service.long_stream()
    assert service.stats()["n_running"] == 1
    stream.close()
    wait_until(lambda: service.stats()["n_requests"].get("cancelled") == 1)
    assert service.stats()["n_running"] == 0


def test_replicas_are_added_while_requests_wait(service: Service) -> None:
    assert n_replicas() == 1
    enough = threading.Event()

    def ask() -> None:
        client = service.client()
        while not enough.is_set():
            client.completions.create(model="tiny", **{**LONG, "max_tokens": 100})

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: n_replicas() == 2)
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    # each runs one request at a time: these run in both
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(contextlib.closing(service.long_stream())) for _ in range(2)]
        for stream in streams:
            assert next(stream).choices[0].finish_reason is None


def test_an_argument_that_doesnt_exist_is_refused() -> None:
    from powerinfer_py.serving import ray_serve

    with pytest.raises(OptionError, match="paralel: Unexpected keyword argument"):
        ray_serve.build({"model": "m.gguf", "paralel": "2"})
    with pytest.raises(OptionError, match="threads: Input should be greater than or equal to 1"):
        ray_serve.build({"model": "m.gguf", "threads": "0"})
    deployment = ray_serve.build({"model": "m.gguf", "threads": "3", "parallel": "2", "num_gpus": "0.5"})
    options = deployment._bound_deployment
    assert options.ray_actor_options == {"num_cpus": 3, "num_gpus": 0.5} and options.max_ongoing_requests == 4


def test_a_replica_says_that_its_engine_failed_and_closes_it(tiny_model: Callable[..., Path]) -> None:
    from powerinfer_py.serving import ray_serve

    replica = ray_serve.Replica(ray_serve.RayServeOptions(str(tiny_model(tied=True)), parallel=1, threads=1))
    replica.check_health()
    replica._engine._failure = "engine: it failed."
    with pytest.raises(PlanError, match=r"engine: it failed\."):
        replica.check_health()
    thread = replica._engine._thread
    replica.__del__()
    assert not thread.is_alive()
