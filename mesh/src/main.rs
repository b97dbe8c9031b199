//! Placeholder while the mesh is written.

fn main() {}
