"""The tokenizer of a Hugging Face folder, written as the `tokenizer.ggml.*` keys of a GGUF.

Two kinds: SentencePiece BPE (llama.cpp's "llama") and byte-level BPE ("gpt2"). What llama.cpp can't do is refused.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from powerinfer_py.errors import FormatError, PowerInferError

from .arguments import need_packages
from .checkpoint import read_json
from .pre_tokenizers import NAMES, read_steps

if TYPE_CHECKING:
    import tokenizers

Note = Callable[[str], None]

# SentencePiece writes a space so.
_SPACE = "\u2581"
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TAB_PIECE = _BYTE_PIECES[ord("\t")]  # which Gemma's tokenizer.json has as the tab itself
# As SentencePiece does for pieces that no pair makes; llama.cpp never compares them.
_UNRANKED = 0.0
# What the architectures use whose checkpoints come with vocab.json and merges.txt only.
_GPT2_CLASSES = {"GPT2Tokenizer", "GPT2TokenizerFast"}
_GPT2_MODEL_TYPES = {"gpt2", "opt"}

# What `check_tokenizer` compares: NFC text that no vocabulary has whole; several scripts, digits, code, odd spaces.
_PROBE = (
    "The quick brown fox doesn't jump; he'LL say: \"We've GOT 3 dogs, I'M sure\"...",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 2024-01-31T23:59:59Z 50% #42 v1.2.3",
    "def f(x, *a):\n    if x<=b[0] and not c:\n\t\treturn {'k': -1.5e+10}  # note\n\n\nclass A_b: pass\r\n",
    "  two  spaces   three\ttab \t mixed \n \n\n  lines \n\u00a0no-break\u3000wide \u2003em   ",
    "na\u00efve caf\u00e9 stra\u00dfe \u0141\u00f3d\u017a \u0130stanbul \u00c6sop \u00bfqu\u00e9? \u00abguillemet"
    "s\u00bb \u201cq\u201d \u2014 \u2026",
    "\u0428\u0438\u0440\u043e\u043a\u0430\u044f \u044d\u043b\u0435\u043a\u0442\u0440\u0438\u0444\u0438\u043a"
    "\u0430\u0446\u0438\u044f \u0415\u0429\u0401 \u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u0391\u03b2"
    "\u0393 \u0540\u0561\u0575",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e\u3002 \u6771\u4eac\u30bf\u30ef\u30fc\u306f\u3072"
    "\u3089\u304c\u306a\uff01 \ud55c\uad6d\uc5b4 \uac00\ub098\ub2e4",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663\u0664 \u0928\u092e\u0938\u094d"
    "\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u2163\u2167 x\u00b2 \u00bd",
    "\U0001f600\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2705 \U0001f1e9\U0001f1ea\U0001f44d"
    "\U0001f3fd ::))) !!!??? ====---- ''''``` \u2211\u222b\u2260 \u20ac$\u00a3 {[(<>)]} ~^|",
)


@dataclass
class _Vocabulary:
    """What the tokenizer's main file says; added tokens join it later.

    Attributes:
        path: the main file.
        model: `tokenizer.ggml.model`, "llama" or "gpt2".
        pre: `tokenizer.ggml.pre`.
        tokens: id -> text.
        types: id -> type.
        scores: id -> score, "llama" only: the pair with the highest is joined first.
        merges: pairs with a space between, first joined first, "gpt2" only.
        names: the special tokens ("bos", "eos", "unk") that the file itself names.
        space_prefix: a space is put before text, "llama" only.
        matches_normalized: added tokens that want it are looked for in normalized text, which llama.cpp doesn't do.
        add: (begin, end) token is put around text where neither tokenizer.json nor tokenizer_config.json says.
    """

    path: Path
    model: str
    pre: str
    tokens: dict[int, str]
    types: dict[int, gguf.TokenType]
    scores: dict[int, float] = field(default_factory=dict)
    merges: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    space_prefix: bool = False
    matches_normalized: bool = False
    add: tuple[bool, bool] = (False, False)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the folder; empty if there is none.

    Raises:
        FormatError: it isn't JSON, or not an object.
    """
    return read_json(path) if path.is_file() else {}


