"""The table from the pre-tokenizer of a tokenizer.json to the name that llama.cpp has for it (`tokenizer.ggml.pre`).

A name stands here only if both libraries cut text alike: tests/test_tokenizer.py compares each row on mixed text.
"""

from __future__ import annotations

import json
from typing import Any

# Steps as `read_steps` writes them. "words": with GPT-2's own expression, which is built into both libraries.
_BYTES = "bytes"
_BYTE_WORDS = "bytes words"

# The splits of byte-level tokenizers after GPT-2's differ in how many digits stay together.
_SPLIT = (
    r"split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_3_DIGITS = _SPLIT.format(digits=r"\p{N}{1,3}")
_SPLIT_1_DIGIT = _SPLIT.format(digits=r"\p{N}")
_SPLIT_CASES = (
    r"split [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_HAN = "split [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek-LLM lists the letters of the alphabets that have upper and lower case.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK_PUNCTUATION = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

# (steps, ignore_merges of the model) -> name. Several of llama.cpp's names share a row; the first model's is taken.
# Source: llama.cpp, src/llama-vocab.cpp (expressions and ignore_merges of each name); tokenizer.json of the models.
NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    # GPT-2, OPT, MPT, OLMo, Phi-2
    ((_BYTE_WORDS,), False): "gpt-2",
    # SmolLM, StarCoder, Refact, Command-R
    (("digits each", _BYTE_WORDS), False): "smollm",
    (("punctuation Contiguous", _BYTE_WORDS, "digits runs", "split [0-9][0-9][0-9]"), False): "falcon",
    # Llama-3, Falcon-3
    ((_SPLIT_3_DIGITS, _BYTES), True): "llama-bpe",
    # OLMo-2
    ((_SPLIT_3_DIGITS, _BYTES), False): "dbrx",
    # Qwen2, Qwen3, StableLM-2
    ((_SPLIT_1_DIGIT, _BYTES), False): "qwen2",
    # Mistral-Nemo
    ((_SPLIT_CASES, _BYTES), True): "tekken",
    (
        (
            "split [\r\n]",
            rf"split \s?[{_CASED_LETTERS}]+",
            rf"split \s?[!-/:-~{_CJK_PUNCTUATION}]+",
            r"split \s+$",
            _SPLIT_HAN,
            "digits each",
            _BYTES,
        ),
        False,
    ): "deepseek-llm",
    (
        ("split [\r\n]", r"split \s?\p{L}+", r"split \s?\p{P}+", _SPLIT_HAN, "digits each", _BYTES),
        False,
    ): "deepseek-coder",
}


def read_steps(pre_tokenizer: dict[str, Any] | None) -> tuple[str, ...]:
    """The steps of a pre-tokenizer in one spelling, whatever their JSON looks like.

    Args:
        pre_tokenizer: `pre_tokenizer` of a tokenizer.json.

    Returns:
        One text per step, in order. Offsets, which change no token, are left out.
    """
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return tuple(step for inner in pre_tokenizer["pretokenizers"] for step in read_steps(inner))
    if kind == "Split" and "Regex" in pre_tokenizer["pattern"]:
        how = (pre_tokenizer["behavior"], pre_tokenizer["invert"])
        # Keeping only what matches is the same where everything matches, as with all expressions of the table.
        if how in (("Isolated", False), ("Removed", True)):
            return (f"split {pre_tokenizer['pattern']['Regex']}",)
    if kind == "Digits":
        return ("digits each" if pre_tokenizer["individual_digits"] else "digits runs",)
    if kind == "Punctuation":
        return (f"punctuation {pre_tokenizer['behavior']}",)
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space", True):
        return (_BYTE_WORDS if pre_tokenizer.get("use_regex", True) else _BYTES,)
    return (json.dumps(pre_tokenizer, sort_keys=True),)
