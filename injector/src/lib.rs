//! Placeholder while the injector is written.
