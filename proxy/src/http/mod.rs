//! Code that both versions of HTTP share. It has the view of a request, changes of heads, and the
//! part of a body that is kept for another attempt. It also has the verdict of a response on its
//! endpoint, the status of a gRPC call, the discarded rest of a response, and the replies of the
//! proxy itself.

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
