//! Placeholder while the proxy is written.

fn main() {}
