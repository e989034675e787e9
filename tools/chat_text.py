"""Conversations as the text that a model sees: a ShareGPT JSON file through the model's own chat template.

For `powerinfer profile --special`. Run as `python -m powerinfer_py.tools.chat_text MODEL.gguf CHATS.json OUT.txt`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from powerinfer_py.errors import FormatError, PowerInferError
from powerinfer_py.format import BaseModel, atomic_path

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
}
_MAX_CHARS = 6000  # per conversation, so that one of them doesn't fill the text


def conversations(text: str) -> Iterator[list[dict[str, str]]]:
    """Conversations of a JSON list, one by one; a list that is cut off ends at its last whole one.

    Args:
        text: `[{"conversations": [{"from": "human", "value": ...}, ...]}, ...]`.

    Yields:
        Messages with `role` and `content`. Those that don't alternate from the user on are left out.
    """
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    while True:
        while at < len(text) and text[at] in ", \r\n\t":
            at += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        messages = [
            {"role": _ROLES.get(turn["from"], ""), "content": turn["value"].strip()} for turn in item["conversations"]
        ]
        roles = [message["role"] for message in messages]
        if (
            len(roles) >= 2
            and roles == ["user", "assistant"] * (len(roles) // 2)
            and all(m["content"] for m in messages)
        ):
            yield messages


def write_chat_text(model: Path, chats: Path, out: Path, n_bytes: int, every: int, first: int) -> int:
    """Writes conversations through a model's chat template.

    Args:
        model: a GGUF with a chat template.
        chats: the JSON file.
        out: the text file.
        n_bytes: stop when there are so many.
        every: use one conversation of so many: neighbours are alike.
        first: which one; texts with different ones share no conversation.

    Returns:
        The number of conversations written.

    Raises:
        FormatError: no template, or too few conversations.
    """
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = BaseModel(model).files[0].get("tokenizer.chat_template", "")
    if not template:
        raise FormatError(f"{model}: it has no chat template; expected tokenizer.chat_template; use an instruct model.")
    formatter = Jinja2ChatFormatter(template, eos_token="", bos_token="", add_generation_prompt=False)
    n_written = 0
    size = 0
    with atomic_path(out) as temporary, temporary.open("wb") as file:
        for i, messages in enumerate(conversations(chats.read_text(encoding="utf-8"))):
            if i % every != first:
                continue
            data = formatter(messages=messages).prompt[:_MAX_CHARS].encode("utf-8") + b"\n"
            file.write(data)
            size += len(data)
            n_written += 1
            if size >= n_bytes:
                return n_written
    raise FormatError(f"{chats}: {n_written} usable conversations hold {size} bytes; expected {n_bytes}; ask for less.")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m powerinfer_py.tools.chat_text", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("chats", type=Path, metavar="CHATS.json")
    parser.add_argument("out", type=Path, metavar="OUT.txt")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="text to write (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="use one conversation of so many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="which one, from 0 on (default: %(default)s)")
    args = parser.parse_args()
    try:
        n = write_chat_text(args.model, args.chats, args.out, args.bytes, args.every, args.first)
    except (PowerInferError, OSError) as error:
        print(f"chat_text: {error}", file=sys.stderr)
        return 1
    print(f"{n} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
