"""`powerinfer place`: from plan, base model and hardware file to a split that is shown, drawn and saved."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import sysconfig
import types
from dataclasses import replace
from pathlib import Path

import devices
import pytest
import tiny_models

import powerinfer_py
from powerinfer_py import _core, cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.tools import place_model
from powerinfer_py.tools.arguments import device_memory, open_plan
from powerinfer_py.tools.hardware import Cpu, Gpu, Hardware, write_hardware
from powerinfer_py.tools.place_model import PlaceOptions, layer_devices, place

GPU = Gpu("GPU 0", 1 << 30, 1e12, {"f32": 9e11}, 2e10, 2e10, 1e-7)
CPU = Cpu("CPU", 64 << 30, 5e10, {"f32": 4e10}, 8)
ONE_GPU = Hardware("one", "made up", CPU, (GPU,))
TWO_GPUS = Hardware("two", "made up", CPU, (GPU, replace(GPU, name="GPU 1", memory_bytes=1 << 29)))
# Of the tiny model's 4 layers: rows, and three values for each neuron.
FFN_BYTES = 4 * 256 * (3 * 64 * 4 + 3 * 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a profiled plan beside it."""
    path = tiny_models.write_tiny_model(tmp_path / "m.gguf")
    tiny_models.write_tiny_plan(path, order_seed=1, frequency=True)
    return path


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    return write_hardware(ONE_GPU, tmp_path / "hw.json")


def no_note(text: str) -> None:
    raise AssertionError(text)


def options_of(model: Path, *budgets: str, **changes: object) -> PlaceOptions:
    return PlaceOptions(model, budgets, **{"ctx_size": 128, **changes})


def place_tiny(model: Path, *budgets: str, hardware: Hardware = ONE_GPU, **changes: object) -> place_model.Split:
    plan, base = open_plan(model, None)
    return place(plan, base, hardware, options_of(model, *budgets, **changes), no_note)


def mib(n_bytes: float) -> str:
    """An amount that is read as so many bytes, or one or two more."""
    return f"{(n_bytes + 1) / 2**20:.6f}MiB"


