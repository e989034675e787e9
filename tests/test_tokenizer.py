"""Tokenizers of checkpoints as GGUF keys: llama.cpp's tokens of what the tool wrote against the libraries' own."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import io
import json
import logging
import random
import shutil
import string
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gguf
import hf_checkpoints
import llama_cpp
import pytest
import sentencepiece
import tokenizers
import transformers

from powerinfer_py import Llama, cli
from powerinfer_py.errors import FormatError, OptionError
from powerinfer_py.tools import hf_tokenizer
from powerinfer_py.tools.hf_tokenizer import add_tokenizer, check_tokenizer
from powerinfer_py.tools.pre_tokenizers import NAMES, read_steps

N_LINES = 10_000
N_ROW_LINES = 800
SPACE = "\u2581"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
END = "<|endoftext|>"
SPLIT_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"

# First and last character: scripts with and without case, combining marks, digits of several kinds, symbols, emoji.
RANGES = (
    (0x21, 0x7E), (0xA1, 0x17F), (0x300, 0x315), (0x391, 0x3C9), (0x400, 0x45F), (0x531, 0x556), (0x5D0, 0x5EA),
    (0x621, 0x64A), (0x660, 0x669), (0x905, 0x939), (0xE01, 0xE2E), (0x2010, 0x2027), (0x2160, 0x216F),
    (0x2200, 0x2260), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0xFF01, 0xFF5E),
    (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F),
)  # fmt: skip
SPACES = (" ", " ", " ", "  ", "     ", "\t", "\n", "\r\n", " \n", "\n\n\n", "\u00a0", "\u2003", "\u3000", "")
WORDS = (
    "I'm you're He'LL don't It'S we'Ve x=1; if(a<=b){ return -1.5e+10; } // note 3.14 0x1F 1,234,567 a_b __init__ "
    "foo->bar !!! ... ?! $5 ^~ `x` | \\n {'k': [1]} \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd"
).split()


def source_lines() -> list[str]:
    return [line for m in (argparse, textwrap, string, logging) for line in inspect.getsource(m).splitlines() if line]


def mixed_lines(n: int, seed: int, specials: Sequence[str] = ()) -> list[str]:
    """Lines of code, words, numbers and random characters with odd spaces, and special tokens inside."""
    r = random.Random(seed)
    code = source_lines()

    def piece() -> str:
        kind = r.random()
        if kind < 0.3:
            return r.choice(code)[:60]
        if kind < 0.5:
            return r.choice(WORDS)
        if kind < 0.6:
            return str(r.randrange(10 ** r.randint(1, 9)))
        if kind < 0.66 and specials:
            return r.choice(specials)
        first, last = r.choice(RANGES)
        return "".join(chr(r.randint(first, last)) for _ in range(r.randint(1, 8)))

    return ["".join(piece() + r.choice(SPACES) for _ in range(r.randint(1, 8))) for _ in range(n)]


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def convert(folder: Path, out: Path, vocab_size: int | None = None, **config: object) -> list[str]:
    """Writes a GGUF that holds only what add_tokenizer wrote; its notes."""
    notes: list[str] = []
    writer = gguf.GGUFWriter(out, "llama")
    size = {} if vocab_size is None else {"vocab_size": vocab_size}
    add_tokenizer(writer, folder, {"model_type": "llama", **size, **config}, notes.append)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return notes


def keys(path: Path) -> dict[str, object]:
    return {name: item.contents() for name, item in gguf.GGUFReader(path).fields.items()}


def llama_ids(path: Path, lines: Iterable[str], add_special: bool = True) -> list[list[int]]:
    """What llama.cpp makes of lines, special tokens inside them recognised."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # warnings come as errors
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for line in lines:
        data = line.encode()
        out = (llama_cpp.llama_token * (len(data) + 16))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), out, len(out), add_special, True)
        found.append(out[:n])
    llama_cpp.llama_model_free(model)
    return found


