"""What another llama-cpp-python release changes for us: `make bump VERSION=x.y.z`. Needs only Python and pip.

Compares its headers with ggml-abi.h and with the declarations that our sources name, those of llama-abi.h included. Never changes the tree.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ABI_HEADER = ROOT / "ggml" / "src" / "ggml-abi.h"
SOURCES = (ROOT / "ggml", ROOT / "tools" / "main", ROOT / "powerinfer_py")
UPSTREAM = "vendor/llama.cpp/"
IMPL_HEADER = UPSTREAM + "ggml/src/ggml-backend-impl.h"
PUBLIC_HEADERS = tuple(
    UPSTREAM + name
    for name in (
        "ggml/include/ggml.h",
        "ggml/include/ggml-backend.h",
        "ggml/include/ggml-cpu.h",
        "ggml/include/gguf.h",
        "include/llama.h",
        "src/llama-ext.h",  # not installed; llama-abi.h declares what we use of it
    )
)
GGML_CMAKE = UPSTREAM + "ggml/CMakeLists.txt"
# Python that powerinfer_py replaces or extends: file, class, method.
PYTHON_SEAMS = (
    ("llama_cpp/_internals.py", "LlamaModel", "__init__"),
    ("llama_cpp/llama.py", "Llama", "__init__"),
)
_MACROS = re.compile(r"\b(GGML|LLAMA)_(API|BACKEND_API|CALL|NORETURN|RESTRICT)\b|\b__restrict\b")
_BUILTIN = {"void", "bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned"}
_QUALIFIERS = {"const", "volatile"}


@dataclass
class Declarations:
    """What a header declares, with spelling differences taken out.

    Attributes:
        structs: name -> {field: its type, or return and parameter types}, in order.
        functions: name -> return and parameter types.
        enumerators: name -> value.
        aliases: typedef name -> type.
        constants: name of a `#define` -> its value, a number or a name.
    """

    structs: dict[str, dict[str, str]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    enumerators: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


class BumpError(RuntimeError):
    """A release that can't be had or read."""


def parse_header(text: str) -> Declarations:
    """Read the declarations of a C header.

    Args:
        text: C, or the C part of C++; what isn't a declaration is passed over.

    Returns:
        Its declarations.
    """
    found = Declarations()
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    text = text.replace("\\\n", " ")
    found.constants.update(
        re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?(-?\w+)\)?[ \t]*$", text, flags=re.MULTILINE)
    )
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    text = _without_calls(_MACROS.sub(" ", text), r"\w*DEPRECATED|GGML_ATTRIBUTE_FORMAT|__attribute__|static_assert")
    text = re.sub(r'extern\s+"C"\s*\{|\bnamespace\s+\w+\s*\{', " ", text)
    for statement in _split(text, ";"):
        _read_statement(_tokens(statement), found)
    return found


def _without_calls(text: str, names: str) -> str:
    """Take `NAME(...)` out; of `DEPRECATED(declaration, "hint")` the declaration stays."""
    pattern = re.compile(rf"\b({names})\s*\(")
    while (match := pattern.search(text)) is not None:
        end, depth = match.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inner = next(_split(text[match.end() : end - 1], ","), "") if "DEPRECATED" in match[1] else ""
        text = text[: match.start()] + inner + text[end:]
    return text


def _split(text: str | list[str], separator: str) -> Iterator:
    """Split a text, or a list of tokens, at a separator outside of all brackets. Unmatched closing ones are passed over."""
    begin = depth = 0
    for i, item in enumerate(text):
        if item in ("(", "{", "["):
            depth += 1
        elif item in (")", "}", "]"):
            depth = max(0, depth - 1)
        elif item == separator and depth == 0:
            yield text[begin:i]
            begin = i + 1
    yield text[begin:]


def _tokens(text: str) -> list[str]:
    tokens = re.findall(r"\w+|\.\.\.|<<|[^\s\w]", text)
    while tokens and tokens[0] == "}":  # the end of an extern "C" or of a namespace
        tokens = tokens[1:]
    return tokens


