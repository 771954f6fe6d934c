"""Mesh simplification for low-resolution images."""

from typing import Any

import numpy as np

CELL_M = 0.004
"""Edge length of a cube within which vertices are merged; a pixel of a 64 px image covers 10 mm of the table."""


def lighten(model: Any, cell_m: float = CELL_M) -> None:
    """Merge the vertices of each mesh of a MuJoCo ``model`` within cubes of ``cell_m`` metres (Rossignac and Borrel 1993).

    Array sizes do not change, but fewer triangles are used. Use the model only for images; call before creating its GL context.
    """
    for mesh in range(model.nmesh):
        start, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
        first, num_faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        vertices = model.mesh_vert[start : start + count]
        faces = model.mesh_face[first : first + num_faces]
        new_vertices, new_faces = clustered(vertices, faces, cell_m)
        if not len(new_faces) or len(new_faces) > model.mesh_normalnum[mesh]:
            continue
        vertices[: len(new_vertices)] = new_vertices
        faces[: len(new_faces)] = new_faces
        corners = new_vertices[new_faces]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        start = model.mesh_normaladr[mesh]
        model.mesh_normal[start : start + len(normals)] = normals
        model.mesh_facenormal[first : first + len(new_faces)] = np.arange(len(new_faces))[:, None]
        model.mesh_facenum[mesh] = len(new_faces)


def clustered(vertices: np.ndarray, faces: np.ndarray, cell_m: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean vertex ``[V', 3]`` of each occupied cube, and the remaining triangles ``[F', 3]``."""
    cells = np.floor((vertices - vertices.min(0)) / cell_m).astype(np.int64)
    _, labels, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    labels = labels.ravel()
    means = np.stack([np.bincount(labels, vertices[:, axis]) for axis in range(3)], axis=1) / counts[:, None]
    merged = labels[faces]
    merged = merged[(merged != np.roll(merged, 1, axis=1)).all(1)]
    # Start each triangle with its smallest index, keeping its orientation, so that `unique` finds repeated ones.
    merged = np.take_along_axis(merged, (merged.argmin(1)[:, None] + np.arange(3)) % 3, axis=1)
    return means, np.unique(merged, axis=0)
