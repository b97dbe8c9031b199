//! The certificate status of a mesh: merging the status of all controller replicas (`status`), and
//! requesting a root rotation (`request`).

pub mod request;
pub mod status;
