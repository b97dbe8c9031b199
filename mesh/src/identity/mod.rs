//! The certificate status of a mesh: reading it from all controller replicas (`source`), merging it
//! (`status`), and requesting a root rotation (`request`).

pub mod request;
pub mod source;
pub mod status;
