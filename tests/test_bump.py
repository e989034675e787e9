"""tools/bump_llama.py: headers read from small texts, and what is told about two of them. No network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bump() -> ModuleType:
    """The tool isn't installed: it works on the source tree."""
    spec = importlib.util.spec_from_file_location("bump_llama", ROOT / "tools" / "bump_llama.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BACKEND = """
#pragma once
#define GGML_BACKEND_API_VERSION 2
#ifdef __cplusplus
extern "C" {
#endif
    // a comment; with a semicolon
    struct ggml_backend_i {
        const char * (*get_name)(ggml_backend_t backend);
        void         (*free)    (ggml_backend_t backend);
        /* (optional) */ enum ggml_status (*compute)(ggml_backend_t backend, struct ggml_cgraph * cgraph, const size_t n);
    };
    struct ggml_backend {
        ggml_guid_t guid;
        struct ggml_backend_i iface;
        void * context;
    };
    GGML_API ggml_backend_t ggml_backend_init(struct ggml_backend_i iface,
                                              const char * name, uint8_t flags[4]);
#ifdef __cplusplus
}
#endif
"""
OURS = """
extern "C" {
struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    enum ggml_status (*compute)(ggml_backend_t, ggml_cgraph * graph, const size_t);
};
struct ggml_backend { ggml_guid_t guid; ggml_backend_i iface; void * context; };
ggml_backend_t ggml_backend_init(ggml_backend_i, const char *, uint8_t *);
}  // extern "C"
namespace powerinfer {
status ggml_abi_check();
}
constexpr int ggml_abi_api_version = 2;
"""
PUBLIC = """
    #define GGML_MAX_DIMS 4
    #define LLAMA_TOKEN_NULL (-1)
    typedef int32_t llama_pos;
    typedef void (*llama_log)(enum ggml_log_level level, const char * text, void * user_data);
    enum ggml_type { GGML_TYPE_F32 = 0, GGML_TYPE_F16, GGML_TYPE_Q4_0 = 2, GGML_TYPE_BIG = 1 << 4, GGML_TYPE_COUNT };
    struct llama_model_params { int32_t n_gpu_layers; bool a, * b; float split[4]; };
    typedef struct llama_batch_item { llama_pos pos = 0; } llama_batch_item;
    LLAMA_API struct llama_model * llama_load(const char * path, struct llama_model_params params);
    DEPRECATED(LLAMA_API int32_t llama_old(void), "use llama_load(x) instead");
    static inline int helper(void) { return 1; }
