"""GGUF files of the tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from om_models.families import FAMILIES
from om_models.rope import inverse_frequencies, scaling_divisors
from om_models.spec import ModelSpec
from om_models.weights import EMBEDDING, FINAL_NORM, LM_HEAD
from tests.support.tiny import BOS, EOS, random_weights

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}


def write_tiny_gguf(
    path: Path,
    spec: ModelSpec,
    *,
    seed: int = 0,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str | None = None,
    tokenizer: str = "default",
    packed: dict[str, npt.NDArray[np.uint8]] | None = None,
    extra: dict[str, npt.NDArray[Any]] | None = None,
    metadata: dict[str, int | float | str] | None = None,
) -> Path:
    """Write weights and metadata; norms stay float32, as llama.cpp keeps them.

    Args:
        quantisation: of all matrices.
        architecture: in place of the family's.
        tokenizer: how a byte-level vocabulary is cut, or `sentencepiece`.
        packed: matrices already quantised, by their Hugging Face names; the others stay float32.
        extra: more tensors, by their GGUF names.
        metadata: more fields, or other values of fields, by their full names.
    """
    writer = gguf.GGUFWriter(path, architecture or FAMILIES[spec.family].gguf or "llama")
    _add_metadata(writer, spec)
    if tokenizer == "sentencepiece":
        _add_sentencepiece(writer)
    else:
        _add_byte_level(writer, tokenizer)
    _add_ends(writer)
    _add_fields(writer, metadata or {})
    for name, tensor in random_weights(spec, seed).items():
        stored = _permuted(name, tensor, spec)
        if packed is not None:
            if name in packed:
                writer.add_tensor(gguf_name(name), packed[name], raw_dtype=quantisation)
            else:
                writer.add_tensor(gguf_name(name), stored)
        elif tensor.ndim == 1 or quantisation == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), stored)
        else:
            rows = gguf.quantize(stored, quantisation)
            writer.add_tensor(gguf_name(name), rows, raw_dtype=quantisation)
    if spec.rope_scaling is not None and spec.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(spec))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _TOP:
        return _TOP[name]
    stem, kind = name.rsplit(".", 1)
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def rope_divisors(spec: ModelSpec) -> npt.NDArray[np.float32]:
    """What llama.cpp stores in place of the Llama 3 parameters."""
    assert spec.rope_scaling is not None
    plain = spec.rope_theta ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    assert not np.allclose(plain, inverse_frequencies(spec))
    return scaling_divisors(spec.rope_scaling, plain).astype(np.float32)


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    if spec.rope_scaling is not None and spec.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope_scaling.factor)


def _add_fields(writer: gguf.GGUFWriter, fields: dict[str, int | float | str]) -> None:
    for name, value in fields.items():
        writer.kv_data[0].pop(name, None)
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def _add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    """The one merge, without which no vocabulary is whole, takes a letter's place."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:-1], "ab"]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*letters, "<s>", "</s>"])
    writer.add_token_types([normal] * len(letters) + [control] * 2)
    writer.add_token_merges(["a b"])


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Bytes, and a few pieces in the places of the last of them."""
    pieces = ["<unk>", "▁", "a", "b", "ab"]
    num_bytes = BOS - len(pieces)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [*pieces, *(f"<0x{byte:02X}>" for byte in range(num_bytes)), "<s>", "</s>"]
    )
    writer.add_token_types(
        [kinds.UNKNOWN, *[kinds.NORMAL] * 4, *[kinds.BYTE] * num_bytes, *[kinds.CONTROL] * 2]
    )
    writer.add_token_scores([0.0, -4.0, -3.0, -3.0, -1.0, *[0.0] * (num_bytes + 2)])


def _add_ends(writer: gguf.GGUFWriter) -> None:
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


def _permuted(
    name: str, tensor: npt.NDArray[np.float32], spec: ModelSpec
) -> npt.NDArray[np.float32]:
    """`LlamaModel.permute` of convert_hf_to_gguf.py, copied in meaning.

    Mistral is converted by the same class, Qwen by one of its own, which permutes nothing.
    """
    if spec.family not in ("llama", "mistral"):
        return tensor
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    for part, num_heads in heads.items():
        if f"{part}.weight" in name:
            rows, columns = tensor.shape
            split = tensor.reshape(num_heads, 2, rows // num_heads // 2, columns)
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows, columns))
    return tensor
