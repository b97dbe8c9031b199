//! What both versions of HTTP share: the view of a request, changes of heads, the part of a body that
//! is kept for another attempt, what a response says about its endpoint, the status of a gRPC call, the rest of a response that
//! nobody gets, and the replies that the proxy makes itself.

pub mod answer;
pub mod authority;
pub mod credentials;
pub mod discard;
pub mod edits;
pub mod fields;
pub mod grpc;
pub mod grpc_status;
pub mod replay;
pub mod reply;
pub mod request_line;
pub mod trace_context;
pub mod verdict;
pub mod view;
