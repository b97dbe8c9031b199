//! Placeholder while the mesh is written.
