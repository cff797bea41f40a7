"""A model whose weights are arrays, and count how often they are read."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture
from tests.support.tiny_models import random_weights


@dataclass
class MemoryWeight:
    name: str
    values: npt.NDArray[np.float32]
    stored_as: str = "F32"
    num_reads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self) -> npt.NDArray[np.float32]:
        self.num_reads += 1
        return self.values


class MemorySource:
    origin = "memory"

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.weights = {
            name: MemoryWeight(name, values)
            for name, values in random_weights(architecture).items()
        }
