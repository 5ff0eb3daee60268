"""Weights in host memory, for the oracle and for sources that no file has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from om_models.spec import ModelSpec
from om_models.weights import Array, WeightSource, expected_shapes
from runtime_cache.errors import ConversionError


class MemorySource:
    """A `WeightSource` of arrays."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Array], label: str = "memory"
    ) -> None:
        self.spec = spec
        self.label = label
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Array:
        """One tensor, as it was given."""
        if name not in self._tensors:
            raise ConversionError(f"{self.label} has no tensor {name}")
        return self._tensors[name]

    def row_blocks(self, name: str) -> Iterator[Array]:
        """Its rows in two blocks."""
        return iter(np.array_split(self.get(name), 2))


def load_all(source: WeightSource) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the model as float32."""
    return {name: source.get(name).astype(np.float32) for name in expected_shapes(source.spec)}