def assert_same(lines: Sequence[str], found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
    different = [i for i, pair in enumerate(zip(found, wanted)) if list(pair[0]) != list(pair[1])]
    assert not different, f"{len(different)} of {len(lines)} lines, {lines[different[0]]!a}: " + str(
        (found[different[0]], wanted[different[0]])
    )
    assert len(found) == len(wanted) == len(lines)


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """`change(folder, file=..., other=None)`: a copy of a folder with some JSON files put in (as_ for a dot)."""

    def copy(folder: Path, **files: object) -> Path:
        out = tmp_path / "changed"
        shutil.copytree(folder, out)
        for name, data in files.items():
            path = out / name.replace("__", ".")
            path.unlink(missing_ok=True)
            if data is not None:
                write_json(path, data)
        return out

    return copy


def config_of(folder: Path, **changes: object) -> dict[str, object]:
    return {**json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")), **changes}


def json_of(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))


# SentencePiece


def train_sentencepiece(**options: object) -> bytes:
    """A tokenizer.model as Llama-2's: BPE, byte fallback, no normalization."""
    out = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 1500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "character_coverage": 0.99,
        **options,
    }
    lines = source_lines() + [line for text in mixed_lines(1500, 1) for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, num_threads=1, minloglevel=2, **options
    )
    return out.getvalue()


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model and chat tokens added to it, no tokenizer.json."""
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.model").write_bytes(train_sentencepiece())
    write_json(folder / "added_tokens.json", {CHAT_TOKENS[0]: 1500, CHAT_TOKENS[1]: 1501})
    added = {
        str(1500 + i): {"content": text, "special": i == 1, "normalized": False, "lstrip": False, "rstrip": False}
        for i, text in enumerate(CHAT_TOKENS)
    }
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "added_tokens_decoder": added},
    )
    return folder


@pytest.fixture(scope="session")
def spm_fast(tmp_path_factory: pytest.TempPathFactory, spm: Path) -> Path:
    """The same tokenizer as tokenizer.json only, in the form of Llama-2's."""
    folder = tmp_path_factory.mktemp("spm-fast")
    data = json.loads(transformers.AutoTokenizer.from_pretrained(spm).backend_tokenizer.to_str())
    data["pre_tokenizer"] = None
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    data["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    data["model"]["unk_token"] = "<unk>"
    write_json(folder / "tokenizer.json", data)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": {"__type": "AddedToken", "content": "<unk>"}}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


def test_sentencepiece_tokens_equal_transformers(spm: Path, spm_fast: Path, tmp_path: Path) -> None:
    oracle = transformers.AutoTokenizer.from_pretrained(spm_fast)
    lines = mixed_lines(N_LINES, 2, ("<s>", "</s>", *CHAT_TOKENS))
    wanted = oracle(lines).input_ids
    out = tmp_path / "x.gguf"
    for folder in (spm, spm_fast):
        assert convert(folder, out, 1502) == []
        assert_same(lines, llama_ids(out, lines), wanted)
        check_tokenizer(out, folder)


def test_sentencepiece_tokens_equal_sentencepiece(spm: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    convert(spm, out, 1502)
    lines = mixed_lines(2000, 3)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    assert_same(lines, llama_ids(out, lines, add_special=False), processor.encode(lines))


def test_sentencepiece_keys(spm: Path, spm_fast: Path, tmp_path: Path) -> None:
    written = []
    for folder in (spm, spm_fast):
        out = tmp_path / f"{folder.name}.gguf"
        convert(folder, out, 1510)
        written.append(keys(out))
    for found in written:
        ggml = {name[len("tokenizer.ggml.") :]: value for name, value in found.items() if "tokenizer" in name}
        assert ggml["model"] == "llama"
        assert ggml["pre"] == "default"
        assert (ggml["bos_token_id"], ggml["eos_token_id"], ggml["unknown_token_id"]) == (1, 2, 0)
        assert (ggml["add_bos_token"], ggml["add_eos_token"], ggml["add_space_prefix"]) == (True, False, True)
        assert "merges" not in ggml
        types = ggml["token_type"]
        assert types[:3] == [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        assert types[3:259] == [gguf.TokenType.BYTE] * 256
        assert types[1500:1502] == [gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL]
        assert types[1502:] == [gguf.TokenType.UNUSED] * 8
        assert len(ggml["tokens"]) == len(ggml["scores"]) == 1510
        assert ggml["tokens"][1500:1503] == [*CHAT_TOKENS, "[PAD1502]"]
    a, b = (sorted(range(259, 1500), key=lambda i: (-found["tokenizer.ggml.scores"][i], i)) for found in written)
    merged = [i for i in a if len(written[0]["tokenizer.ggml.tokens"][i]) > 1]
    assert merged == [i for i in b if len(written[0]["tokenizer.ggml.tokens"][i]) > 1]


def test_space_prefix_is_taken_from_the_model_the_config_and_the_json(
    spm: Path, spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    no_prefix = change(spm, tokenizer_config__json=config_of(spm, add_prefix_space=False))
    convert(no_prefix, out, 1502)
    assert keys(out)["tokenizer.ggml.add_space_prefix"] is False
    check_tokenizer(out, no_prefix)
    (no_prefix / "tokenizer.model").write_bytes(train_sentencepiece(add_dummy_prefix=False))
    shutil.copy(spm / "tokenizer_config.json", no_prefix)
    convert(no_prefix, out, 1502)
    assert keys(out)["tokenizer.ggml.add_space_prefix"] is False
    check_tokenizer(out, no_prefix)
    shutil.rmtree(no_prefix)

    data = json_of(spm_fast)
    data["normalizer"] = data["normalizer"]["normalizers"][1]
    folder = change(spm_fast, tokenizer__json=data)
    assert convert(folder, out) == []
    assert keys(out)["tokenizer.ggml.add_space_prefix"] is False
    check_tokenizer(out, folder)


@pytest.mark.parametrize(("scheme", "prefix"), [("always", True), ("first", True), ("never", False)])
def test_metaspace_is_read_and_its_difference_is_said(
    scheme: str, prefix: bool, spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    data = json_of(spm_fast)
    data["normalizer"] = None
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    folder, out = change(spm_fast, tokenizer__json=data), tmp_path / "x.gguf"
    notes = convert(folder, out)
    assert len(notes) == prefix
    assert keys(out)["tokenizer.ggml.add_space_prefix"] is prefix
    check_tokenizer(out, folder)
    lines = [line for line in mixed_lines(1000, 4) if not line.startswith(" ")]
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert_same(lines, llama_ids(out, lines), oracle(lines).input_ids)


def test_sentencepiece_that_normalizes_is_noted_and_right_for_normal_text(
    spm: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = change(spm), tmp_path / "x.gguf"
    model = train_sentencepiece(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    (folder / "tokenizer.model").write_bytes(model)
    notes = convert(folder, out, 1502)
    assert len(notes) == 1
    assert "nmt_nfkc" in notes[0]
    check_tokenizer(out, folder)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model_type": "unigram"}, "UNIGRAM"),
        ({"byte_fallback": False, "vocab_size": 1500}, "0 of the 256 byte pieces"),
        ({"treat_whitespace_as_suffix": True}, "spaces end words"),
    ],
)
def test_sentencepiece_model_that_llama_cpp_cant_do_is_refused(
    options: dict[str, object], text: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(**options))
    with pytest.raises(FormatError, match=text):
        convert(tmp_path, tmp_path / "x.gguf")


def test_user_defined_pieces_are_matched_in_raw_text(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    model = train_sentencepiece(user_defined_symbols=["<code>", f"{SPACE}{SPACE}{SPACE}"], add_dummy_prefix=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    convert(tmp_path, out)
    found = keys(out)
    assert found["tokenizer.ggml.tokens"][3:5] == ["<code>", "   "]
    assert found["tokenizer.ggml.token_type"][3:5] == [gguf.TokenType.USER_DEFINED] * 2
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines = [line.replace("import", "<code>") for line in mixed_lines(1000, 5)]
    assert_same(lines, llama_ids(out, lines, add_special=False), processor.encode(lines))


def test_gemmas_model_numbers_its_special_tokens_otherwise(tmp_path: Path) -> None:
    names = ("pad", "eos", "bos", "unk")
    ids = {f"{name}_id": i for i, name in enumerate(names)} | {f"{name}_piece": f"<{name}>" for name in names}
    runs = ["<mask>", "\n\n", "\n\n\n", SPACE * 2, SPACE * 3, "<h1>"]
    model = train_sentencepiece(**ids, user_defined_symbols=runs, add_dummy_prefix=False)
    (tmp_path / "tokenizer.model").write_bytes(model)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"})
    out = tmp_path / "x.gguf"
    assert convert(tmp_path, out, model_type="gemma") == []
    check_tokenizer(out, tmp_path)
    found = {name.rpartition(".")[2]: value for name, value in keys(out).items()}
    assert [found[f"{name}_token_id"] for name in ("eos", "bos", "unknown")] == [1, 2, 3]
    assert (found["add_bos_token"], found["add_space_prefix"]) == (True, False)
    lines = [line.replace("return", "\n\n\n  <h1>   ") for line in mixed_lines(1000, 7)]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert_same(lines, llama_ids(out, lines), [[2, *tokens] for tokens in processor.encode(lines)])


def test_gemmas_json_has_the_tab_itself_and_splits_where_nothing_is(
    spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    data = json_of(spm_fast)
    data["normalizer"] = data["normalizer"]["normalizers"][1]
    data["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    data["model"]["vocab"]["\t"] = data["model"]["vocab"].pop("<0x09>")
    folder, out = change(spm_fast, tokenizer__json=data), tmp_path / "x.gguf"
    assert convert(folder, out) == []
    assert keys(out)["tokenizer.ggml.add_space_prefix"] is False
    check_tokenizer(out, folder)
    lines = mixed_lines(1000, 8)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert_same(lines, llama_ids(out, lines), oracle(lines).input_ids)


def test_user_defined_digits_are_common_pieces_and_longer_ones_noted(tmp_path: Path) -> None:
    """llama.cpp adds a prefix after user-defined tokens, which would put a space after each digit."""
    out = tmp_path / "x.gguf"
    model = train_sentencepiece(user_defined_symbols=["<code>", *string.digits])
    (tmp_path / "tokenizer.model").write_bytes(model)
    notes = convert(tmp_path, out)
    assert len(notes) == 1
    assert "user-defined pieces" in notes[0]
    assert keys(out)["tokenizer.ggml.token_type"][4:14] == [gguf.TokenType.NORMAL] * 10
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines = mixed_lines(1000, 5)
    assert_same(lines, llama_ids(out, lines, add_special=False), processor.encode(lines))
    check_tokenizer(out, tmp_path)


def test_sentencepiece_json_whose_merges_lack_a_pair_is_refused(
    spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp joins any two pieces that make a piece; a list trained by the tokenizers library has one pair each."""
    data = json_of(spm_fast)
    del data["model"]["merges"][100]
    with pytest.raises(FormatError, match=r"merges lack '.+' \+ '.+' = "):
        convert(change(spm_fast, tokenizer__json=data), tmp_path / "x.gguf")


def test_sentencepiece_json_without_all_bytes_is_refused(
    spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    data = json_of(spm_fast)
    data["model"]["byte_fallback"] = False
    folder = change(spm_fast, tokenizer__json=data)
    with pytest.raises(FormatError, match="needs byte_fallback"):
        convert(folder, tmp_path / "x.gguf")


# Byte-level BPE


def json_step(step: str) -> dict[str, object]:
    """A row's step as JSON of the tokenizers library."""
    kind, _, rest = step.partition(" ")
    return {
        "split": {"type": "Split", "pattern": {"Regex": rest}, "behavior": "Isolated", "invert": False},
        "digits": {"type": "Digits", "individual_digits": rest == "each"},
        "punctuation": {"type": "Punctuation", "behavior": rest},
        "bytes": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rest == "words"},
    }[kind]


def train_bpe(pre_tokenizer: dict, normalizer: dict | None = None, ignore_merges: bool = False) -> dict:
    """A tokenizer.json of the tokenizers library, trained with its own pre-tokenizer."""
    data = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    data["pre_tokenizer"], data["normalizer"] = pre_tokenizer, normalizer
    data["model"]["ignore_merges"] = ignore_merges
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    backend.train_from_iterator(source_lines() + mixed_lines(1500, 1), trainer)
    backend.add_special_tokens([CHAT_TOKENS[1]])
    backend.add_tokens([tokenizers.AddedToken(CHAT_TOKENS[0], normalized=False)])
    return json.loads(backend.to_str())


def save_bpe(folder: Path, data: dict) -> Path:
    write_json(folder / "tokenizer.json", data)
    names = {
        "eos_token": END,
        "bos_token": None,
        "unk_token": None,
        "pad_token": {"__type": "AddedToken", "content": END},
    }
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's form: split by the expression of ByteLevel."""
    return save_bpe(tmp_path_factory.mktemp("gpt2"), train_bpe(json_step("bytes words")))


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2's form: its split, and NFC."""
    steps = [json_step(f"split {SPLIT_QWEN2}"), json_step("bytes")]
    data = train_bpe({"type": "Sequence", "pretokenizers": steps}, {"type": "NFC"})
    return save_bpe(tmp_path_factory.mktemp("qwen2"), data)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_bpe_tokens_equal_transformers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder, out = request.getfixturevalue(name), tmp_path / "x.gguf"
    notes = convert(folder, out, 1502, bos_token_id=0)
    assert len(notes) == (name == "qwen2")
    assert all("NFC" in note for note in notes)
    lines = [unicodedata.normalize("NFC", line) for line in mixed_lines(N_LINES, 2, (END, *CHAT_TOKENS))]
    assert_same(lines, llama_ids(out, lines), transformers.AutoTokenizer.from_pretrained(folder)(lines).input_ids)
    check_tokenizer(out, folder)


def test_bpe_keys(gpt2: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    convert(gpt2, out, 1510, bos_token_id=0)
    found = keys(out)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    ids = [found[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding")]
    assert ids == [0, 0, 0]
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert "tokenizer.ggml.scores" not in found
    assert "tokenizer.ggml.unknown_token_id" not in found
    control, user = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    types = found["tokenizer.ggml.token_type"]
    assert (types[0], types[1500], types[1501]) == (control, control, user)
    assert types[1502:] == [gguf.TokenType.UNUSED] * 8
    assert found["tokenizer.ggml.tokens"][1499:1503] == [
        *found["tokenizer.ggml.tokens"][1499:1500],
        *CHAT_TOKENS[::-1],
        "[PAD1502]",
    ]
    merges = json_of(gpt2)["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]


def test_merges_in_the_old_form_are_the_same(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    data = json_of(gpt2)
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    del data["model"]["type"]
    for folder, out in ((gpt2, tmp_path / "new.gguf"), (change(gpt2, tokenizer__json=data), tmp_path / "old.gguf")):
        convert(folder, out)
    assert keys(tmp_path / "new.gguf") == keys(tmp_path / "old.gguf")


@pytest.mark.parametrize("row", NAMES, ids=NAMES.values())
def test_row_of_the_table_cuts_text_as_llama_cpp_does(row: tuple[tuple[str, ...], bool], tmp_path: Path) -> None:
    steps, ignore_merges = row
    data = train_bpe({"type": "Sequence", "pretokenizers": [json_step(step) for step in steps]}, None, ignore_merges)
    folder, out = save_bpe(tmp_path, data), tmp_path / "x.gguf"
    convert(folder, out, bos_token_id=0)
    assert keys(out)["tokenizer.ggml.pre"] == NAMES[row]
    lines = mixed_lines(N_ROW_LINES, 3, (END, *CHAT_TOKENS))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert_same(lines, llama_ids(out, lines), [found.ids for found in backend.encode_batch(lines)])
    check_tokenizer(out, folder)


def test_spellings_of_one_pre_tokenizer_are_one_row() -> None:
    split = json_step(f"split {SPLIT_QWEN2}")
    inverted = {**split, "behavior": "Removed", "invert": True}
    nested = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Sequence", "pretokenizers": [inverted]}, json_step("bytes")],
    }
    assert NAMES[(read_steps(nested), False)] == "qwen2"
    old = {"type": "ByteLevel", "add_prefix_space": False}
    assert NAMES[(read_steps(old), False)] == "gpt-2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pre_tokenizer": json_step("split [a-z]+")}, r"split \[a-z\]\+"),
        ({"pre_tokenizer": {**json_step("bytes words"), "add_prefix_space": True}}, '"add_prefix_space": true'),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [json_step("split x+"), json_step("bytes")]}},
            r"x\+ \| bytes",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": None}, "pre_tokenizer none"),
    ],
)
def test_unknown_pre_tokenizer_is_refused_and_named(
    changes: dict[str, object], text: str, gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder = change(gpt2, tokenizer__json={**json_of(gpt2), **changes})
    with pytest.raises(FormatError, match=text) as caught:
        convert(folder, tmp_path / "x.gguf")
    assert "isn't known" in str(caught.value)


def test_ignore_merges_belongs_to_the_row(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    data = json_of(gpt2)
    data["model"]["ignore_merges"] = True
    with pytest.raises(FormatError, match="ignore_merges True"):
        convert(change(gpt2, tokenizer__json=data), tmp_path / "x.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_check_finds_a_wrong_pre_tokenizer(pre: str, qwen2: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    convert(qwen2, good, 1502)
    written = good.read_bytes()
    name = b"\x05\0\0\0\0\0\0\0qwen2"
    assert written.count(name) == 1
    bad.write_bytes(written.replace(name, len(pre).to_bytes(8, "little") + pre.encode()))
    with pytest.raises(FormatError, match=r"tokenizer\.json: llama\.cpp reads .* expected"):
        check_tokenizer(bad, qwen2)


@pytest.fixture
def checkpoint(gpt2: Path, tmp_path: Path) -> Path:
    """Weights and tokenizer in one folder."""
    folder = hf_checkpoints.FAMILIES["llama-relu"](vocab_size=1502).save(tmp_path / "checkpoint")
    for path in gpt2.iterdir():
        shutil.copy(path, folder)
    hf_checkpoints.change_config(folder, bos_token_id=0, eos_token_id=0)
    return folder


def test_converted_model_reads_text_as_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.powerinfer.gguf"
    assert cli.main(["convert", str(checkpoint), "-o", str(out), "--outtype", "f32"]) == 0
    lines = mixed_lines(100, 3)
    wanted = transformers.AutoTokenizer.from_pretrained(checkpoint)(lines).input_ids
    with Llama(str(out), n_ctx=64, verbose=False) as model:
        assert_same(lines, [model.tokenize(line.encode(), add_bos=False) for line in lines], wanted)


def test_convert_refuses_a_tokenizer_that_llama_cpp_reads_otherwise(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf_tokenizer, "NAMES", dict.fromkeys(NAMES, "qwen2"))
    out = tmp_path / "out.powerinfer.gguf"
    assert cli.main(["convert", str(checkpoint), "-o", str(out), "--outtype", "f32"]) == 1
    assert "llama.cpp reads the line" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_probe_has_lines_that_every_normalizer_keeps() -> None:
    assert all(unicodedata.is_normalized("NFC", line) for line in hf_tokenizer._PROBE)
    assert any(unicodedata.is_normalized("NFKC", line) and "  " not in line for line in hf_tokenizer._PROBE)


def test_check_of_a_file_that_isnt_a_vocabulary(gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="can't read this vocabulary"):
        check_tokenizer(path, gpt2)


# vocab.json and merges.txt: OPT, GPT-2


@pytest.fixture(scope="session")
def opt(tmp_path_factory: pytest.TempPathFactory, gpt2: Path) -> Path:
    """As the OPT checkpoints: no tokenizer.json, four special tokens first, `</s>` begins and ends texts."""
    folder = tmp_path_factory.mktemp("opt")
    model = json_of(gpt2)["model"]
    pieces = [text for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]) if i]
    vocab = {text: i for i, text in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    write_json(folder / "vocab.json", vocab)
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    names = {
        "bos_token": {"__type": "AddedToken", "content": "</s>"},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "</s>",
    }
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **names})
    write_json(folder / "config.json", {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 2})
    return folder


def test_opt_tokens_equal_transformers_with_the_end_token_as_begin(opt: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    assert convert(opt, out, 1520, model_type="opt", bos_token_id=2, eos_token_id=2) == []
    found = keys(out)
    ids = [found[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding")]
    assert ids == [2, 2, 1]
    assert found["tokenizer.ggml.add_bos_token"] is True
    lines = mixed_lines(2000, 3, ("</s>", "<pad>"))
    wanted = transformers.AutoTokenizer.from_pretrained(opt)(lines).input_ids
    assert wanted[0][0] == 2
    assert_same(lines, llama_ids(out, lines), wanted)
    check_tokenizer(out, opt)


def test_opt_without_tokenizer_config_is_known_by_config(
    opt: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = change(opt, tokenizer_config__json=None), tmp_path / "x.gguf"
    convert(folder, out, model_type="opt", bos_token_id=2, eos_token_id=2, pad_token_id=1)
    found = keys(out)
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.token_type"][2] == gguf.TokenType.CONTROL
    check_tokenizer(out, folder)


def test_vocab_and_merges_of_an_unnamed_tokenizer_are_refused(
    opt: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder = change(opt, tokenizer_config__json=config_of(opt, tokenizer_class="Qwen2Tokenizer"))
    with pytest.raises(FormatError, match=r"tokenizer_class 'Qwen2Tokenizer'.*don't say how text is cut"):
        convert(folder, tmp_path / "x.gguf", model_type="opt")
    write_json(folder / "tokenizer_config.json", {})
    with pytest.raises(FormatError, match="model_type 'llama'"):
        convert(folder, tmp_path / "x.gguf")


# Special tokens, added tokens, vocabulary size


def test_begin_and_end_are_added_as_the_template_or_the_config_says(
    gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    data, out = json_of(gpt2), tmp_path / "x.gguf"
    special = {"SpecialToken": {"id": END, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {END: {"id": END, "ids": [0], "tokens": [END]}}
    template = {
        "type": "TemplateProcessing",
        "single": [special, text, special],
        "pair": [text],
        "special_tokens": known,
    }
    data["post_processor"] = template
    folder = change(gpt2, tokenizer__json=data)
    convert(folder, out, bos_token_id=0)
    assert [keys(out)[f"tokenizer.ggml.add_{kind}_token"] for kind in ("bos", "eos")] == [True, True]
    lines = mixed_lines(100, 6)
    assert_same(lines, llama_ids(out, lines), transformers.AutoTokenizer.from_pretrained(folder)(lines).input_ids)
    write_json(folder / "tokenizer_config.json", config_of(gpt2, add_bos_token=False, bos_token=END))
    notes = convert(folder, out)
    assert len(notes) == 1
    assert "add_bos_token False" in notes[0]
    assert keys(out)["tokenizer.ggml.add_bos_token"] is True
    assert_same(lines, llama_ids(out, lines), transformers.AutoTokenizer.from_pretrained(folder)(lines).input_ids)


def test_config_decides_what_is_added_without_tokenizer_json(
    spm: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    folder = change(spm, tokenizer_config__json=config_of(spm, add_bos_token=False, add_eos_token=True))
    convert(folder, out)
    assert [keys(out)[f"tokenizer.ggml.add_{kind}_token"] for kind in ("bos", "eos")] == [False, True]
    lines = [line.lstrip() for line in mixed_lines(100, 6)]
    assert_same(lines, llama_ids(out, lines), transformers.AutoTokenizer.from_pretrained(folder)(lines).input_ids)


def test_template_that_adds_another_token_is_refused(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    data = json_of(gpt2)
    single = [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<|im_end|>": {"id": "<|im_end|>", "ids": [1500], "tokens": ["<|im_end|>"]}}
    data["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    with pytest.raises(FormatError, match="post_processor makes"):
        convert(change(gpt2, tokenizer__json=data), tmp_path / "x.gguf")


def test_further_end_tokens_give_the_end_of_turn(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = change(gpt2, generation_config__json={"eos_token_id": [0, 1500]}), tmp_path / "x.gguf"
    convert(folder, out)
    assert keys(out)["tokenizer.ggml.eot_token_id"] == 1500


def test_missing_begin_is_noted_and_missing_end_refused(
    gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    notes = convert(gpt2, out)
    assert len(notes) == 1
    assert "no token begins a text" in notes[0]
    assert keys(out)["tokenizer.ggml.bos_token_id"] == 0
    folder = change(gpt2, tokenizer_config__json=config_of(gpt2, eos_token=None))
    with pytest.raises(FormatError, match="nothing names the token that ends a text"):
        convert(folder, out)
    write_json(folder / "tokenizer_config.json", config_of(gpt2, eos_token="<|nowhere|>"))
    with pytest.raises(FormatError, match=r"'<\|nowhere\|>' isn't in the vocabulary"):
        convert(folder, out)


def test_special_tokens_map_names_tokens_too(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    names = {"eos_token": {"content": CHAT_TOKENS[0]}, "additional_special_tokens": [CHAT_TOKENS[0]]}
    folder = change(gpt2, tokenizer_config__json={}, special_tokens_map__json=names)
    out = tmp_path / "x.gguf"
    convert(folder, out)
    assert keys(out)["tokenizer.ggml.eos_token_id"] == 1501
    assert keys(out)["tokenizer.ggml.token_type"][1501] == gguf.TokenType.CONTROL


def test_added_token_that_eats_spaces_is_noted(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    data = json_of(gpt2)
    data["added_tokens"][1]["lstrip"] = True
    notes = convert(change(gpt2, tokenizer__json=data), tmp_path / "x.gguf", bos_token_id=0)
    assert len(notes) == 1
    assert "lstrip" in notes[0]


def test_added_token_sought_in_normalized_text_is_noted(
    spm_fast: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    """The prefix that the normalizer adds becomes part of such a token in the tokenizers library."""
    data = json_of(spm_fast)
    data["added_tokens"][-1]["normalized"] = True
    notes = convert(change(spm_fast, tokenizer__json=data), tmp_path / "x.gguf")
    assert len(notes) == 1
    assert "normalized" in notes[0]


def test_no_begin_token_means_none_is_added(spm: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = change(spm, tokenizer_config__json=config_of(spm, bos_token=None)), tmp_path / "x.gguf"
    assert len(convert(folder, out)) == 1
    assert keys(out)["tokenizer.ggml.bos_token_id"] == 2
    assert keys(out)["tokenizer.ggml.add_bos_token"] is False


def test_rows_of_the_embedding_beyond_the_tokenizer_get_unused_tokens(spm: Path, tmp_path: Path) -> None:
    """BUG 30: the embedding is padded to a round number of rows."""
    out = tmp_path / "x.gguf"
    convert(spm, out, 1536)
    found = keys(out)
    assert found["tokenizer.ggml.tokens"][1502:] == [f"[PAD{i}]" for i in range(1502, 1536)]
    assert set(found["tokenizer.ggml.token_type"][1502:]) == {gguf.TokenType.UNUSED}
    check_tokenizer(out, spm)


@pytest.mark.parametrize(("name", "size"), [("spm", 1501), ("spm_fast", 1501), ("gpt2", 1499)])
def test_tokenizer_larger_than_the_embedding_is_refused(
    name: str, size: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=f"no row in the embedding: vocab_size of config.json is {size}"):
        convert(request.getfixturevalue(name), tmp_path / "x.gguf", size)


def test_padding_token_beyond_the_embedding_is_left_out_with_a_note(
    spm: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    """Llama-2's derivatives add `<pad>` as id 32000 to an embedding of 32000 rows."""
    folder = change(
        spm, added_tokens__json={"<pad>": 1500}, tokenizer_config__json={"pad_token": "<pad>", "legacy": True}
    )
    out = tmp_path / "x.gguf"
    notes = convert(folder, out, 1500)
    assert len(notes) == 1
    assert "padding token '<pad>'" in notes[0]
    assert "tokenizer.ggml.padding_token_id" not in keys(out)
    assert len(keys(out)["tokenizer.ggml.tokens"]) == 1500


def test_two_tokens_of_one_text_are_refused(spm: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    folder = change(spm, tokenizer_config__json={}, added_tokens__json={"</s>": 1500})
    with pytest.raises(FormatError, match="tokens 2 and 1500 are both '</s>'"):
        convert(folder, tmp_path / "x.gguf")


def test_added_token_over_a_piece_takes_its_place_with_a_note(
    spm: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = change(spm, added_tokens__json={"<|tool|>": 1400}, tokenizer_config__json={}), tmp_path / "x.gguf"
    notes = convert(folder, out)
    assert len(notes) == 1
    assert "added as '<|tool|>'" in notes[0]
    assert keys(out)["tokenizer.ggml.tokens"][1400] == "<|tool|>"


# Chat templates


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": TEMPLATE}},
        {"chat_template.jinja": TEMPLATE},
        {"chat_template.json": {"chat_template": TEMPLATE}},
        {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": {"chat_template": "old"}},
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
            }
        },
    ],
)
def test_chat_template_is_found_in_each_place(
    files: dict[str, object], gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = change(gpt2), tmp_path / "x.gguf"
    for name, data in files.items():
        if name == "tokenizer_config.json":
            data = {**config_of(gpt2), **data}
        (folder / name).write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    convert(folder, out)
    found = keys(out)
    assert found["tokenizer.chat_template"] == TEMPLATE
    assert found.get("tokenizer.chat_template.tool_use", "tools") == "tools"
    if "chat_template.json" not in files:  # transformers reads that for processors only
        loaded = transformers.AutoTokenizer.from_pretrained(folder).chat_template
        assert (loaded if isinstance(loaded, str) else loaded["default"]) == TEMPLATE


def test_no_chat_template_writes_none_and_a_wrong_one_is_refused(
    gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "x.gguf"
    convert(gpt2, out)
    assert "tokenizer.chat_template" not in keys(out)
    with pytest.raises(FormatError, match="chat_template is a int"):
        convert(change(gpt2, tokenizer_config__json=config_of(gpt2, chat_template=5)), out)


# Files that are missing or broken


def test_missing_tokenizer_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"no tokenizer; expected tokenizer\.model, tokenizer\.json, or vocab\.json and"
    ):
        convert(tmp_path, tmp_path / "x.gguf")
    write_json(tmp_path / "vocab.json", {})
    with pytest.raises(FormatError, match="no tokenizer; expected"):
        convert(tmp_path, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "tiktoken.model"])
def test_foreign_tokenizer_file_is_named(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / name, {})
    with pytest.raises(FormatError, match=f"only {name}, formats that this doesn't read"):
        convert(tmp_path, tmp_path / "x.gguf")


@pytest.mark.parametrize("data", [b"IQ== 0\nIg== 1\n", b"", b"\xff\xff\xff"])
def test_tokenizer_model_that_isnt_sentencepiece_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(FormatError, match="isn't a SentencePiece model"):
        convert(tmp_path, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff\xfe", b'{"a": "\xff"}'])
def test_broken_json_is_one_clear_error(
    name: str, data: bytes, gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    folder = change(gpt2)
    (folder / name).write_bytes(data)
    with pytest.raises(FormatError, match=rf"{name}: .*; expected .*; download"):
        convert(folder, tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": {"model": {}}},
        {"tokenizer__json": {"model": {"type": "BPE", "vocab": [1], "merges": 5}}},
        {"tokenizer__json": {"model": {"vocab": {}, "merges": []}, "added_tokens": [1]}},
        {"added_tokens__json": {"<x>": "5"}},
        {"tokenizer_config__json": {"added_tokens_decoder": {"a": {"content": "x"}}}},
        {"tokenizer_config__json": {"added_tokens_decoder": {"1500": {}}}},
        {"tokenizer_config__json": {"added_tokens_decoder": [1]}},
    ],
)
def test_json_of_another_structure_is_one_clear_error(
    files: dict[str, object], gpt2: Path, change: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(FormatError):
        convert(change(gpt2, **files), tmp_path / "x.gguf")


def test_broken_merges_are_refused(opt: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    folder = change(opt)
    (folder / "merges.txt").write_text("a b\nc\n", encoding="utf-8")
    with pytest.raises(FormatError, match=r"merges\.txt: the line 'c'"):
        convert(folder, tmp_path / "x.gguf", model_type="opt")


def test_model_that_isnt_bpe_is_refused(gpt2: Path, change: Callable[..., Path], tmp_path: Path) -> None:
    data = json_of(gpt2)
    data["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    folder = change(gpt2, tokenizer__json=data)
    with pytest.raises(FormatError, match="the model is Unigram"):
        convert(folder, tmp_path / "x.gguf")


def test_missing_package_names_the_extra(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"tokenizers isn't installed.*powerinfer_py\[convert\]"):
        convert(gpt2, tmp_path / "x.gguf")
