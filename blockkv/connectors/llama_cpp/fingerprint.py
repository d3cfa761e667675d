"""What the bytes of a llama.cpp KV cache depend on, as a `blockkv.Family`.

llama.cpp writes none of this into a state: it accepts the state of another model of the same shape.

=========  =================================================================================================
model      architecture, description (`llama_model_desc`), layers, heads, embedding, window, as llama.cpp says
weights    a digest of every byte of the model's files, of each LoRA file with its scale, and the overrides of
           the model's metadata
dtype      the types of K and V, and whether their rotation is switched off (`LLAMA_ATTN_ROT_DISABLE`)
layout     versions of llama.cpp, of the bindings and of the state format; flash attention, which decides
           how V lies; streams; attention type; RoPE and YaRN settings; whether the context is longer than
           what the model was trained on, since some models have other RoPE factors then; `swa_full`
salt       the caller's
=========  =================================================================================================

The digest is of whole files, and no sample of them: two fine-tunes differ in a few tensors only, two
quantisations by another importance matrix not even in their headers. It is that of
`blockkv.connectors.weights`, and is kept by device, inode, size, mtime and ctime, so that each file is read
once, also by those who have no store.

Not in it, because they change results only as another batch size would: threads, batch sizes, where layers
are computed. Not in it, because llama.cpp does not tell: control vectors. Whoever sets one says so in `salt`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from blockkv import Family
from blockkv.connectors.weights import file_digest as digest_of_bytes
from blockkv.errors import InvalidArgument

__all__ = ["Context", "family_of", "file_digest"]

TEXT_BYTES = 256
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""How the files of one model are named that was split (`llama_split_path` of llama.h)."""
PARAMETERS = (
    "flash_attn_type",
    "attention_type",
    "ctx_type",
    "swa_full",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
"""Of `llama_context_params`: those that change what is in the cache or how it lies there."""


@dataclass(frozen=True, slots=True)
class Context:
    """A llama.cpp context, with what it was made from. `Context.of` takes it from a `llama_cpp.Llama`."""

    ctx: Any
    """`llama_context_p`"""
    model: Any
    """`llama_model_p`"""
    params: Any
    """The `llama_context_params` that the context was made with."""
    model_path: str
    adapters: tuple[tuple[str, float], ...] = ()
    """LoRA adapters that are set: path and scale."""
    overrides: str = ""
    """Overrides of the model's metadata, in any one notation."""

    @classmethod
    def of(cls, llama: Any) -> Context:
        """Of a `llama_cpp.Llama`."""
        adapters = ((llama.lora_path, float(llama.lora_scale)),) if llama.lora_path else ()
        overrides = repr(sorted(llama.kv_overrides.items())) if llama.kv_overrides else ""
        return cls(llama.ctx, llama.model, llama.context_params, llama.model_path, adapters, overrides)

    @property
    def memory(self) -> Any:
        """`llama_memory_t`. Raises InvalidArgument where the model has none."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        if memory is None:
            raise InvalidArgument("this model has no KV cache; there is nothing to save")
        return memory

    @property
    def sequences(self) -> int:
        """How many sequences the context may hold."""
        return int(llama_cpp.llama_n_seq_max(self.ctx))

    @property
    def is_unified(self) -> bool:
        """Whether all sequences share one buffer."""
        return bool(self.params.kv_unified) or self.sequences == 1

    @property
    def window_tokens(self) -> int:
        """Sliding window of the model's attention; 0 where it has none."""
        return max(0, int(llama_cpp.llama_model_n_swa(self.model)))

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can be cut to its beginning: a recurrent state stands for all of it."""
        model = self.model
        return not (llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))

    def metadata(self, name: str) -> str:
        """A value of the model's metadata as text, "" where it has none of that name."""
        raw = ctypes.create_string_buffer(TEXT_BYTES)
        length = llama_cpp.llama_model_meta_val_str(self.model, name.encode(), raw, TEXT_BYTES)
        return raw.value.decode(errors="replace") if length >= 0 else ""

    @property
    def architecture(self) -> str:
        return self.metadata("general.architecture")


def family_of(context: Context, form: str, *, weights: str = "", salt: str = "") -> Family:
    """The family of what this context computes, stored in some `form`.

    `weights` takes the place of the digest of the model's files, for whoever has one already. Raises
    InvalidArgument where a file of the model cannot be read.
    """
    model, params = context.model, context.params
    described = ctypes.create_string_buffer(TEXT_BYTES)
    llama_cpp.llama_model_desc(model, described, TEXT_BYTES)
    architecture = context.architecture
    shape = (
        llama_cpp.llama_model_n_layer(model),
        llama_cpp.llama_model_n_head(model),
        llama_cpp.llama_model_n_head_kv(model),
        llama_cpp.llama_model_n_embd(model),
        context.window_tokens,
    )
    trained = context.metadata(f"{architecture}.rope.scaling.original_context_length")
    trained_tokens = int(trained) if trained.isdigit() else int(llama_cpp.llama_model_n_ctx_train(model))
    streams = 1 if context.is_unified else context.sequences
    versions = (
        llama_cpp.llama_version().decode(),
        llama_cpp.__version__,
        llama_cpp.LLAMA_STATE_SEQ_VERSION,
    )
    settings = [f"{name}={getattr(params, name)!r}" for name in PARAMETERS]
    return Family(
        model=f"llama.cpp {architecture} {described.value.decode(errors='replace')} {shape}",
        weights=f"{weights or model_digest(context.model_path)} {_adapters(context)} {context.overrides}",
        dtype=f"K {params.type_k}, V {params.type_v}, "
        f"rotation off {os.environ.get('LLAMA_ATTN_ROT_DISABLE', '0')}",
        layout=f"{form}, {versions}, {streams} streams, {' '.join(settings)}, "
        f"long {int(llama_cpp.llama_n_ctx_seq(context.ctx)) > trained_tokens}",
        salt=salt,
    )


def _adapters(context: Context) -> list[tuple[str, float]]:
    return [(file_digest(path), scale) for path, scale in context.adapters]


def model_digest(path: str) -> str:
    """Of all files of a model, which is named by its first one. Raises InvalidArgument."""
    split = SPLIT_NAME.fullmatch(path)
    if split is None:
        return file_digest(path)
    prefix, _, count = split.groups()
    files = [f"{prefix}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]
    return hashlib.blake2b("".join(map(file_digest, files)).encode(), digest_size=32).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Of every byte of a file; see above. Raises InvalidArgument where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            identity = (
                f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
            )
            known = _known_digests()
            if identity not in known:
                known[identity] = digest_of_bytes(Path(f"/proc/self/fd/{file.fileno()}")).hex()
                _keep({**_known_digests(), identity: known[identity]})
            return known[identity]
    except OSError as error:
        raise InvalidArgument(
            f"{os.fspath(path)} cannot be read for its digest: {error}; give weights= instead"
        ) from error


def _digests_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "blockkv" / "model-digests.json"


def _known_digests() -> dict[str, str]:
    try:
        found = json.loads(_digests_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(digests: dict[str, str]) -> None:
    """Write them where the next process finds them; where that is not possible it computes them again."""
    path = _digests_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(digests, file)
        Path(file.name).replace(path)
