"""A model that does nothing: the contract of a Llama, no weights, hardly any arithmetic.

Served like any other, it shows what the host costs per step. One layer with 128 bytes of KV a
token; the logits are a fixed function of the last token and its position, so that answers are
reproducible without being constant.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from om_models.contract import GraphContract
from om_models.graph import GraphOptions, Progress
from om_models.onnx_writer import ONNX_DTYPES, OnnxWriter, open_onnx
from om_models.spec import ModelSpec
from om_models.tokenizer import TokenizerSource

END_TOKEN = "</s>"
NUM_BYTE_TOKENS = 256

NULL_SPEC = ModelSpec(
    vocab_size=NUM_BYTE_TOKENS + 1,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_position=1 << 17,
    tie_embeddings=True,
)
#: Stands for the weights in the bundle's digest; to be changed with the arithmetic below.
NULL_DIGEST = hashlib.sha256(b"rtcache null model 1").hexdigest()


def write_null_model(options: GraphOptions, onnx_path: Path, progress: Progress) -> str:
    """Write the graph; same inputs and outputs as `graph.write_llama`, float32 only.

    Returns:
        The digest that stands for the weights.
    """
    with open_onnx(onnx_path) as writer:
        _emit(writer, options)
    progress(1, 1)
    return NULL_DIGEST


def null_tokenizer() -> TokenizerSource:
    """One token a byte (ids 0..255), and the end token."""
    library = byte_level_library([END_TOKEN])
    return TokenizerSource(
        library=library,
        bos_token_id=None,
        eos_token_ids=(NUM_BYTE_TOKENS,),
        chat_template=None,
    )


def byte_level_library(special_tokens: list[str]) -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges; the special tokens come after the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(special_tokens)
    return library


def _emit(w: OnnxWriter, options: GraphOptions) -> None:
    contract = GraphContract(options.kv, options.index_dtype, NULL_SPEC.vocab_size)
    w.inputs(contract.inputs)
    w.outputs([_logits(w, options), _new_kv(w, options.kv.row_elements)], contract.outputs)


def _logits(w: OnnxWriter, options: GraphOptions) -> str:
    """cos((token · a + position · b + nothing) · (candidate + 1)) [B, vocab]."""
    token = w.op("Mul", _at_last(w, "input_ids"), w.constant(np.array([[0.7548777]], np.float32)))
    position = w.op(
        "Mul", _at_last(w, "position_ids"), w.constant(np.array([[0.5698403]], np.float32))
    )
    seed = w.op("Add", token, position)
    seed = w.op("Add", seed, _nothing(w, np.dtype(options.index_dtype)))
    candidates = np.arange(1, NULL_SPEC.vocab_size + 1, dtype=np.float32)
    return w.op("Cos", w.op("Mul", seed, w.constant(candidates[None, :])))


def _at_last(w: OnnxWriter, ids: str) -> str:
    """What stands at each row's asked position, float32 [B, 1]."""
    flat = w.op("Reshape", ids, w.ints(-1, 1))
    return w.op("Cast", w.op("Gather", flat, "last", axis=0), to=ONNX_DTYPES["float32"])


def _nothing(w: OnnxWriter, index_dtype: np.dtype[np.int32] | np.dtype[np.int64]) -> str:
    """Zeros [B, 1] that depend on the past: a compiler must not drop inputs as unused."""
    zero = w.constant(np.zeros((1,), index_dtype))
    first_past = w.op("Gather", "past_rows", zero, axis=1)  # [B, 1]
    null_row = w.op("Mul", first_past, zero)
    from_pool = w.op("Gather", "kv_pool_0", null_row, axis=0)  # [B, 1, row], the null block's zeros
    from_pool = w.op("ReduceMean", from_pool, axes=[2], keepdims=0)
    visible = w.op("Gather", "mask", zero, axis=3)  # [B, 1, S, 1]
    visible = w.op("ReduceMean", visible, axes=[2, 3], keepdims=0)
    from_mask = w.op("Mul", visible, w.constant(np.zeros((1,), np.float32)))
    return w.op("Add", from_pool, from_mask)


def _new_kv(w: OnnxWriter, row_elements: int) -> str:
    """The token id in every element [B, S, 2, row]."""
    ids = w.op("Cast", w.op("Reshape", "input_ids", w.ints(0, -1, 1, 1)), to=ONNX_DTYPES["float32"])
    return w.op("Mul", ids, w.constant(np.ones((1, 1, 2, row_elements), np.float32)))
