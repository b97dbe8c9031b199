//! What both versions of HTTP share: the view of a request, changes of heads, and the replies that
//! the proxy makes itself.

pub mod edits;
pub mod reply;
pub mod view;