def _open_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json in the `tokenizers` library, which also checks its structure.

    Raises:
        OptionError: the library isn't installed.
        FormatError: the library can't read the file.
    """
    need_packages("tokenizer", "convert", "tokenizers")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise FormatError(
            f"{path}: {error}; expected a file of the tokenizers library; download it again, or update that library."
        ) from None


def _read_sentencepiece_proto(path: Path) -> Any:
    """A tokenizer.model as its protocol buffer.

    Raises:
        OptionError: sentencepiece or protobuf isn't installed.
        FormatError: the file isn't one of SentencePiece.
    """
    need_packages("tokenizer", "convert", "sentencepiece", "google.protobuf")
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        raise FormatError(
            f"{path}: isn't a SentencePiece model (a tiktoken file has this name too); expected one; "
            "if the folder has a tokenizer.json, take this file away."
        )
    return proto


def _check_byte_pieces(path: Path, tokens: dict[int, str]) -> None:
    """Refuses a SentencePiece vocabulary without byte fallback, in which llama.cpp ends at an unknown character."""
    missing = set(_BYTE_PIECES) - set(tokens.values())
    if missing:
        raise FormatError(
            f"{path}: has {256 - len(missing)} of the 256 byte pieces <0x00>..<0xFF>; expected all (byte fallback): "
            "llama.cpp ends at a character outside the vocabulary. This tokenizer can't be converted."
        )


def _read_sentencepiece(path: Path, note: Note) -> _Vocabulary:
    """The vocabulary of a tokenizer.model.

    Raises:
        OptionError: a package isn't installed.
        FormatError: not SentencePiece, or of a kind that llama.cpp's "llama" tokenizer can't do.
    """
    proto = _read_sentencepiece_proto(path)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.BPE:
        kind = trainer.ModelType.Name(trainer.model_type)
        raise FormatError(
            f"{path}: is a SentencePiece {kind} model; expected BPE, as all families here use: llama.cpp joins pairs by "
            "score, which gives other tokens. This tokenizer can't be converted."
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise FormatError(
            f"{path}: spaces end words or aren't written as U+2581; expected SentencePiece's default, the one that "
            "llama.cpp knows. This tokenizer can't be converted."
        )
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        note(
            f"{path}: normalizes text ({normalizer.name or 'unnamed'}, remove_extra_whitespaces "
            f"{normalizer.remove_extra_whitespaces}), llama.cpp doesn't; tokens are the same for text already so."
        )
    types = {i: gguf.TokenType(piece.type) for i, piece in enumerate(proto.pieces)}
    tokens = {i: piece.piece for i, piece in enumerate(proto.pieces)}
    defined = {i for i, kind in types.items() if kind is gguf.TokenType.USER_DEFINED}
    # No piece joins a user-defined one, so that a single character needs no special care.
    types.update({i: gguf.TokenType.NORMAL for i in defined if len(tokens[i]) == 1})
    tokens.update({i: tokens[i].replace(_SPACE, " ") for i in defined if len(tokens[i]) > 1})
    if normalizer.add_dummy_prefix and gguf.TokenType.USER_DEFINED in types.values():
        note(f"{path}: has user-defined pieces; llama.cpp puts a space before text after one, SentencePiece doesn't.")
    _check_byte_pieces(path, tokens)
    specials = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unk": trainer.unk_id}
    return _Vocabulary(
        path=path,
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores={i: piece.score for i, piece in enumerate(proto.pieces)},
        names={name: tokens[i] for name, i in specials.items() if i in tokens},
        space_prefix=normalizer.add_dummy_prefix,
        add=(True, False),  # LlamaTokenizer's own defaults
    )


def _normalizers(data: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of `normalizer` of a tokenizer.json."""
    if data is None:
        return []
    return [step for inner in data["normalizers"] for step in _normalizers(inner)] if "normalizers" in data else [data]