def _read_statement(tokens: list[str], found: Declarations) -> None:
    is_typedef = tokens[:1] == ["typedef"]
    tokens = tokens[is_typedef:]
    if tokens[:1] == ["struct"] and "{" in tokens and tokens.index("{") <= 2:
        body, rest = _body(tokens)
        name = rest[-1] if is_typedef and rest else tokens[1]
        found.structs[name] = dict(pair for part in _split(body, ";") for pair in _fields(part))
    elif tokens[:1] == ["enum"] and "{" in tokens:
        body, _ = _body(tokens)
        value = -1
        for part in _split(body, ","):
            if part:
                value = _value(part[2:], found) if part[1:2] == ["="] else value + 1
                found.enumerators[part[0]] = value
    elif is_typedef:
        found.aliases.update(_fields(tokens))
    elif "(" in tokens and "{" not in tokens and "=" not in tokens:
        i = tokens.index("(")
        if i > 1 and re.fullmatch(r"[a-z]\w*", tokens[i - 1]):
            found.functions[tokens[i - 1]] = _signature(tokens[: i - 1], tokens[i:])


def _body(tokens: list[str]) -> tuple[list[str], list[str]]:
    """The tokens inside the first pair of braces, and those behind it."""
    begin = tokens.index("{")
    depth = 0
    for i in range(begin, len(tokens)):
        depth += {"{": 1, "}": -1}.get(tokens[i], 0)
        if depth == 0:
            return tokens[begin + 1 : i], tokens[i + 1 :]
    return tokens[begin + 1 :], []


def _value(tokens: list[str], found: Declarations) -> int:
    """The value of an enumerator: a number, an earlier enumerator, or `a << b`."""
    words = [str(found.enumerators.get(token, token)) for token in tokens if token not in "()"]
    text = "".join(words)
    match = re.fullmatch(r"(-?\w+)(?:<<(\d+))?", text)
    try:
        return int(match[1], 0) << int(match[2] or 0) if match else 0
    except ValueError:
        return 0


def _fields(tokens: list[str]) -> Iterator[tuple[str, str]]:
    """(name, type) of each member of one declaration: `int a, * b`, `float v[4]`, `void (*f)(int)`, `int a = 0`."""
    tokens = tokens[: tokens.index("=")] if "=" in tokens else tokens
    if tokens.count("(") >= 2 and "*" in tokens:
        i = tokens.index("(")
        if tokens[i + 1] == "*":
            yield tokens[i + 2], _signature(tokens[:i], tokens[i + 4 :])
            return
    base: list[str] = []
    for part in _split(tokens, ","):
        array = part[part.index("[") :] if "[" in part else []
        plain = part[: len(part) - len(array)]
        if plain:
            kind = base + plain[:-1]
            base = base or [token for token in plain[:-1] if token != "*"]
            yield plain[-1], _type(kind) + "".join(array)


def _signature(returned: list[str], parameters: list[str]) -> str:
    inner = parameters[1 : len(parameters) - parameters[::-1].index(")") - 1]
    types = [_parameter(part) for part in _split(inner, ",") if part]
    return f"{_type(returned)} ({', '.join(t for t in types if t != 'void')})"


def _parameter(tokens: list[str]) -> str:
    """The type of a parameter, without its name."""
    if "(" in tokens:  # a function pointer
        return next(kind for _, kind in _fields(tokens))
    if "[" in tokens:
        i = tokens.index("[")
        tokens = [*tokens[: i - 1], "*", "name"]
    kind = [token for token in tokens if token not in ("struct", "enum")]
    is_named = re.fullmatch(r"\w+", kind[-1]) and kind[-1] not in _BUILTIN | _QUALIFIERS
    if is_named and any(token not in _QUALIFIERS for token in kind[:-1]):
        kind = kind[:-1]
    return _type(kind)


def _type(tokens: list[str]) -> str:
    words = [token for token in tokens if token not in ("struct", "enum", "extern", "static", "inline")]
    return " ".join(words)


def compare_structs(ours: Declarations, theirs: Declarations) -> list[str]:
    """Compare our declarations of internal structs with a release's.

    Args:
        ours: of ggml-abi.h.
        theirs: of the release's ggml-backend-impl.h.

    Returns:
        One sentence per difference.
    """
    differences = []
    for name, fields in ours.structs.items():
        if name not in theirs.structs:
            differences.append(f"struct {name} is gone.")
        else:
            differences += _compare_fields(name, fields, theirs.structs[name])
    for name, signature in ours.functions.items():
        if name.startswith("ggml_backend_") and theirs.functions.get(name) != signature:
            differences.append(_changed("function " + name, signature, theirs.functions.get(name)))
    return differences


