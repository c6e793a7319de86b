"""The declarative 4-D mesh: which axes there are and how many ranks each has.

===========  ==========================================================================
axis         who uses it
===========  ==========================================================================
data         every role: each coordinate holds its own rows; FSDP2 cuts parameters over it
tensor       every model role: the ranks of one coordinate share rows and cut matrices
pipeline     every model role: the ranks of one coordinate of the others share rows and
             hold consecutive layers
expert       models with experts: the ranks of one coordinate of the others divide them
             and send each other tokens; each holds its own rows, as on the data axis
===========  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("data", "tensor", "pipeline", "expert")


@dataclass(frozen=True)
class DeviceMesh:
    """A mesh before it exists: ranks an axis, in the order of ``AXES``. A plain tuple is accepted wherever one is.

    Raises:
        ValueError: The shape has not one positive whole number for each of the four axes, or other names are given.
    """

    mesh_shape: tuple[int, int, int, int]
    """Ranks of the axes (data, tensor, pipeline, expert)."""
    mesh_dim_names: tuple[str, ...] = AXES
    """The names of the axes; they are fixed and may be given for clarity."""
    device_type: str | None = None
    """"cpu" or "cuda"; None takes the accelerator of Fabric."""

    def __post_init__(self) -> None:
        shape = tuple(self.mesh_shape)
        if len(shape) != len(AXES) or any(not isinstance(size, int) or size < 1 for size in shape):
            raise ValueError(
                f"DeviceMesh got mesh_shape={shape}; it takes {len(AXES)} whole numbers of at least 1, one for each of "
                f"{AXES}. For 4 ranks of data parallelism write (4, 1, 1, 1)."
            )
        if tuple(self.mesh_dim_names) != AXES:
            raise ValueError(f"DeviceMesh got mesh_dim_names={tuple(self.mesh_dim_names)}; the axes are {AXES}.")
        object.__setattr__(self, "mesh_shape", shape)

    @classmethod
    def of(cls, mesh: DeviceMesh | Sequence[int]) -> DeviceMesh:
        """Return ``mesh`` itself, or the mesh of a plain shape."""
        return mesh if isinstance(mesh, DeviceMesh) else cls(tuple(mesh))  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Ranks of one whole mesh."""
        return math.prod(self.mesh_shape)

    def axis(self, name: str) -> int:
        """Ranks of the named axis."""
        return self.mesh_shape[AXES.index(name)]

    def equation(self) -> str:
        """The product of the shape, written out, such as ``2 x 2 x 1 x 1 = 4``."""
        return f"{' x '.join(map(str, self.mesh_shape))} = {self.size}"
