//! Traces of requests: `traceparent` and the b3 fields.

use diy_mesh_proxy::http::trace_context::SpanContext;
use diy_mesh_proxy::http::view::RequestView;
use http::{HeaderName, HeaderValue, Request, Version};

/// Lines of header fields. A span that the proxy reads is one that it can write.
pub fn trace(bytes: &[u8]) {
    let mut request = Request::get("/").body(()).expect("a request");
    // More lines than fields that matter, and fewer than a map rejects.
    for line in bytes.split(|byte| *byte == b'\n').take(100) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        else {
            continue;
        };
        request.headers_mut().append(name, value);
    }
    let head = diy_mesh_http2::Request::from(&request.into_parts().0);
    let view = RequestView {
        method: b"GET",
        target: b"/",
        head: &head,
        version: Version::HTTP_11,
        upgrade: false,
    };
    let Some(span) = SpanContext::of(&view) else {
        return;
    };
    assert!(span.trace != [0; 16] && span.span != [0; 8], "{span:?}");
    let written = SpanContext::parse(span.traceparent().as_bytes()).expect("a valid value");
    assert_eq!((written.trace, written.span), (span.trace, span.span));
    assert_eq!(written.sampled, Some(span.sampled == Some(true)));
    assert_eq!(span.trace_id().len(), 32);
}
