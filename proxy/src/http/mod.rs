//! What both versions of HTTP share: the replies that the proxy makes itself.

pub mod reply;