def test_split_is_shown_written_drawn_and_saved(
    model: Path, hardware: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = place_tiny(model, "1").dense_bytes[0]
    outputs = {name: tmp_path / name for name in ("split.json", "split.png")}
    line = f"place {model} --vram-budget {mib(dense + FFN_BYTES // 2)} --hardware {hardware} -c 128 --save"
    line += f" -o {outputs['split.json']} --plot {outputs['split.png']}"
    assert cli.main(line.split()) == 0
    shown = capsys.readouterr().out
    found = json.loads(outputs["split.json"].read_text())
    assert outputs["split.png"].read_bytes().startswith(b"\x89PNG")
    assert sum(found["n_hot"]) == 512 and found["hot_bytes"][0] >= found["used_bytes"][0] == FFN_BYTES // 2
    assert found["method"] == "milp" and found["gap"] <= 1e-4 and 0 < found["token_s"] < found["cold_s"]
    assert 0.5 < found["gpu_share"] < 1
    for i, n_hot in enumerate(found["n_hot"]):
        assert any(
            row.split()[:4] == [str(i), "0", str(n_hot), f"{n_hot / 256:.1%}"] for row in shown.splitlines() if row
        )
    for part in ("512 of 1024 neurons hot", "tokens/s", "GPU 0: budget", "milp, gap 0.00%"):
        assert part in shown
    # the plan that was written: found by Python and by the core, and still the model's
    sidecar = pi_format.find_sidecar(model)
    plan = pi_format.read_plan(sidecar)
    (saved,) = plan.placements
    assert list(saved.n_hot) == found["n_hot"] and saved.n_ctx == 128 and saved.budget in line
    assert pi_format.find_placement(plan, found["hot_bytes"]) == saved
    assert _core.find_placement(sidecar, model, found["hot_bytes"]) == 0
    _core.Plan.open(sidecar, model).close()


def test_saving_again_replaces_a_placement_for_the_same_memory_and_keeps_others(model: Path, hardware: Path) -> None:
    budgets = ["2MiB", "100%", "2.0MiB", "3MiB"]
    for budget in budgets:
        assert cli.main(f"place {model} --vram-budget {budget} --hardware {hardware} -c 128 --save".split()) == 0
    saved = pi_format.read_plan(pi_format.find_sidecar(model)).placements
    assert [placement.budget for placement in saved] == ["100%", "2.0MiB", "3MiB"]


def test_placement_is_saved_into_a_packed_plan(tmp_path: Path, hardware: Path) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf")
    packed = tiny_models.write_tiny_plan(model, tmp_path / "p.powerinfer.gguf", frequency=True, embedded=True)
    assert cli.main(f"place {packed} --vram-budget 2MiB --hardware {hardware} -c 128 --save".split()) == 0
    plan = pi_format.read_plan(packed)
    assert plan.is_embedded and len(plan.placements) == 1
    content = packed.read_bytes()
    assert content[plan.base_offset : plan.base_offset + plan.base_size] == model.read_bytes()


def test_placement_is_dropped_when_statistics_change_or_the_plan_is_rebound(
    model: Path, hardware: Path, tmp_path: Path
) -> None:
    """BUG_CASES 12."""
    assert cli.main(f"place {model} --vram-budget 2MiB --hardware {hardware} -c 128 --save".split()) == 0
    sidecar = pi_format.find_sidecar(model)
    other = tiny_models.write_tiny_model(tmp_path / "other.gguf", row_type="F16")
    rebound = tmp_path / "other.powerinfer.gguf"
    assert cli.main(f"rebind {sidecar} {other} -o {rebound}".split()) == 0
    assert len(pi_format.read_plan(sidecar).placements) == 1 and not pi_format.read_plan(rebound).placements


def test_hot_share_shrinks_as_the_context_grows(model: Path) -> None:
    """BUG_CASES 15; the cache has 2 heads of 32 values, keys and values, of 2 bytes in each of 4 layers."""
    budget = mib(place_tiny(model, "1").dense_bytes[0] + FFN_BYTES)
    splits = [place_tiny(model, budget, ctx_size=n_ctx) for n_ctx in (128, 512, 700, 800)]
    n_hot = [sum(split.placement.n_hot) for split in splits]
    assert n_hot[0] == 1024 and n_hot == sorted(n_hot, reverse=True) and n_hot[-1] < n_hot[0]
    assert splits[1].dense_bytes[0] - splits[0].dense_bytes[0] == (512 - 128) * 4 * 2 * 2 * 32 * 2
    for split in splits:
        assert split.dense_bytes[0] + split.placement.used_bytes[0] <= split.budget_bytes[0]


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    """BUG_CASES 31."""
    sizes = {}
    for tied in (False, True):
        model = tiny_models.write_tiny_model(tmp_path / f"{tied}.gguf", tied=tied)
        tiny_models.write_tiny_plan(model, frequency=True)
        sizes[tied] = place_tiny(model, "1").dense_bytes
    assert sizes[True] == sizes[False]


def test_budget_that_doesnt_hold_the_rest_of_the_model_is_an_empty_split_with_a_note(model: Path) -> None:
    plan, base = open_plan(model, None)
    notes: list[str] = []
    for budget in ("0", "0.1MiB"):
        split = place(plan, base, ONE_GPU, options_of(model, budget), notes.append)
        assert split.placement.n_hot == (0, 0, 0, 0) and split.problem.capacity_bytes == (0,)
        assert "all but the FFNs takes" in notes[-1] and "no neuron fits" in notes[-1]


def test_memory_for_hot_neurons_can_be_given(model: Path) -> None:
    plan, base = open_plan(model, None)
    room = place_model.Room((FFN_BYTES // 4,), (0,), (0,) * 4)
    split = place(plan, base, ONE_GPU, options_of(model, "1"), no_note, room)
    assert sum(split.placement.n_hot) == 256 and split.saved.hot_bytes == (FFN_BYTES // 4,)


def test_budget_above_the_memory_is_clamped_with_a_note(model: Path) -> None:
    plan, base = open_plan(model, None)
    notes: list[str] = []
    split = place(plan, base, ONE_GPU, options_of(model, "8GiB"), notes.append)
    assert split.budget_bytes == (GPU.memory_bytes,) and "the budget is 8GiB, the memory 1024.0 MiB" in notes[0]


def test_two_gpus_get_layers_by_their_budgets(model: Path) -> None:
    second = place_tiny(model, "1").dense_bytes[0] + FFN_BYTES // 8
    split = place_tiny(model, mib(1.4 * second), mib(second), hardware=TWO_GPUS)
    assert split.saved.devices == ("GPU 0", "GPU 1") and split.saved.i_device == (0, 0, 0, 1)
    assert all(used <= n for used, n in zip(split.placement.used_bytes, split.problem.capacity_bytes))
    assert sum(split.dense_bytes) == place_tiny(model, "1").dense_bytes[0]
    assert layer_devices(6, (1, 1)) == [0, 0, 0, 0, 1, 1, 1] and layer_devices(3, (0, 5)) == [1, 1, 1, 1]
    assert layer_devices(3, (0, 0)) == [1, 1, 1, 1] and layer_devices(4, (1 << 40,)) == [0] * 5
    plan, base = open_plan(model, None)
    notes: list[str] = []
    place(plan, base, TWO_GPUS, options_of(model, "1"), notes.append)
    assert notes == ["two: 1 of its GPUs have no budget and aren't used."]
    with pytest.raises(OptionError, match=r"vram-budget: 2 given, one has 1 GPUs; expected one per GPU"):
        place(plan, base, ONE_GPU, options_of(model, "1", "1"), no_note)


def test_cold_neurons_that_dont_fit_the_cpu_are_an_error(model: Path) -> None:
    small = replace(ONE_GPU, cpu=replace(CPU, memory_bytes=FFN_BYTES // 2))
    plan, base = open_plan(model, None)
    with pytest.raises(OptionError, match="host memory: the cold neurons don't fit"):
        place(
            plan, base, small, options_of(model, "2MiB"), no_note, place_model.Room((FFN_BYTES // 4,), (0,), (0,) * 4)
        )
    split = place(plan, base, small, options_of(model, "2MiB"), no_note, place_model.Room((FFN_BYTES,), (0,), (0,) * 4))
    assert sum(split.placement.n_hot) > 512


def test_plan_without_statistics_is_placed_with_a_note(
    tmp_path: Path, hardware: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf")
    tiny_models.write_tiny_plan(model)
    line = f"place {model} --vram-budget 2MiB --hardware {hardware} -c 128"
    logged: list[str] = []
    plan, base = open_plan(model, None)
    split = place(plan, base, ONE_GPU, options_of(model, "2MiB"), logged.append)
    assert sum(split.placement.n_hot) > 0 and "all of such a layer's neurons count equally" in logged[0]
    assert cli.main(line.split()) == 0
    assert cli.main([*line.split(), "--strict"]) == 1
    assert "powerinfer: strict: " in capsys.readouterr().err


def test_predictor_and_stored_down_rows_count(tmp_path: Path) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf", bias=True, row_type="Q4_0")
    options = {"frequency": True, "ffn_down_t": "F16", "predictor": "linear", "rank": 8, "candidate_density": 0.75}
    tiny_models.write_tiny_plan(model, **options)
    plan, base = open_plan(model, None)
    layer = place(plan, base, ONE_GPU, options_of(model, "1"), lambda text: None).problem.layers[1]
    q4_row, f16_row, predictor = 36, 128, (8 * 64 + 256 * 8) * 4 / 256
    assert layer.neuron_bytes == 2 * q4_row + f16_row + 4 * 3
    density = float(plan.layers[1].neuron_frequency.mean(dtype="float64"))
    # only f32 has a rate; the predictor is f32
    assert layer.cpu[0] == pytest.approx(predictor / 4e10)
    assert layer.cpu[1] == pytest.approx((0.75 / density * q4_row + q4_row + f16_row) / 5e10)
    assert layer.gpu == (pytest.approx((2 * q4_row + f16_row) / 1e12), 0.0)
    cuda = place(plan, base, ONE_GPU, options_of(model, "1", cuda=True), lambda text: None).problem.layers[1]
    assert cuda.gpu[0] == pytest.approx(predictor / 9e11) and cuda.gpu[1] > 0


@pytest.mark.parametrize("row_type", ["F32", "F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_bytes_of_a_hot_neuron_are_the_devices(row_type: str, arch: str, tmp_path: Path) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf", arch, row_type=row_type)
    sidecar = tiny_models.write_tiny_plan(model, frequency=True, activation="relu")
    plan, base = open_plan(model, None)
    layers = place(plan, base, ONE_GPU, options_of(model, "1"), lambda text: None).problem.layers
    library = ctypes.CDLL(str(Path(_core.__file__).parent / "lib" / "libggml-powerinfer.so"))
    library.ggml_backend_powerinfer_plan_open.restype = ctypes.c_void_p
    library.ggml_backend_powerinfer_plan_neuron_bytes.restype = ctypes.c_uint64
    error = ctypes.create_string_buffer(1000)
    handle = ctypes.c_void_p(
        library.ggml_backend_powerinfer_plan_open(
            str(sidecar).encode(), str(model).encode(), None, error, ctypes.c_size_t(len(error))
        )
    )
    assert handle, error.value
    for i, layer in enumerate(layers):
        assert layer.neuron_bytes == library.ggml_backend_powerinfer_plan_neuron_bytes(handle, None, i)
    library.ggml_backend_powerinfer_plan_free(handle)


def test_machine_is_measured_when_no_hardware_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("measure_hardware")
    module.MeasureOptions = lambda devices: None
    module.measure_hardware = lambda options, steps, note: (ONE_GPU, None)
    monkeypatch.setitem(sys.modules, "powerinfer_py.tools.measure_hardware", module)
    assert cli.main(f"place {model} --vram-budget 2MiB -c 128".split()) == 0
    assert "GPU 0: budget 2.0 MiB" in capsys.readouterr().out
    module.measure_hardware = lambda options, steps, note: (replace(ONE_GPU, gpus=()), None)
    assert cli.main(f"place {model} --vram-budget 2MiB -c 128".split()) == 1
    assert "no GPU that can be measured" in capsys.readouterr().err


def place_save_and_load(model: Path, hardware: Path) -> tuple[tuple[int, ...], str, list[int]]:
    """What was saved, the line that a load said of it, and hot neurons of its layers."""
    devices.FakeDevices()
    assert cli.main(f"place {model} --vram-budget 60MiB --hardware {hardware} -c 256 --save".split()) == 0
    (saved,) = pi_format.read_plan(pi_format.find_sidecar(model)).placements
    with powerinfer_py.Llama(str(model), n_ctx=256, vram_budget="60MiB", verbose=False) as llm:
        return saved.n_hot, llm.memory().split, [layer["n_hot"] for layer in llm._plan.layers()]


@pytest.mark.usefixtures("fake_device")
def test_load_with_the_same_budget_takes_the_saved_split(tmp_path: Path) -> None:
    path = tiny_models.write_tiny_model(tmp_path / "m.gguf", n_embd=256, n_ff=1024)
    tiny_models.write_tiny_plan(path, order_seed=1, frequency=True)
    fake = replace(GPU, name="FAKE0: fake", memory_bytes=100 << 20, round_trip_s=1e-6)
    hardware = write_hardware(replace(ONE_GPU, gpus=(fake,)), tmp_path / "hw.json")
    saved, text, loaded = devices.run_in_child(place_save_and_load, path, hardware)
    assert sum(saved) > 0 and loaded == list(saved)
    assert "saved" in text


def test_model_without_a_plan_or_with_nothing_to_place_is_an_error(
    tmp_path: Path, hardware: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf")
    assert cli.main(f"place {model} --vram-budget 2MiB --hardware {hardware}".split()) == 1
    assert "there is no plan beside it" in capsys.readouterr().err
    moe = tiny_models.write_tiny_model(tmp_path / "moe.gguf", n_expert=4, n_ff=96)
    tiny_models.write_tiny_plan(moe)
    plan, base = open_plan(moe, None)
    with pytest.raises(PlanError, match="covers no layer"):
        place(plan, base, ONE_GPU, options_of(moe, "1"), no_note)


@pytest.mark.parametrize(("flag", "value"), [("--time-limit", "-1"), ("--gap", "1"), ("--ctx-size", "0")])
def test_impossible_limits_are_refused(
    flag: str, value: str, model: Path, hardware: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(f"place {model} --vram-budget 1 --hardware {hardware} {flag} {value}".split()) == 1
    assert value in capsys.readouterr().err


# ---- Amounts of memory ----------------------------------------------------------------------------------------------

AMOUNTS = {
    "8": 8 << 30,
    "0": 0,
    "1.5": 3 << 29,
    ".5": 1 << 29,
    "8G": 8 << 30,
    "8GB": 8 << 30,
    "8GiB": 8 << 30,
    "512M": 512 << 20,
    "512MB": 512 << 20,
    "512MiB": 512 << 20,
    "1e1MiB": 10 << 20,
    "75%": 750,
    "100%": 1000,
}
NOT_AMOUNTS = [
    "",
    "-1",
    "+1",
    "101%",
    "8 GiB",
    "8gib",
    "GiB",
    "8TiB",
    "8apples",
    "nan",
    "inf",
    "1e999",
    "0.1.2",
    " 8",
    "%",
]


@pytest.mark.parametrize("text", [*AMOUNTS, *NOT_AMOUNTS])
def test_amount_of_memory_is_read_as_the_native_program_does(text: str) -> None:
    program = Path(sysconfig.get_path("scripts")) / "powerinfer-main"
    command = [str(program), "-m", "none.gguf", "-p", "x", "--vram-budget", text]
    native = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert native.returncode == 1
    if text in AMOUNTS:
        assert device_memory("vram-budget", text, 1000) == AMOUNTS[text]
        assert "--vram-budget" not in native.stderr.replace(f"--vram-budget: found {text}", "")
    else:
        with pytest.raises(OptionError, match="expected an amount of GPU memory: GiB as a plain number, or 8GiB"):
            device_memory("vram-budget", text, 1000)
        assert f"--vram-budget: found '{text}'" in native.stderr