def _refuse_json(path: Path, data: dict[str, Any], why: str) -> FormatError:
    steps = " | ".join(read_steps(data.get("pre_tokenizer"))) or "none"
    model = data["model"]
    return FormatError(
        f"{path}: {why}: pre_tokenizer {steps}; normalizer {json.dumps(data.get('normalizer'))}; ignore_merges "
        f"{bool(model.get('ignore_merges'))}, byte_fallback {bool(model.get('byte_fallback'))}; expected one of "
        f"{', '.join(NAMES.values())}, or SentencePiece's form; a guess would give wrong tokens. Convert with a version "
        "that knows this tokenizer."
    )


def _space_prefix(path: Path, data: dict[str, Any], note: Note) -> bool:
    """Whether a SentencePiece-like tokenizer.json puts a space before text.

    Raises:
        FormatError: it handles spaces in another way than SentencePiece does.
    """
    before = _normalizers(data.get("normalizer"))
    split = data.get("pre_tokenizer")
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    cuts_nothing = split is None or (split["type"] == "Split" and split["pattern"] == {"String": " "})  # none is left
    if cuts_nothing and before in ([replace], [prepend, replace]):
        return prepend in before
    if not before and split and split["type"] == "Metaspace":
        scheme = split.get("prepend_scheme") or ("always" if split.get("add_prefix_space", True) else "never")
        if split["replacement"] == _SPACE and not split.get("split", True):
            if scheme != "never":
                where = "where text begins with one" + " or follows a special token" * (scheme == "first")
                note(f"{path}: Metaspace adds no space {where}; llama.cpp adds it, as SentencePiece does.")
            return scheme != "never"
    raise _refuse_json(path, data, "this pre-tokenizer isn't known")


def _pairs(merges: Sequence[str | Sequence[str]]) -> list[tuple[str, str]]:
    """Merges of a tokenizer.json, of the old form (one text) or the new (two)."""
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]


def _scores(path: Path, tokens: dict[int, str], pairs: list[tuple[str, str]]) -> dict[int, float]:
    """Scores by which llama.cpp joins the pairs in the order of `merges`.

    llama.cpp joins any two pieces whose text is a piece, so each such pair has to be in the list.

    Raises:
        FormatError: a pair isn't in the list.
    """
    ids = {text: i for i, text in tokens.items()}
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(pairs):
        rank.setdefault(left + right, i)
    listed = set(pairs)
    for text in ids:
        for i in range(1, len(text)):
            pair = (text[:i], text[i:])
            if pair[0] in ids and pair[1] in ids and pair not in listed:
                raise FormatError(
                    f"{path}: merges lack {pair[0]!a} + {pair[1]!a} = {text!a}; expected every pair of pieces that makes "
                    "a piece, as in files made from SentencePiece: llama.cpp would join it. This tokenizer can't be "
                    "converted; if there is a tokenizer.model, put it into the folder."
                )
    return {i: -float(rank[text]) if text in rank else _UNRANKED for i, text in tokens.items()}


