//! Placeholder while the injector is written.

fn main() {}
