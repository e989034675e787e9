"""The tensors of a Hugging Face checkpoint, one at a time: safetensors or .bin, one file or shards with their index.

Files are mapped, not read: a tensor costs memory only while somebody changes it. No code from a file is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer_py.errors import FormatError

from .arguments import need_packages

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
COPY_AGAIN = "copy or download the file again."
# torch's name -> ggml's.
ROW_TYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
_SAFETENSORS_TYPES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        FormatError: it can't be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(
            f"{path}: {error.strerror}; expected a file of a Hugging Face checkpoint; check the folder."
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: can't be read ({str(error)[:120]}); expected JSON; download or mend the file."
        ) from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds {type(value).__name__}; expected a JSON object; download or mend the file.")
    return value


def load_torch_file(path: Path, otherwise: str, *, mapped: bool = True) -> Any:
    """What torch.save stored in a file, data only.

    Args:
        path: the file.
        otherwise: what a file that can't be read may be, and what to do.
        mapped: tensors are mapped, which files of before torch 1.6 don't allow.

    Returns:
        Whatever it holds.

    Raises:
        FormatError: torch can't read it.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch's errors on damaged files have no common class
        reason = str(error).strip().partition("\n")[0][:120] or type(error).__name__
        raise FormatError(f"{path}: torch can't read it as plain tensors ({reason}); {otherwise}") from None


class Checkpoint:
    """A folder with a checkpoint.

    Attributes:
        folder: where it is.
        shapes: tensor name -> shape, outermost dimension first.
        types: tensor name -> what torch or the file calls its type, e.g. `torch.bfloat16`.
    """

    def __init__(self, folder: Path) -> None:
        """Opens every file and checks that the index tells the truth about it.

        Args:
            folder: holds model.safetensors or pytorch_model.bin, or the index of one and its shards.

        Raises:
            FormatError: no checkpoint, a shard is missing, damaged, or lacks a tensor of the index.
            OptionError: a package isn't installed.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        need_packages("convert", "convert", "torch", "safetensors")
        for path, names in self._shards():
            found = set()
            for name, file, shape, type_name in self._open(path):
                if names is None or name in names:
                    found.add(name)
                    self.shapes[name], self.types[name], self._files[name] = shape, type_name, file
            if names is not None and names - found:
                raise FormatError(
                    f"{path}: has no tensor {min(names - found)}; expected it there, the index says so; {COPY_AGAIN}"
                )

    @property
    def name(self) -> str:
        """What the model is called: as its folder, or as the repository when that is a snapshot in the hub's cache."""
        folder = self.folder.resolve()
        repo = re.fullmatch(r"models--.+--(.+)", folder.parent.parent.name)
        return repo[1] if repo and folder.parent.name == "snapshots" else folder.name

    def row_type(self, name: str) -> str:
        """The ggml type of a tensor's values: F32, F16 or BF16.

        Raises:
            FormatError: the tensor has another type.
        """
        row_type = ROW_TYPES.get(self.types[name])
        if row_type is None:
            raise FormatError(
                f"{self.folder}: tensor {name} is {self.types[name]}; expected float32, float16 or bfloat16; "
                "give the checkpoint before it was quantized."
            )
        return row_type

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped, as it is stored.

        Args:
            name: one of `shapes`.

        Returns:
            float32, float16 or bfloat16.

        Raises:
            FormatError: the tensor has another type.
        """
        self.row_type(name)
        file = self._files[name]
        return file[name] if isinstance(file, dict) else file.get_tensor(name)

    def _shards(self) -> list[tuple[Path, set[str] | None]]:
        """Every file and the tensors that the index wants from it; None: all that it has."""
        for stem in (SAFETENSORS, TORCH_FILE):
            index = self.folder / (stem + INDEX_SUFFIX)
            if index.is_file():
                return self._indexed(index)
            if (self.folder / stem).is_file():
                return [(self.folder / stem, None)]
        raise FormatError(
            f"{self.folder}: has neither {SAFETENSORS} nor {TORCH_FILE}, nor {SAFETENSORS}{INDEX_SUFFIX} or "
            f"{TORCH_FILE}{INDEX_SUFFIX}; expected one of them; give the folder of a Hugging Face checkpoint."
        )

    def _indexed(self, index: Path) -> list[tuple[Path, set[str] | None]]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{index}: has no weight_map; expected tensor names and their files; {COPY_AGAIN}")
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise FormatError(f"{index}: {name} is in {file!r}; expected a file name without folders; {COPY_AGAIN}")
            shards.setdefault(file, set()).add(name)
        for file in sorted(shards):
            if not os.path.isfile(self.folder / file):  # Path.is_file raises where a name is too long
                raise FormatError(
                    f"{self.folder / file}: isn't there; {index.name} expects it, with {len(shards[file])} tensors; "
                    "download the missing shard."
                )
        return [(self.folder / file, names) for file, names in sorted(shards.items())]

    def _open(self, path: Path) -> Iterator[tuple[str, Any, tuple[int, ...], str]]:
        """(name, what to read it from, shape, type) of every tensor of a file."""
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{path}: {error}; the file is truncated or damaged; {COPY_AGAIN}") from None
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                yield name, file, tuple(part.get_shape()), _SAFETENSORS_TYPES.get(part.get_dtype(), part.get_dtype())
            return
        for name, tensor in self._torch_file(path).items():
            yield name, {name: tensor}, tuple(tensor.shape), str(tensor.dtype)

    @staticmethod
    def _torch_file(path: Path) -> dict[str, Tensor]:
        import torch

        tensors = load_torch_file(
            path,
            "the file is damaged or of before torch 1.6; copy or download it again, or save it anew as safetensors.",
        )
        if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise FormatError(
                f"{path}: holds more than tensors; expected names and tensors; save the state_dict alone."
            )
        return tensors