def compare_public(old: Declarations, new: Declarations, used: set[str]) -> list[str]:
    """Compare the public declarations that our sources name.

    Args:
        old: of the release that we build with.
        new: of the other one.
        used: identifiers in our sources.

    Returns:
        One sentence per difference.
    """
    differences = []
    for name in sorted(used):
        if name in old.functions and old.functions[name] != new.functions.get(name):
            differences.append(_changed("function " + name, old.functions[name], new.functions.get(name)))
        if name in old.aliases and old.aliases[name] != new.aliases.get(name):
            differences.append(_changed("type " + name, old.aliases[name], new.aliases.get(name)))
        if name in old.enumerators and old.enumerators[name] != new.enumerators.get(name):
            differences.append(_changed(name, str(old.enumerators[name]), str(new.enumerators.get(name, "")) or None))
        if name in old.constants and old.constants[name] != new.constants.get(name):
            differences.append(_changed(name, old.constants[name], new.constants.get(name)))
        if name in old.structs:
            if name not in new.structs:
                differences.append(f"struct {name} is gone.")
            else:
                differences += _compare_fields(name, old.structs[name], new.structs[name])
    return differences


def _compare_fields(struct: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    differences = [
        f"{struct}: field {name} was added after {_before(list(new), name)}; its type is {new[name]}."
        for name in new
        if name not in old
    ]
    for name, kind in old.items():
        if new.get(name) != kind:
            differences.append(_changed(f"{struct}: field {name}", kind, new.get(name)))
    common_old, common_new = [n for n in old if n in new], [n for n in new if n in old]
    if common_old != common_new:
        first = next(a for a, b in zip(common_old, common_new) if a != b)
        differences.append(f"{struct}: the fields are in another order, from {first} on.")
    return differences


def _before(names: list[str], name: str) -> str:
    i = names.index(name)
    return names[i - 1] if i else "the beginning"


def _changed(what: str, old: str, new: str | None) -> str:
    return f"{what} is gone; it was {old}." if new is None else f"{what} was {old} and is {new}."


def compare_python(old: str, new: str, class_name: str, method: str) -> list[str]:
    """Compare a method that powerinfer_py replaces or calls.

    Args:
        old: source of the module in the release that we build with.
        new: the same of the other one.
        class_name: the class.
        method: its method.

    Returns:
        One sentence per difference: its parameters, or its body when they are equal.
    """
    before, after = (_method(text, class_name, method) for text in (old, new))
    what = f"{class_name}.{method}"
    if after is None or before is None:
        return [] if before is None else [f"{what} is gone."]
    names = [{a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)} for f in (before, after)]
    differences = [f"{what}: parameter {name} is gone." for name in sorted(names[0] - names[1])]
    differences += [f"{what}: parameter {name} was added." for name in sorted(names[1] - names[0])]
    # Of Llama only the parameters matter; LlamaModel is built by our subclass, step by step.
    if not differences and class_name == "LlamaModel" and ast.dump(before) != ast.dump(after):
        differences.append(f"{what} has another body; powerinfer_py/llama.py does the same steps by itself.")
    return differences


def _method(text: str, class_name: str, method: str) -> ast.FunctionDef | None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == method), None)
    return None