def _read_tokenizer_json(path: Path, note: Note) -> _Vocabulary:
    """The vocabulary of a tokenizer.json.

    Raises:
        OptionError: a package isn't installed.
        FormatError: the file is broken, or no tokenizer of llama.cpp gives the same tokens.
    """
    data = _read_json(path)
    _open_backend(path)
    model = data["model"]
    kind = model.get("type", "BPE")  # files of 2020 have none
    odd = [k for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(k)]
    if kind != "BPE" or odd:
        raise FormatError(
            f"{path}: the model is {kind}{''.join(f' with {k} {model[k]!r}' for k in odd)}; expected plain BPE, as all "
            "families here use. This tokenizer can't be converted."
        )
    tokens = {i: text for text, i in model["vocab"].items()}
    added = {token["id"] for token in data.get("added_tokens", ())}
    pairs = _pairs(model["merges"])
    steps = read_steps(data.get("pre_tokenizer"))
    if any(step.startswith("bytes") for step in steps):
        pre = NAMES.get((steps, bool(model.get("ignore_merges"))))
        before = _normalizers(data.get("normalizer"))
        if pre is None or before not in ([], [{"type": "NFC"}]):
            raise _refuse_json(path, data, "this pre-tokenizer isn't known")
        if before:
            note(f"{path}: brings text to NFC, llama.cpp doesn't; tokens are the same for text in NFC.")
        types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
        return _Vocabulary(path, "gpt2", pre, tokens, types, merges=[" ".join(pair) for pair in pairs])
    if _TAB_PIECE not in model["vocab"] and "\t" in model["vocab"]:
        tokens[model["vocab"]["\t"]] = _TAB_PIECE
    space_prefix = _space_prefix(path, data, note)
    if not model.get("byte_fallback") or model.get("ignore_merges"):
        raise _refuse_json(path, data, "SentencePiece's form needs byte_fallback and no ignore_merges")
    _check_byte_pieces(path, tokens)
    types = {i: gguf.TokenType.BYTE if text in _BYTE_PIECES else gguf.TokenType.NORMAL for i, text in tokens.items()}
    unknown = model.get("unk_token")
    types.update({i: gguf.TokenType.UNKNOWN for i, text in tokens.items() if text == unknown})
    plain = {i: text for i, text in tokens.items() if types[i] is gguf.TokenType.NORMAL and i not in added}
    return _Vocabulary(
        path=path,
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=_scores(path, plain, pairs),
        space_prefix=space_prefix,
        matches_normalized=space_prefix and data.get("normalizer") is not None,
    )


