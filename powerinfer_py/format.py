"""Extended GGUF, version 1: the specification's names in one place, the plan they describe, read and write.

Nothing read from a file is believed before it is checked. The C++ reader is ggml/src/plan-read.cpp; it takes its
names from format-keys.h, which `python -m powerinfer_py.format --write-header PATH` generates from here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FORMAT_VERSION = 1
ARCHITECTURE = "powerinfer"
ALIGNMENT = 64
# The first bytes of each FFN tensor that the digest covers.
DIGEST_HEAD_BYTES = 4096
SIDECAR_SUFFIX = ".powerinfer.gguf"
# More layers than any model has; bounds what a damaged file can make a reader allocate.
MAX_BLOCK_COUNT = 4096

KEYS = {
    "architecture": "general.architecture",
    "alignment": "general.alignment",
    "format_version": "powerinfer.format_version",
    "base_architecture": "powerinfer.base.architecture",
    "base_file": "powerinfer.base.file",
    "base_ffn_digest": "powerinfer.base.ffn_digest",
    "block_count": "powerinfer.block_count",
    "embedding_length": "powerinfer.embedding_length",
    "feed_forward_length": "powerinfer.feed_forward_length",
    "ffn_activation": "powerinfer.ffn.activation",
    "ffn_gated": "powerinfer.ffn.gated",
    "ffn_activation_param": "powerinfer.ffn.activation_param",
    "ffn_threshold": "powerinfer.ffn.threshold",
    "ffn_product_threshold": "powerinfer.ffn.product_threshold",
    "ffn_loss": "powerinfer.ffn.loss",
    "predictor_kind": "powerinfer.predictor.kind",
    "predictor_input": "powerinfer.predictor.input",
    "predictor_threshold": "powerinfer.predictor.threshold",
    "predictor_recall": "powerinfer.predictor.recall",
    "predictor_candidate_density": "powerinfer.predictor.candidate_density",
    "profile_tokens": "powerinfer.profile.tokens",
    "profile_density": "powerinfer.profile.density",
    "profile_corpus": "powerinfer.profile.corpus",
}
TENSORS = {
    "base": "base",
    "neuron_order": "blk.%d.neuron_order",
    "neuron_frequency": "blk.%d.neuron_frequency",
    "ffn_down_t": "blk.%d.ffn_down_t.weight",
    "predictor_fc1": "blk.%d.predictor.fc1.weight",
    "predictor_fc2": "blk.%d.predictor.fc2.weight",
}
# In the base model.
BASE_TENSORS = {
    "base_gate": "blk.%d.ffn_gate.weight",
    "base_up": "blk.%d.ffn_up.weight",
    "base_down": "blk.%d.ffn_down.weight",
}
ACTIVATIONS = ("relu", "relu_sqr", "drelu", "silu", "gelu")
PREDICTOR_KINDS = ("none", "mlp", "linear")
PREDICTOR_INPUTS = ("ffn_input", "residual")


def header_text() -> str:
    """The text of ggml/src/format-keys.h.

    Returns:
        A C++ header with every key and tensor name and every constant of the format.
    """
    lines = [
        "// Key and tensor names and constants of extended GGUF. Generated from powerinfer_py/format.py: don't edit, run",
        "// python -m powerinfer_py.format --write-header ggml/src/format-keys.h",
        "#pragma once",
        "",
        "namespace powerinfer::format {",
        "",
        f"inline constexpr unsigned version = {FORMAT_VERSION};",
        f'inline constexpr char architecture[] = "{ARCHITECTURE}";',
        f"inline constexpr unsigned alignment = {ALIGNMENT};",
        f"inline constexpr unsigned digest_head_bytes = {DIGEST_HEAD_BYTES};",
        f'inline constexpr char sidecar_suffix[] = "{SIDECAR_SUFFIX}";',
        f"inline constexpr unsigned max_block_count = {MAX_BLOCK_COUNT};",
        "",
    ]
    lines += [f'inline constexpr char key_{name}[] = "{key}";' for name, key in KEYS.items()]
    lines += [""]
    lines += [f'inline constexpr char tensor_{name}[] = "{key}";' for name, key in {**TENSORS, **BASE_TENSORS}.items()]
    lines += [""]
    for name, values in (
        ("activations", ACTIVATIONS),
        ("predictor_kinds", PREDICTOR_KINDS),
        ("predictor_inputs", PREDICTOR_INPUTS),
    ):
        lines.append(f"inline constexpr const char * {name}[] = {{{', '.join(f'{chr(34)}{v}{chr(34)}' for v in values)}}};")
    lines += ["", "}  // namespace powerinfer::format", ""]
    return "\n".join(lines)


def main() -> int:
    """Writes the C++ header of the names: `python -m powerinfer_py.format --write-header PATH`."""
    parser = argparse.ArgumentParser(prog="python -m powerinfer_py.format", description=main.__doc__)
    parser.add_argument("--write-header", metavar="PATH", required=True, help="where to write format-keys.h")
    Path(parser.parse_args().write_header).write_text(header_text(), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
