//! Placeholder while the controller is written.

fn main() {}