def _read_vocab_and_merges(folder: Path, tokenizer_config: dict[str, Any], config: dict[str, Any]) -> _Vocabulary:
    """The vocabulary of vocab.json and merges.txt, which say nothing of the pre-tokenizer.

    Raises:
        FormatError: a file is broken, or nothing says that the pre-tokenizer is GPT-2's.
    """
    path, merges_path = folder / "vocab.json", folder / "merges.txt"
    wanted, model_type = tokenizer_config.get("tokenizer_class"), config.get("model_type")
    known = wanted in _GPT2_CLASSES if wanted else model_type in _GPT2_MODEL_TYPES
    if not known or tokenizer_config.get("add_prefix_space"):
        raise FormatError(
            f"{path}: tokenizer_class {wanted!r}, model_type {model_type!r}, add_prefix_space "
            f"{tokenizer_config.get('add_prefix_space')!r}; expected GPT2Tokenizer (or gpt2, opt) without a prefix: these "
            "files don't say how text is cut. Save the tokenizer with transformers, which writes a tokenizer.json."
        )
    vocab = _read_json(path)
    try:
        lines = merges_path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise FormatError(f"{merges_path}: {error}; expected UTF-8 text; download the file again.") from None
    merges = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :] if line.strip()]
    wrong = next((line for line in merges if len(line.split(" ")) != 2), None)
    if wrong is not None or not all(isinstance(i, int) for i in vocab.values()):
        found = f"{merges_path}: the line {wrong!a}" if wrong is not None else f"{path}: an id that isn't a number"
        raise FormatError(f"{found}; expected pairs of tokens, and tokens with their ids; download the files again.")
    tokens = {i: text for text, i in vocab.items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    add = (model_type == "opt", False)  # OPT was trained so, whatever its tokenizer's class does
    return _Vocabulary(path, "gpt2", NAMES[(("bytes words",), False)], tokens, types, merges=merges, add=add)


def _read_vocabulary(folder: Path, tokenizer_config: dict[str, Any], config: dict[str, Any], note: Note) -> _Vocabulary:
    """The vocabulary of whichever file the folder has.

    Raises:
        OptionError: a package isn't installed.
        FormatError: there is none that this reads, or it is refused.
    """
    if (folder / "tokenizer.model").is_file():
        return _read_sentencepiece(folder / "tokenizer.model", note)
    if (folder / "tokenizer.json").is_file():
        return _read_tokenizer_json(folder / "tokenizer.json", note)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _read_vocab_and_merges(folder, tokenizer_config, config)
    others = sorted(path.name for path in folder.glob("*") if "tekken" in path.name or "tiktoken" in path.name)
    found = f"only {', '.join(others)}, formats that this doesn't read" if others else "no tokenizer"
    raise FormatError(
        f"{folder}: {found}; expected tokenizer.model, tokenizer.json, or vocab.json and merges.txt; download them, or save "
        "the tokenizer with transformers, which writes a tokenizer.json."
    )


def _content(token: Any) -> str | None:
    """The text of a token that JSON holds as text or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _added_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The added tokens of all files; a later file wins, as in transformers.

    Returns:
        id -> "content" and, where a file has them, "special", "normalized", "lstrip", "rstrip", "single_word".

    Raises:
        FormatError: a file is broken.
    """
    tokenizer_json, texts = _read_json(folder / "tokenizer.json"), _read_json(folder / "added_tokens.json")
    decoder = tokenizer_config.get("added_tokens_decoder") or {}
    try:
        added = {token["id"]: token for token in tokenizer_json.get("added_tokens", ())}
        added.update({i: {"content": text} for text, i in texts.items() if i not in added})
        added.update({int(i): token for i, token in decoder.items()})
        wrong = [i for i, token in added.items() if not isinstance(i, int) or not isinstance(token["content"], str)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = [repr(error)]
    if wrong:
        raise FormatError(
            f"{folder}: an added token has no id or no text: {wrong[0]}; expected both; download the files again."
        )
    return added


def _add_tokens(vocabulary: _Vocabulary, folder: Path, tokenizer_config: dict[str, Any], note: Note) -> None:
    """Puts the added tokens into the vocabulary.

    Raises:
        FormatError: a file is broken.
    """
    odd = []
    for i, token in _added_tokens(folder, tokenizer_config).items():
        special = token.get("special", False)
        # llama.cpp looks for these in the text as it is, before it writes spaces as SentencePiece does.
        text = token["content"] if special or vocabulary.model == "gpt2" else token["content"].replace(_SPACE, " ")
        if vocabulary.tokens.get(i, text) not in (text, token["content"]):
            note(
                f"{folder}: token {i} is {vocabulary.tokens[i]!a} in {vocabulary.path.name}, added as {text!a}: taken so."
            )
        flags = ("lstrip", "rstrip", "single_word", "normalized" if vocabulary.matches_normalized else "")
        odd += [f"{text!a} {flag}" for flag in flags if token.get(flag)]
        vocabulary.tokens[i] = text
        if vocabulary.types.get(i) is not gguf.TokenType.UNKNOWN:
            vocabulary.types[i] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    if odd:
        note(
            f"{folder}: llama.cpp finds added tokens as they are, whatever stands around them; not so: {', '.join(odd)}."
        )


def _first(value: Any) -> int | None:
    """An id of config.json, which may be a list of them."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def _special_ids(
    vocabulary: _Vocabulary, folder: Path, tokenizer_config: dict[str, Any], config: dict[str, Any], note: Note
) -> dict[str, int]:
    """The ids of the special tokens; they become control tokens of the vocabulary.

    Args:
        vocabulary: with the added tokens.

    Returns:
        "eos", and "bos", "unk", "pad", "eot" if there are any.

    Raises:
        FormatError: a token isn't in the vocabulary, or nothing names the end of a text.
    """
    named = {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    by_text = {text: i for i, text in vocabulary.tokens.items()}
    ids: dict[str, int] = {}
    for kind in ("bos", "eos", "unk", "pad"):
        text = _content(named.get(f"{kind}_token"))
        if text is None and f"{kind}_token" not in named:
            text = vocabulary.names.get(kind)
        found = by_text.get(text) if text else _first(config.get(f"{kind}_token_id"))
        if found is None and text:
            if kind in ("bos", "eos"):
                raise FormatError(
                    f"{folder}: {kind}_token {text!a} isn't in the vocabulary; expected it there or among the added "
                    "tokens; download the tokenizer's files again."
                )
            note(f"{folder}: {kind}_token {text!a} isn't in the vocabulary and is left out.")
        if found is not None and found in vocabulary.tokens:
            ids[kind] = found
    if "eos" not in ids:
        raise FormatError(
            f"{folder}: nothing names the token that ends a text; expected eos_token in tokenizer_config.json or "
            "eos_token_id in config.json; llama.cpp would take a token of its own choice. Add it."
        )
    ends = _read_json(folder / "generation_config.json").get("eos_token_id") or config.get("eos_token_id")
    if isinstance(ends, list):
        others = [i for i in ends if i in vocabulary.tokens and i != ids["eos"]]
        ids.update(zip(("eot",), others))
    extra = [*(named.get("additional_special_tokens") or ()), *(named.get("extra_special_tokens") or ())]
    extra = [_content(token) for token in extra]
    for i in (*ids.values(), *(by_text[text] for text in extra if text in by_text)):
        if vocabulary.types[i] is not gguf.TokenType.UNKNOWN:
            vocabulary.types[i] = gguf.TokenType.CONTROL
    return ids


def _added_around_text(
    vocabulary: _Vocabulary, folder: Path, tokenizer_config: dict[str, Any], ids: dict[str, int], note: Note
) -> tuple[bool, bool]:
    """Whether the tokenizer puts the begin and the end token around a text.

    As in transformers 5, tokenizer.json decides where there is one, tokenizer_config.json elsewhere.

    Returns:
        (begin, end).

    Raises:
        FormatError: it adds something else.
    """
    wanted = (tokenizer_config.get("add_bos_token"), tokenizer_config.get("add_eos_token"))
    path = folder / "tokenizer.json"
    if not path.is_file():
        begin, end = (default if want is None else bool(want) for want, default in zip(wanted, vocabulary.add))
        return begin and "bos" in ids, end
    backend = _open_backend(path)
    plain, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    for begin, end in itertools.product((False, True), repeat=2):
        if full == [ids.get("bos")] * begin + plain + [ids["eos"]] * end:
            if any(want not in (None, has) for want, has in zip(wanted, (begin, end))):
                note(
                    f"{folder}: tokenizer_config.json has add_bos_token {wanted[0]}, add_eos_token {wanted[1]}; "
                    f"tokenizer.json adds {begin}, {end}, which is taken, as in transformers."
                )
            return begin, end
    raise FormatError(
        f"{path}: the post_processor makes {full} of {plain}; expected at most the begin token {ids.get('bos')} and the end "
        f"token {ids['eos']} around it; llama.cpp can add nothing else."
    )


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template: chat_template.jinja first, as in transformers, then tokenizer_config.json.

    Returns:
        One text, or a list of "name" and "template".

    Raises:
        FormatError: it is neither.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise FormatError(f"{path}: {error}; expected UTF-8 text; download the file again.") from None
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    listed = isinstance(template, list) and all(
        isinstance(t, dict) and {"name", "template"} <= set(t) for t in template
    )
    if template is None or isinstance(template, str) or listed:
        return template
    raise FormatError(
        f"{folder}: chat_template is a {type(template).__name__}; expected a text or a list of name and template; download "
        "tokenizer_config.json again."
    )


def _pad(vocabulary: _Vocabulary, folder: Path, config: dict[str, Any], pad_id: int | None, note: Note) -> int:
    """Gives every row of the embedding a token.

    Returns:
        Number of tokens.

    Raises:
        FormatError: a token without a row, or two tokens of the same text.
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    n_vocab = config.get("vocab_size", max(tokens) + 1)
    beyond = sorted(i for i in tokens if i >= n_vocab)
    if beyond == [pad_id]:
        note(
            f"{folder}: the padding token {tokens[pad_id]!a} has id {pad_id}, no row of the embedding; it is left out."
        )
        del tokens[pad_id]
    elif beyond:
        raise FormatError(
            f"{vocabulary.path}: token {beyond[0]} {tokens[beyond[0]]!a} and {len(beyond) - 1} more have no row in the "
            f"embedding: vocab_size of config.json is {n_vocab}; expected ids below it; take the files of one checkpoint."
        )
    for i in range(n_vocab):
        if i not in tokens:
            tokens[i], types[i] = f"[PAD{i}]", gguf.TokenType.UNUSED
    seen: dict[str, int] = {}
    for i in range(n_vocab):
        other = seen.setdefault(tokens[i], i)
        if other != i:
            raise FormatError(
                f"{vocabulary.path}: tokens {other} and {i} are both {tokens[i]!a}; expected different ones: llama.cpp ends "
                "at such a file. Take the files of one checkpoint."
            )
    return n_vocab


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], note: Note) -> None:
    """Writes all `tokenizer.*` keys of a GGUF.

    Args:
        writer: nothing of a tokenizer is in it yet.
        folder: of a Hugging Face checkpoint.
        config: its config.json; `vocab_size` is the number of rows of the embedding.
        note: called with what is left out or differs in llama.cpp, one text each.

    Raises:
        OptionError: a package isn't installed.
        FormatError: no tokenizer, a broken one, or one that llama.cpp can't do.
    """
    with _values_as_expected(folder):
        _add_tokenizer(writer, folder, config, note)


