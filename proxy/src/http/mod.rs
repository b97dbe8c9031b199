//! What both versions of HTTP share: the view of a request, changes of heads, the part of a body that
//! is kept for another attempt, what a response says about its endpoint, and the replies that the
//! proxy makes itself.

pub mod edits;
pub mod replay;
pub mod reply;
pub mod verdict;
pub mod view;
