//! gRPC calls of the proxy's own: one message, and one message in answer. Pure.

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, HeaderValue, Request, StatusCode, Version};
use prost::Message;

use crate::http::answer::Answer;

/// The flag and the length before a message.
pub const PREFIX_BYTES: usize = 5;

/// A call with this message to the backend "NAMESPACE/SERVICE:PORT". `None` without a valid name.
pub fn request(backend: &str, path: &str, message: &impl Message) -> Option<Request<Bytes>> {
    let mut request = Request::post(uri(backend, path))
        .body(framed(message))
        .ok()?;
    *request.version_mut() = Version::HTTP_2;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(TE, HeaderValue::from_static("trailers"));
    Some(request)
}

/// "http://SERVICE.NAMESPACE:PORT/...".
fn uri(backend: &str, path: &str) -> String {
    let (namespace, service) = backend.split_once('/').unwrap_or_default();
    let (service, port) = service.split_once(':').unwrap_or_default();
    format!("http://{service}.{namespace}:{port}{path}")
}

/// A message as gRPC sends it, not compressed.
pub fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// The encoded message of a call that has succeeded.
pub fn message(answer: &Answer) -> Result<&[u8], String> {
    if answer.status != StatusCode::OK {
        return Err(format!("it responded with {}", answer.status));
    }
    match status(answer.whole()?) {
        Some("0") => {}
        Some(status) => return Err(format!("its call failed with the gRPC status {status}")),
        None => return Err("its call has no gRPC status".to_owned()),
    }
    let invalid = || "its answer is not one message".to_owned();
    let split = answer.body.split_at_checked(PREFIX_BYTES);
    let (prefix, message) = split.ok_or_else(invalid)?;
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    // Not compressed, and one message.
    if prefix[0] != 0 || prefix[1..] != length.to_be_bytes() {
        return Err(invalid());
    }
    Ok(message)
}

fn status(fields: &HeaderMap) -> Option<&str> {
    fields.get("grpc-status")?.to_str().ok()
}
