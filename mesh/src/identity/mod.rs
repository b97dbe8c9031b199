//! The certificate status of a mesh: merging that of all controller replicas (`status`), and
//! requesting a root rotation (`request`).

pub mod request;
pub mod status;
