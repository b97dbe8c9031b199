//! Placeholder while the proxy-init is written.

fn main() {}