"""


def test_header_is_read(bump: ModuleType) -> None:
    found = bump.parse_header(PUBLIC)
    assert found.constants == {"GGML_MAX_DIMS": "4", "LLAMA_TOKEN_NULL": "-1"}
    assert found.aliases == {"llama_pos": "int32_t", "llama_log": "void (ggml_log_level, const char *, void *)"}
    expected = {"GGML_TYPE_F32": 0, "GGML_TYPE_F16": 1, "GGML_TYPE_Q4_0": 2, "GGML_TYPE_BIG": 16, "GGML_TYPE_COUNT": 17}
    assert found.enumerators == expected
    fields = {"n_gpu_layers": "int32_t", "a": "bool", "b": "bool *", "split": "float[4]"}
    assert found.structs == {"llama_model_params": fields, "llama_batch_item": {"pos": "llama_pos"}}
    loads = "llama_model * (const char *, llama_model_params)"
    assert found.functions == {"llama_load": loads, "llama_old": "int32_t ()"}


def test_spelling_and_parameter_names_are_no_difference(bump: ModuleType) -> None:
    assert bump.compare_structs(bump.parse_header(OURS), bump.parse_header(BACKEND)) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("void         (*free)    (ggml_backend_t backend);", "", "ggml_backend_i: field free is gone"),
        ("void * context;", "void * context; int extra;", "ggml_backend: field extra was added after context"),
        ("const size_t n", "const size_t n, int flags", "ggml_backend_i: field compute was"),
        ("const char * name,", "", "function ggml_backend_init was"),
        ("struct ggml_backend {", "struct ggml_backend_v2 {", "struct ggml_backend is gone"),
        ("ggml_guid_t guid;", "", "ggml_backend: field guid is gone"),
    ],
)
def test_change_of_an_internal_struct_is_told(bump: ModuleType, old: str, new: str, sentence: str) -> None:
    assert old in BACKEND
    differences = bump.compare_structs(bump.parse_header(OURS), bump.parse_header(BACKEND.replace(old, new)))
    assert len(differences) == 1 and differences[0].startswith(sentence)


def test_other_order_of_fields_is_told(bump: ModuleType) -> None:
    swapped = BACKEND.replace("ggml_guid_t guid;", "").replace("void * context;", "void * context; ggml_guid_t guid;")
    differences = bump.compare_structs(bump.parse_header(OURS), bump.parse_header(swapped))
    assert differences == ["ggml_backend: the fields are in another order, from guid on."]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("const char * path, ", "", "function llama_load was"),
        ("GGML_TYPE_F16,", "GGML_TYPE_NEW, GGML_TYPE_F16,", "GGML_TYPE_F16 was 1 and is 2"),
        ("GGML_MAX_DIMS 4", "GGML_MAX_DIMS 5", "GGML_MAX_DIMS was 4 and is 5"),
        ("bool a,", "bool c,", "llama_model_params: field c was added after n_gpu_layers"),
        ("typedef int32_t llama_pos", "typedef int64_t llama_pos", "type llama_pos was int32_t and is int64_t"),
    ],
)
def test_change_of_a_public_name_is_told(bump: ModuleType, old: str, new: str, sentence: str) -> None:
    used = {"llama_load", "GGML_TYPE_F16", "GGML_MAX_DIMS", "llama_model_params", "llama_pos"}
    before = bump.parse_header(PUBLIC)
    differences = bump.compare_public(before, bump.parse_header(PUBLIC.replace(old, new)), used)
    assert differences and differences[0].startswith(sentence)
    assert bump.compare_public(before, before, used) == []


def test_change_of_a_name_that_we_dont_use_is_not_told(bump: ModuleType) -> None:
    after = bump.parse_header(PUBLIC.replace("llama_old(void)", "llama_old(int)"))
    assert bump.compare_public(bump.parse_header(PUBLIC), after, {"llama_load"}) == []


def test_other_constructor_in_python_is_told(bump: ModuleType) -> None:
    old = "class LlamaModel:\n    def __init__(self, *, path, params):\n        self.path = path\n"
    assert bump.compare_python(old, old, "LlamaModel", "__init__") == []
    renamed = bump.compare_python(old, old.replace("params", "parameters"), "LlamaModel", "__init__")
    assert renamed == [
        "LlamaModel.__init__: parameter params is gone.",
        "LlamaModel.__init__: parameter parameters was added.",
    ]
    other_body = bump.compare_python(old, old.replace("= path", "= None"), "LlamaModel", "__init__")
    assert len(other_body) == 1 and "another body" in other_body[0]


def test_releases_are_compared_as_a_whole(bump: ModuleType) -> None:
    files = dict.fromkeys((*bump.PUBLIC_HEADERS, *(path for path, _, _ in bump.PYTHON_SEAMS)), "")
    files[bump.IMPL_HEADER] = BACKEND
    files[bump.GGML_CMAKE] = "set(GGML_VERSION_MAJOR 0)\nset(GGML_VERSION_MINOR 25)\nset(GGML_VERSION_PATCH 3)\n"
    assert bump.compare_releases(files, files, OURS, set()) == []
    other = {**files, bump.IMPL_HEADER: BACKEND.replace("API_VERSION 2", "API_VERSION 3")}
    assert bump.compare_releases(files, other, OURS, set()) == ["GGML_BACKEND_API_VERSION was 2 and is 3."]
    moved = {**files, bump.GGML_CMAKE: files[bump.GGML_CMAKE].replace("MAJOR 0", "MAJOR 1")}
    assert bump.compare_releases(files, moved, OURS, set()) == [
        "The libraries are named libggml.so.1; CMakeLists.txt links libggml.so.0."
    ]


def test_our_header_is_read(bump: ModuleType) -> None:
    """All structs that a backend fills in are there, with their fields."""
    ours = bump.parse_header(bump.ABI_HEADER.read_text(encoding="utf-8"))
    assert len(ours.structs) == 10 and min(len(fields) for fields in ours.structs.values()) >= 3
    assert ours.structs["ggml_backend_i"]["graph_optimize"].endswith("ggml_backend_graph_optimize_params *)")
    assert "llama_model_params" in bump.used_names() and bump.pinned_version().count(".") == 2