@contextmanager
def _values_as_expected(folder: Path) -> Iterator[None]:
    """Makes one error of a value that no tokenizer has where it stands: a number for a text, a list for an object.

    Raises:
        FormatError: there is one.
    """
    try:
        yield
    except PowerInferError:
        raise
    except BaseException as error:
        # The tokenizers library raises bare Exceptions, and its panics aren't even those.
        kinds = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
        if not isinstance(error, kinds) and type(error).__name__ not in ("Exception", "PanicException"):
            raise
        raise FormatError(
            f"{folder}: a file of the tokenizer holds something unexpected ({type(error).__name__}: {str(error)[:120]}); "
            "expected what transformers or SentencePiece wrote; download the tokenizer's files again."
        ) from error


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], note: Note) -> None:
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    vocabulary = _read_vocabulary(folder, tokenizer_config, config, note)
    _add_tokens(vocabulary, folder, tokenizer_config, note)
    ids = _special_ids(vocabulary, folder, tokenizer_config, config, note)
    begin, end = _added_around_text(vocabulary, folder, tokenizer_config, ids, note)
    if "bos" not in ids:
        # Without the key llama.cpp takes id 1 or 11, whatever that is.
        note(f"{folder}: no token begins a text; the end token stands for it, and none is added.")
        ids["bos"] = ids["eos"]
    template = _chat_template(folder, tokenizer_config)
    n_vocab = _pad(vocabulary, folder, config, ids.get("pad"), note)

    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list([vocabulary.tokens[i] for i in range(n_vocab)])
    writer.add_token_types([int(vocabulary.types[i]) for i in range(n_vocab)])
    if vocabulary.model == "llama":
        writer.add_token_scores([vocabulary.scores.get(i, _UNRANKED) for i in range(n_vocab)])
        prefix = tokenizer_config.get("add_prefix_space")
        writer.add_add_space_prefix(vocabulary.space_prefix if prefix is None else bool(prefix))
    else:
        writer.add_token_merges(vocabulary.merges)
    for kind, i in ids.items():
        if i < n_vocab:
            getattr(writer, f"add_{kind}_token_id")(i)
    writer.add_add_bos_token(begin)
    writer.add_add_eos_token(end)
    if template is not None:
        writer.add_chat_template(template)


