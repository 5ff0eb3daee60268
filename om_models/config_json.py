"""`config.json` of Hugging Face → `ModelSpec`; refuses by name what the graph does not compute."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from om_models.families import KNOWN_ARCHITECTURES, Family, family_of_config
from om_models.spec import ModelSpec, RopeScaling
from runtime_cache.errors import ConversionError

DEFAULT_ROPE_THETA = 10000.0


def read_spec(path: Path) -> ModelSpec:
    """The spec of the checkpoint whose `config.json` lies at `path`.

    Raises:
        ConversionError: the file is missing or no JSON, the architecture is not known, a field is
            missing or has a value that the graph does not compute.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path} does not exist: not a Hugging Face checkpoint") from error
    except ValueError as error:
        raise ConversionError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{path} is not a JSON object")
    try:
        return spec_from_config(config)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error.message}") from error


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Translate the fields. Pure.

    Raises:
        ConversionError: as `read_spec`, without the path.
    """
    family = _family(config)
    _check_arithmetic(config)
    hidden_size, num_heads = (
        _integer(config, "hidden_size"),
        _integer(config, "num_attention_heads"),
    )
    # Other families' classes have defaults of their own for it, so there it has to be said.
    kv_heads_default = num_heads if family.name == "llama" else None
    max_position = _integer(config, "max_position_embeddings")
    rope = _rope_fields(config)
    spec = ModelSpec(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", default=kv_heads_default),
        head_dim=_integer(config, "head_dim", default=family.head_dim or hidden_size // num_heads),
        rms_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(config, rope),
        max_position=max_position,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_scaling=_scaling(rope, max_position),
        family=family.name,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(config, family),
    )
    check_spec(spec)
    return spec


def check_spec(spec: ModelSpec) -> None:
    """Refuse numbers that do not make a model, whatever file they stood in.

    Raises:
        ConversionError: heads do not divide, the head size is odd, or a constant is out of range.
    """
    if spec.num_heads % spec.num_kv_heads:
        raise ConversionError(
            f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key-value heads"
        )
    if spec.head_dim % 2:
        raise ConversionError(f"head_dim {spec.head_dim} is odd; rotary pairs need an even one")
    _check_positive(spec, "rms_eps", "rope_theta")
    if (scaling := spec.rope_scaling) is None:
        return
    _check_positive(scaling, "factor", "low_freq_factor", "high_freq_factor")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low >= high:
        raise ConversionError(f"rope scaling: low_freq_factor {low} is not below high {high}")


def _check_positive(numbers: ModelSpec | RopeScaling, *names: str) -> None:
    for name in names:
        value = getattr(numbers, name)
        if not 0 < value < math.inf:  # NaN is neither
            raise ConversionError(f"{name} is {value}, expected a finite number above 0")


def _family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or [config.get("model_type")]
    if not isinstance(architectures, list):
        raise ConversionError(f"architectures is {architectures!r}, expected a list")
    found = [family_of_config(name) for name in architectures]
    if found[0] is None or any(family is not found[0] for family in found):
        raise ConversionError(
            f"architecture {', '.join(map(str, architectures))} is not known;"
            f" known: {', '.join(KNOWN_ARCHITECTURES)}"
        )
    return found[0]


def _check_arithmetic(config: Mapping[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConversionError(f"hidden_act {activation!r} is not known; known: silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ConversionError(f"{name} is set; projections with biases are not supported")
    if config.get("quantization_config"):
        raise ConversionError("quantised Hugging Face checkpoints are not supported; use a GGUF")


def _sliding_window(config: Mapping[str, Any], family: Family) -> int | None:
    """Tokens that each token attends to, if the layers do not all attend to everything.

    Where some layers have a window and others none (`layer_types` of newer files,
    `max_window_layers` of older ones), the model is taken to have one.
    """
    if family.window_flag is None:
        return None
    types = config.get("layer_types")
    if types is not None:
        _check_layer_types(types)
        slides = "sliding_attention" in types
    else:
        slides = bool(config.get(family.window_flag))
    return _integer(config, "sliding_window") if slides else None


def _check_layer_types(types: object) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise ConversionError(f"layer_types is {types!r}; known in it: {', '.join(known)}")


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConversionError(f"{name} is {value!r}, expected a whole number above 0")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > sys.float_info.max:
        raise ConversionError(f"{name} is {value!r}, expected a finite number")
    return float(value)


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope section: `rope_parameters` of newer files, else `rope_scaling` of older ones."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConversionError(f"the rope section is {rope!r}, expected an object")
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ConversionError(
            f"the rope section has parts of its own for {', '.join(nested)}; only one for all"
            " layers is supported"
        )
    for section in (config, rope):
        if (part := section.get("partial_rotary_factor")) not in (None, 1):
            raise ConversionError(
                f"partial_rotary_factor is {part!r}; only whole heads are rotated here"
            )
    return rope


def _rope_theta(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Where newer files have it, else where older ones do; null counts as absent."""
    for section in (rope, config):
        if section.get("rope_theta") is not None:
            return _number(section, "rope_theta")
    return DEFAULT_ROPE_THETA


def _scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_position=_integer(rope, "original_max_position_embeddings", max_position),
        )
    raise ConversionError(f"rope scaling {kind!r} is not known; known: default, linear, llama3")
