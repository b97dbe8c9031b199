//! Responses to gRPC calls: the status in gRPC-Web bodies, and the answers of authorization servers.

use bytes::Bytes;
use diy_mesh_proxy::http::answer::Answer;
use diy_mesh_proxy::http::grpc;
use diy_mesh_proxy::http::grpc_status::GrpcCall;
use diy_mesh_proxy::http::view::RequestView;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Version};

/// The first byte selects the form of the body and the length of its pieces, the rest is the body.
pub fn grpc(bytes: &[u8]) {
    let Some((form, body)) = bytes.split_first() else {
        return;
    };
    let kind = if form & 1 == 0 {
        "application/grpc-web+proto"
    } else {
        "application/grpc-web-text"
    };
    let whole = status(kind, body, usize::MAX);
    let piece = 1 + usize::from(form >> 1);
    assert_eq!(status(kind, body, piece), whole, "in pieces of {piece}");
    answer(body);
}

/// The status depends on the body only, and not on the pieces in which it arrives.
fn status(kind: &str, body: &[u8], piece: usize) -> &'static str {
    let request = Request::post("/shop.Cart/Add").header("content-type", kind);
    let head = diy_mesh_http2::Request::from(&request.body(()).expect("a request").into_parts().0);
    let mut call = GrpcCall::of(&RequestView {
        method: b"POST",
        target: b"/shop.Cart/Add",
        head: &head,
        version: Version::HTTP_11,
        upgrade: false,
    });
    let response = Response::builder().header("content-type", kind).body(());
    let response = response.expect("a response").into_parts().0;
    call.response(&response.headers);
    for data in body.chunks(piece) {
        call.body(data);
    }
    call.status()
}

/// An answer is one message, which is written as it was read.
fn answer(body: &[u8]) {
    let status = HeaderValue::from_static("0");
    let response = Answer {
        status: StatusCode::OK,
        fields: Ok([(HeaderName::from_static("grpc-status"), status)]
            .into_iter()
            .collect()),
        body: Bytes::copy_from_slice(body),
        missing: None,
    };
    if let Ok(message) = grpc::message(&response) {
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        assert_eq!(body, [&[0][..], &length, message].concat());
    }
}
