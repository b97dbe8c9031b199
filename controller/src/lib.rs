//! Placeholder while the controller is written.
