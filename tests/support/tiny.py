"""Tiny models of every family with seeded random weights, made on the fly: checkpoints and bundles.

`RandomState` is used because numpy promises that its streams never change: a seed is a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from om_models.bundle import Bundle
from om_models.convert import convert
from om_models.families import FAMILIES
from om_models.null_model import byte_level_library
from om_models.plan import ConvertOptions, Plan
from om_models.reference import ReferenceLlama
from om_models.spec import ModelSpec, RopeScaling
from om_models.weights import WeightSource, expected_shapes
from tests.support.weights import MemorySource, load_all

BYTE_VOCAB = 256
BOS, EOS = 256, 257

#: Two layers, two query heads a key-value head, byte-level vocabulary; 128 bytes of KV a layer.
BASE_SPEC = ModelSpec(
    vocab_size=BYTE_VOCAB + 2,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_position=512,
    tie_embeddings=True,
)


TINY_OPTIONS = ConvertOptions(
    target="sim",
    kv_tokens=1024,
    gears="prefill=8,32@32,128 decode=1,2,4@32,128",
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """The base spec with some fields changed."""
    return msgspec.structs.replace(BASE_SPEC, **changes)


#: A model of each further family, with what is its own.
FAMILY_SPECS = {
    "mistral": tiny_spec(family="mistral", head_dim=16, tie_embeddings=False),
    "qwen2": tiny_spec(family="qwen2", qkv_bias=True, num_kv_heads=1, rms_eps=1e-6, rope_theta=1e6),
    "qwen3": tiny_spec(family="qwen3", qk_norm=True, head_dim=16, rms_eps=1e-6, rope_theta=1e6),
}


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Weights large enough that logits differ clearly: variance 1 / inputs, norms about 1."""
    random = np.random.RandomState(seed)
    return {name: _random_tensor(random, shape) for name, shape in expected_shapes(spec).items()}


def tiny_source(spec: ModelSpec = BASE_SPEC, seed: int = 0) -> MemorySource:
    """The same weights as a `WeightSource`."""
    return MemorySource(spec, random_weights(spec, seed), label=f"tiny-{seed}")


def assert_same_weights(source: WeightSource, seed: int = 0) -> None:
    """The source gives exactly the weights of the seed, in canonical order."""
    expected = random_weights(source.spec, seed)
    loaded = load_all(source)
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def tiny_reference(spec: ModelSpec = BASE_SPEC, seed: int = 0) -> ReferenceLlama:
    """The oracle over the same weights."""
    return ReferenceLlama(spec, random_weights(spec, seed))


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """`config.json` of a spec, in the older form (`rope_theta` beside `rope_scaling`)."""
    return {
        "architectures": [FAMILIES[spec.family].architecture],
        "model_type": spec.family,
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": _rope_scaling(spec.rope_scaling),
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **_window(spec),
    }


def _window(spec: ModelSpec) -> dict[str, Any]:
    """As published: Mistral's number alone tells; Qwen's stands there even if switched off."""
    match spec.family:
        case "llama":
            return {}
        case "mistral":
            return {"sliding_window": spec.sliding_window}
    return {
        "use_sliding_window": spec.sliding_window is not None,
        "sliding_window": spec.sliding_window or spec.max_position,
        "max_window_layers": 0,
    }


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
        fields["original_max_position_embeddings"] = scaling.original_max_position
    return fields


def write_checkpoint(
    directory: Path, spec: ModelSpec = BASE_SPEC, *, seed: int = 0, num_shards: int = 1
) -> Path:
    """A Hugging Face directory: config, safetensors (float32), a byte-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(spec)), "utf-8")
    _write_shards(directory, random_weights(spec, seed), num_shards)
    write_tokenizer(directory)
    return directory


def make_bundle(
    directory: Path,
    spec: ModelSpec = BASE_SPEC,
    *,
    seed: int = 0,
    options: ConvertOptions | None = None,
) -> Bundle:
    """A bundle for the software device, compiled by its own ATC; takes about two seconds.

    Without options: 1024 KV tokens, context 128, few gears.
    """
    checkpoint = write_checkpoint(directory / "checkpoint", spec, seed=seed)
    return convert(str(checkpoint), directory / "bundle", options or TINY_OPTIONS, Silent())


class Silent:
    """A reporter that says nothing."""

    def planned(self, plan: Plan, spec_name: str) -> None:
        """Nothing."""

    def stage(self, title: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int) -> None:
        """Nothing."""


def write_tokenizer(directory: Path) -> None:
    """One token a byte (ids 0..255), `<s>` 256, `</s>` 257."""
    tokenizer = byte_level_library(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _random_tensor(
    random: np.random.RandomState, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    values = random.standard_normal(shape)
    scaled = 1 + 0.1 * values if len(shape) == 1 else values / np.sqrt(shape[-1])
    return scaled.astype(np.float32)


def _write_shards(
    directory: Path, weights: dict[str, npt.NDArray[np.float32]], num_shards: int
) -> None:
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {key: names[i % num_shards] for i, key in enumerate(weights)}
    for name in names:
        save_file({k: weights[k] for k in weights if weight_map[k] == name}, directory / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