def used_names() -> set[str]:
    """Identifiers of upstream in our C++ sources."""
    paths = [p for folder in SOURCES for p in folder.rglob("*") if p.suffix in (".h", ".cpp", ".inl", ".cu", ".cuh")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return set(re.findall(r"\b(?:ggml|gguf|llama|GGML|GGUF|LLAMA)_\w+", text))


def pinned_version() -> str:
    """The release that pyproject.toml requires."""
    match = re.search(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if match is None:
        raise BumpError("pyproject.toml: no llama-cpp-python==x.y.z; expected the pinned release; put it back.")
    return match[1]


def download(version: str, folder: Path) -> dict[str, str]:
    """Fetch a release's source with pip and read the files that are compared.

    Args:
        version: e.g. 0.3.36.
        folder: where the archive goes.

    Returns:
        Path inside the archive -> text; a file that the release lacks is "".

    Raises:
        BumpError: pip can't get the release.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    done = subprocess.run([*command, "-d", str(folder), f"llama-cpp-python=={version}"], check=False)
    archive = folder / f"llama_cpp_python-{version}.tar.gz"
    if done.returncode or not archive.exists():
        raise BumpError(
            f"llama-cpp-python=={version}: pip could not download it; see `pip index versions llama-cpp-python`."
        )
    wanted = {*PUBLIC_HEADERS, IMPL_HEADER, GGML_CMAKE, *(path for path, _, _ in PYTHON_SEAMS)}
    files = dict.fromkeys(wanted, "")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path in wanted:
                files[path] = tar.extractfile(member).read().decode("utf-8")
    return files


def ggml_version(cmake: str) -> str:
    """The version in ggml's CMakeLists.txt; "?" when it has none."""
    parts = [re.search(rf"GGML_VERSION_{part} (\d+)", cmake) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] if part else "?" for part in parts)


def compare_releases(old: dict[str, str], new: dict[str, str], abi_header: str, used: set[str]) -> list[str]:
    """All differences that matter to us.

    Args:
        old: files of the release that we build with (download).
        new: files of the other one.
        abi_header: text of ggml-abi.h.
        used: identifiers in our sources.

    Returns:
        One sentence per difference.
    """
    differences = [f"{path.removeprefix(UPSTREAM)} is gone." for path in sorted(old) if old[path] and not new[path]]
    api_version = re.search(r"define GGML_BACKEND_API_VERSION (\d+)", new[IMPL_HEADER])
    expected = re.search(r"ggml_abi_api_version = (\d+)", abi_header)
    if api_version is None or expected is None or api_version[1] != expected[1]:
        differences.append(
            _changed("GGML_BACKEND_API_VERSION", expected[1] if expected else "?", api_version and api_version[1])
        )
    major = ggml_version(new[GGML_CMAKE]).partition(".")[0]
    if major != "0":
        differences.append(f"The libraries are named libggml.so.{major}; CMakeLists.txt links libggml.so.0.")
    differences += compare_structs(parse_header(abi_header), parse_header(new[IMPL_HEADER]))
    public = [parse_header("\n".join(files[path] for path in PUBLIC_HEADERS)) for files in (old, new)]
    differences += compare_public(*public, used)
    for path, class_name, method in PYTHON_SEAMS:
        differences += compare_python(old[path], new[path], class_name, method)
    return differences


def build_and_test(version: str, folder: Path) -> int:
    """Run `make test` on a copy of the tree that requires another release.

    Args:
        version: the release.
        folder: an empty folder.

    Returns:
        The exit code of make.
    """
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pinned = pinned_version()
    for name in listed:
        source, target = ROOT / name, folder / "tree" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
            if source.suffix in (".py", ".toml", ".txt", ".md"):
                target.write_text(source.read_text(encoding="utf-8").replace(pinned, version), encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(["make", "test"], cwd=folder / "tree", env=environment, check=False).returncode


def main() -> int:
    """The command line.

    Returns:
        The exit code: 0 when nothing differs (and the tests pass), 1 otherwise.
    """
    parser = argparse.ArgumentParser(description="What another llama-cpp-python release changes for us.")
    parser.add_argument("version", help="the release, e.g. 0.3.36")
    parser.add_argument("--build", action="store_true", help="also compile it and run the tests, in a scratch copy")
    args = parser.parse_args()
    pinned = pinned_version()
    with tempfile.TemporaryDirectory() as folder:
        try:
            old = download(pinned, Path(folder))
            new = old if args.version == pinned else download(args.version, Path(folder))
        except BumpError as error:
            print(f"bump: {error}", file=sys.stderr)
            return 1
        differences = compare_releases(old, new, ABI_HEADER.read_text(encoding="utf-8"), used_names())
        versions = [ggml_version(files[GGML_CMAKE]) for files in (old, new)]
        print(f"llama-cpp-python {pinned} -> {args.version}, ggml {versions[0]} -> {versions[1]}")
        for difference in differences:
            print(f"- {difference}")
        print(f"{len(differences)} differences" if differences else "No differences in what we use.", flush=True)
        code = build_and_test(args.version, Path(folder)) if args.build else 0
    return 1 if differences or code else 0


if __name__ == "__main__":
    sys.exit(main())
