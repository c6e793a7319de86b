"""The declarative mesh."""

from __future__ import annotations

import pytest

from lightning_verl.strategies.mesh import AXES, DeviceMesh


def test_sizes_and_equation() -> None:
    mesh = DeviceMesh((2, 3, 1, 1), mesh_dim_names=AXES, device_type="cpu")
    assert (mesh.size, mesh.axis("data"), mesh.axis("tensor")) == (6, 2, 3)
    assert mesh.equation() == "2 x 3 x 1 x 1 = 6"


def test_a_shape_is_accepted_wherever_a_mesh_is() -> None:
    mesh = DeviceMesh((4, 1, 1, 1))
    assert DeviceMesh.of([4, 1, 1, 1]) == mesh
    assert DeviceMesh.of(mesh) is mesh


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1, 0), (2, 2, 1, 1, 1), (2.0, 1, 1, 1)])
def test_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"whole numbers of at least 1.*data.*tensor.*write \(4, 1, 1, 1\)"):
        DeviceMesh(shape)  # type: ignore[arg-type]


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the axes are"):
        DeviceMesh((1, 1, 1, 1), mesh_dim_names=("dp", "tp", "pp", "ep"))


def test_every_axis_may_be_larger_than_one() -> None:
    mesh = DeviceMesh((2, 3, 4, 5))
    assert [mesh.axis(name) for name in mesh.mesh_dim_names] == [2, 3, 4, 5]
    assert mesh.size == 120
