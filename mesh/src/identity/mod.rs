//! What a mesh says of its certificates: read from every replica of its controller (`source`), understood and put together
//! (`status`), and, to rotate the root, asked for (`request`). The commands `identity`, `rotate-root` and `check` show it.

pub mod request;
pub mod source;
pub mod status;