def _llama_tokens(path: Path, lines: Sequence[str]) -> tuple[list[list[int]], dict[int, str]]:
    """What llama.cpp makes of texts, and the text of each token that it used.

    Raises:
        FormatError: llama.cpp can't read the vocabulary.
    """
    import llama_cpp

    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what upstream prints while it loads, warnings as errors
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    logger.setLevel(level)
    if model is None:
        raise FormatError(f"{path}: llama.cpp can't read this vocabulary; expected one that it reads; report this.")
    try:
        vocab = llama_cpp.llama_model_get_vocab(model)
        found = []
        for line in lines:
            data = line.encode()
            tokens = (llama_cpp.llama_token * (len(data) + 16))()  # at most one per byte, and what stands around
            n = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, len(tokens), False, True)
            found.append(tokens[:n])
        texts = {i: llama_cpp.llama_vocab_get_text(vocab, i).decode() for i in set(itertools.chain(*found))}
    finally:
        llama_cpp.llama_model_free(model)
    return found, texts


def _reference_tokens(folder: Path) -> tuple[Path, list[tuple[str, list[int]]]]:
    """What the checkpoint's own tokenizer makes of the lines of the probe.

    Left out are lines that the library changes in a way of which `add_tokenizer` gave note.

    Returns:
        The tokenizer's main file; lines with their tokens.

    Raises:
        OptionError: a package isn't installed.
        FormatError: a file is broken.
    """
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    path = folder / "tokenizer.model"
    if not path.is_file() and (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        backend = _open_backend(path)
        is_metaspace = (_read_json(path).get("pre_tokenizer") or {}).get("type") == "Metaspace"
        lines = [line for line in _PROBE if not (is_metaspace and line.startswith(" "))]
        return path, [(line, backend.encode(line, add_special_tokens=False).ids) for line in lines]
    added = [token["content"] for token in _added_tokens(folder, tokenizer_config).values()]
    lines = [line for line in _PROBE if not any(text in line for text in added)]
    if path.is_file():
        proto = _read_sentencepiece_proto(path)
        import sentencepiece

        prefix = tokenizer_config.get("add_prefix_space")
        if prefix is not None:
            proto.normalizer_spec.add_dummy_prefix = bool(prefix)
        start = _SPACE * proto.normalizer_spec.add_dummy_prefix
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        lines = [line for line in lines if processor.normalize(line) == start + line.replace(" ", _SPACE)]
        return path, [(line, processor.encode(line)) for line in lines]
    need_packages("tokenizer", "convert", "tokenizers")
    import tokenizers

    path = folder / "vocab.json"
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(path), str(folder / "merges.txt")))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return path, [(line, backend.encode(line).ids) for line in lines]


def check_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Compares the tokens of a probe text: llama.cpp's from a GGUF, and those of the checkpoint's own tokenizer.

    Args:
        gguf_path: with the keys of `add_tokenizer`; it needs no tensors.
        folder: of the checkpoint.

    Raises:
        OptionError: a package isn't installed.
        FormatError: they differ, or a file is broken.
    """
    path, reference = _reference_tokens(folder)
    found, texts = _llama_tokens(gguf_path, [line for line, _ in reference])
    for (line, wanted), tokens in zip(reference, found):
        if tokens != wanted:
            i = next(
                (i for i, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), min(len(tokens), len(wanted))
            )
            before = "".join(texts[token] for token in tokens[max(0, i - 3) : i])
            piece = f"{tokens[i]} {texts[tokens[i]]!a}" if i < len(tokens) else "the end"
            raise FormatError(
                f"{path}: llama.cpp reads the line {line!a} otherwise: its token {i}, after {before!a}, is {piece}; expected "
                f"{wanted[i] if i < len(wanted) else 'the end'}, as this file has it; the model was trained on other tokens. This tokenizer can't be converted."
            )
