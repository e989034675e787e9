"""Writes the corpora that fuzzing starts from, and the dictionaries of names: `python tests/fuzz/seeds.py`.

Small valid files of every kind, and the ways in which files are damaged. What fuzzing found stays beside them, as `found-*`.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from powerinfer_py import format as pi_format
from powerinfer_py.format import Plan, PlanLayer, Rows, SavedPlacement
from powerinfer_py.tools.hardware import Cpu, Gpu, Hardware, write_hardware

FOLDER = Path(__file__).resolve().parent
CORPUS = FOLDER / "corpus"
N_LAYER, N_EMBD, N_FF, RANK = 2, 8, 12, 4


def write_base(
    path: Path, *, gated: bool = True, row_type: str = "F32", others: Iterable[str] = (), n_parts: int = 1
) -> Path:
    """A model that has FFNs and nothing else: all that readers of a base look at."""
    writer = gguf.GGUFWriter(path, "llama")
    if n_parts > 1:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", n_parts)
    writer.add_block_count(N_LAYER)
    writer.add_embedding_length(N_EMBD)
    kind = np.dtype({"F32": np.float32, "F16": np.float16}[row_type])
    rng = np.random.default_rng(1)
    for i in range(N_LAYER):
        for name, shape in (("gate", (N_FF, N_EMBD)), ("up", (N_FF, N_EMBD)), ("down", (N_EMBD, N_FF))):
            if gated or name != "gate":
                writer.add_tensor(f"blk.{i}.ffn_{name}.weight", rng.standard_normal(shape).astype(kind))
    for name in others:
        writer.add_tensor(name, np.zeros(N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rows(n_rows: int, n: int, row_type: GGMLQuantizationType = GGMLQuantizationType.F16) -> Rows:
    return Rows.of(np.random.default_rng(n_rows).standard_normal((n_rows, n)).astype(np.float32), row_type)


def _full(plan: Plan, predictor: str) -> Plan:
    """The plan with everything in it that a plan can have."""
    rng = np.random.default_rng(2)

    def full(layer: PlanLayer) -> PlanLayer:
        return dataclasses.replace(
            layer,
            activation_param=0.01,
            threshold=0.1,
            product_threshold=0.2,
            predictor=predictor,
            predictor_threshold=-0.5,
            predictor_recall=0.99,
            predictor_candidate_density=0.3,
            profile_tokens=1000,
            profile_density=0.2,
            neuron_order=rng.permutation(N_FF).astype(np.int32),
            neuron_frequency=np.sort(rng.random(N_FF))[::-1].astype(np.float32),
            ffn_down_t=_rows(N_FF, N_EMBD),
            fc1=_rows(RANK, N_EMBD),
            fc2=_rows(N_FF, RANK),
        )

    plan = dataclasses.replace(
        plan, layers=tuple(map(full, plan.layers)), loss=0.001, corpus="text.txt", predictor_input="residual"
    )
    hashes = {"model_hash": pi_format.model_hash(plan), "statistics_hash": pi_format.statistics_hash(plan)}
    saved = SavedPlacement("8GiB,25%", 512, ("CUDA0", "CUDA1"), (1000, 2000), (8, 0), (0, 1), 0.01, 0.002, **hashes)
    return dataclasses.replace(
        plan, placements=(saved, dataclasses.replace(saved, devices=("CUDA0",), hot_bytes=(500,), i_device=(0, 0)))
    )


def _write_plans(folder: Path, base: Path, scratch: Path) -> None:
    bare = pi_format.bare_plan(base, "silu")
    one = dataclasses.replace(bare, layers=(bare.layers[0], PlanLayer()))
    ungated = write_base(scratch / "ungated", gated=False, row_type="F16")
    experts = write_base(scratch / "experts", others=["blk.1.ffn_gate_inp.weight", "blk.0.nextn.x"])
    pi_format.write_plan(bare, folder / "bare")
    pi_format.write_plan(one, folder / "one-layer")
    pi_format.write_plan(_full(bare, "mlp"), folder / "full")
    pi_format.write_plan(_full(bare, "linear"), folder / "full-embedded", base_embedded=base)
    ungated_plan = dataclasses.replace(pi_format.bare_plan(ungated, "relu_sqr"), base_file="x.gguf")
    pi_format.write_plan(ungated_plan, folder / "ungated-embedded", base_embedded=ungated)
    part = write_base(scratch / "part", n_parts=2, row_type="F16")
    for path in (base, ungated, experts, part):
        shutil.copy(path, folder / f"model-{path.name}")
    whole = (folder / "full").read_bytes()
    (folder / "damaged-half").write_bytes(whole[: len(whole) // 2])
    (folder / "damaged-header").write_bytes(whole[:24])
    (folder / "damaged-zeros").write_bytes(bytes(64))
    (folder / "damaged-counts").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 16)


def _write_original(folder: Path) -> None:
    """Models and GPU splits of the original PowerInfer, which begin otherwise."""
    for architecture in ("llama", "opt"):
        writer = gguf.GGUFWriter(folder / f"model-{architecture}", architecture)
        writer.add_block_count(N_LAYER)
        writer.add_embedding_length(N_EMBD)
        writer.add_float32("powerinfer.sparse_threshold", 0.1)
        for i in range(N_LAYER):
            for name, n_rows, n in (
                ("ffn_up", N_FF, N_EMBD), ("ffn_down_t", N_FF, N_EMBD), ("fc1", RANK, N_EMBD), ("fc2", N_FF, RANK),
            ):  # fmt: skip
                writer.add_tensor(f"blk.{i}.{name}.weight", np.ones((n_rows, n), np.float16))
            writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(N_EMBD, np.float32))
        _finish(writer)
    writer = gguf.GGUFWriter(folder / "split", "generic.gpu_index")
    writer.add_block_count(N_LAYER)
    writer.add_uint64("split.vram_capacity", 1 << 20)
    for i in range(N_LAYER):
        mask = (np.arange(N_FF) % 3 == 0).astype(np.int32)
        writer.add_tensor(f"blk.{i}.gpu_idx", mask)
        writer.add_tensor(f"blk.{i}.gpu_bucket", np.flatnonzero(mask).astype(np.int32))
    _finish(writer)
    for path in list(folder.iterdir()):
        path.write_bytes(b"PWRI" + path.read_bytes()[4:])


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_pickles(folder: Path, scratch: Path) -> None:
    """The pickle inside what torch.save writes, which the target puts back into its archive; and code that must not run."""
    halves = {"fc1.weight": torch.ones(RANK, N_EMBD), "fc2.weight": torch.ones(N_FF, RANK)}
    values = {
        "counts": torch.arange(N_FF),
        "halves": halves,
        "sparse": torch.eye(4).to_sparse(),
        "nested": [halves, {"x": 1}],
    }
    for name, value in values.items():
        torch.save(value, scratch / "x.pt")
        with zipfile.ZipFile(scratch / "x.pt") as archive:
            (folder / name).write_bytes(archive.read("x/data.pkl"))
    (folder / "code").write_bytes(b"cos\nsystem\n(S'exit 3'\ntR.")
    (folder / "reduce").write_bytes(pickle.dumps(print, protocol=2))
    torch.save(torch.arange(N_FF), folder / "legacy", _use_new_zipfile_serialization=False)


def _write_checkpoints(folder: Path) -> None:
    """The JSON files of a checkpoint's folder, by name: configurations, and tokenizers of both kinds."""
    shape = {
        "vocab_size": 16, "hidden_size": N_EMBD, "intermediate_size": N_FF, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    llama = {**shape, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "ab": 5, "\u0120": 6, "\u0120a": 7}
    added = [{"id": i, "content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
              "single_word": False} for i, text in enumerate(("<unk>", "<s>", "</s>"))]  # fmt: skip
    bpe = {"type": "BPE", "vocab": words, "merges": ["a b", "\u0120 a"], "unk_token": None, "byte_fallback": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level, "model": bpe,
    }  # fmt: skip
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    spm = {
        **tokenizer, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                                           {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "decoder": None, "model": {**bpe, "vocab": {text: i for i, text in enumerate(pieces)}, "merges": ["\u2581 a"], "byte_fallback": True},
    }  # fmt: skip
    config = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>", "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ x }}"}], "tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": {"3": {"content": "a", "special": True}},
    }  # fmt: skip
    folders = {
        "llama": {"config.json": llama, "tokenizer.json": tokenizer, "tokenizer_config.json": config},
        "rope": {"config.json": {**llama, "rope_parameters": scaled, "vocab_size": 300}, "tokenizer.json": spm,
                 "tokenizer_config.json": {"eos_token": "</s>"}},
        "yarn": {"config.json": {**llama, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": yarn}},
        "falcon": {
            "config.json": {**shape, "architectures": ["FalconForCausalLM"], "activation": "relu", "alibi": False},
            "vocab.json": words,
            "added_tokens.json": {"c": 8},
        },
        "opt": {
            "config.json": {**shape, "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": N_FF,
                            "activation_function": "relu", "word_embed_proj_dim": N_EMBD, "do_layer_norm_before": True},
            "vocab.json": words,
        },
        "minicpm": {
            "config.json": {**llama, "architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4,
                            "dim_model_base": 4, "hidden_act": "fatrelu", "hidden_act_param": 0.1},
            "model.safetensors.index.json": {"weight_map": {"x": "model.safetensors", "y": "y.safetensors"}},
        },
    }  # fmt: skip
    for name, files in folders.items():
        (folder / name).write_text(json.dumps(files))


def write_llama(path: Path) -> Path:
    """The tensors of the checkpoints above, where they are of Llama's form."""
    shapes = {
        "embed_tokens": (16, N_EMBD), "norm": (N_EMBD,), "layers.0.input_layernorm": (N_EMBD,),
        "layers.0.post_attention_layernorm": (N_EMBD,), "layers.0.self_attn.q_proj": (N_EMBD, N_EMBD),
        "layers.0.self_attn.k_proj": (N_EMBD // 2, N_EMBD), "layers.0.self_attn.v_proj": (N_EMBD // 2, N_EMBD),
        "layers.0.self_attn.o_proj": (N_EMBD, N_EMBD), "layers.0.mlp.gate_proj": (N_FF, N_EMBD),
        "layers.0.mlp.up_proj": (N_FF, N_EMBD), "layers.0.mlp.down_proj": (N_EMBD, N_FF),
    }  # fmt: skip
    tensors = {f"model.{name}.weight": torch.ones(shape, dtype=torch.float16) for name, shape in shapes.items()}
    save_file({**tensors, "lm_head.weight": torch.ones(16, N_EMBD, dtype=torch.float16)}, path)
    return path


def _write_safetensors(folder: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(0, dtype=torch.int64)}
    save_file(tensors, folder / "safetensors", metadata={"format": "pt"})
    save_file({"fp8": torch.ones(4).to(torch.float8_e4m3fn)}, folder / "safetensors-fp8")
    whole = (folder / "safetensors").read_bytes()
    (folder / "safetensors-half").write_bytes(whole[: len(whole) // 2])
    (folder / "safetensors-size").write_bytes(b"\xff" * 8 + whole[8:])


def _write_sentencepiece(folder: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2 as pb

    for model_type in (1, 2):
        proto = pb.ModelProto()
        for i, text in enumerate(
            ("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "\u2581a")
        ):
            kind = 2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1
            proto.pieces.add(piece=text, score=-float(i), type=kind)
        proto.trainer_spec.model_type = model_type
        proto.trainer_spec.byte_fallback = True
        proto.normalizer_spec.add_dummy_prefix = True
        (folder / f"type-{model_type}").write_bytes(proto.SerializeToString())


def _write_hardware(folder: Path) -> None:
    cpu = Cpu("cpu", 1 << 36, 1e10, {"q4_0": 1e10}, 8)
    gpu = Gpu("gpu", 1 << 33, 1e11, {"f16": 1e11}, 1e10, 1e10, 1e-5)
    write_hardware(Hardware("machine", "made up", cpu, (gpu, gpu)), folder / "two-gpus")
    write_hardware(Hardware("machine", "made up", cpu, ()), folder / "no-gpu")
    (folder / "damaged-version").write_text('{"format_version": 2}')
    (folder / "damaged-twice").write_text('{"format_version": 1, "name": "a", "name": "b"}')
    (folder / "damaged-deep").write_text("[" * 2000)


def write_dictionary(path: Path) -> None:
    """Names of the formats, as libFuzzer reads dictionaries."""
    names = {name % 0 if "%d" in name else name for name in (*pi_format.KEYS.values(), *pi_format.TENSORS.values())}
    names |= {name % 1 for name in pi_format.BASE_TENSORS.values()}
    names |= {*pi_format.ACTIVATIONS, *pi_format.PREDICTOR_KINDS, *pi_format.PREDICTOR_INPUTS, "powerinfer", "llama"}
    names |= {
        "llama.block_count",
        "llama.embedding_length",
        "split.count",
        "split.no",
        "split.vram_capacity",
        "GGUF",
        "PWRI",
    }
    names |= {
        "blk.0.gpu_idx",
        "blk.0.gpu_bucket",
        "powerinfer.sparse_threshold",
        "blk.0.fc1.weight",
        "blk.0.ffn_gate_inp.weight",
    }
    path.write_text("".join(f'"{name}"\n' for name in sorted(names)))


def main() -> int:
    for path in CORPUS.rglob("*"):
        if path.is_file() and not path.name.startswith("found-"):
            path.unlink()
    writers = {
        "original": _write_original,
        "checkpoint": _write_checkpoints,
        "weights": _write_safetensors,
        "sentencepiece": _write_sentencepiece,
        "hardware": _write_hardware,
    }
    for name in (*writers, "plan"):
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
    for name, write in writers.items():
        write(CORPUS / name)
    with tempfile.TemporaryDirectory() as scratch:
        base = write_base(CORPUS / "base")
        write_llama(CORPUS / "llama.safetensors")
        _write_plans(CORPUS / "plan", base, Path(scratch))
        _write_pickles(CORPUS / "weights", Path(scratch))
    write_dictionary(FOLDER / "names.dict")
    n_bytes = sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file())
    print(f"{CORPUS}: {n_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
