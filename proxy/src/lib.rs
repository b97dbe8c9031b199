//! Placeholder while the proxy is written.
