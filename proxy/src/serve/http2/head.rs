//! HTTP/2 heads: the checks beyond the protocol's, and the changes for the next hop. The crate
//! `diy-mesh-http2` rejects connection-specific fields, repeated or misplaced pseudo-fields and a wrong
//! Content-Length.

use diy_mesh_http2::{Fields, Request};
use http::uri::Authority;
use http::{HeaderValue, Method, Version};

use crate::error::{Failure, Limit};
use crate::http::authority;
use crate::http::edits::Edits;
use crate::http::view::{RequestView, is_grpc_type};
use crate::limits::deadline::{Deadline, parse_grpc_timeout};
use crate::protocol::{MAX_FIELDS, MAX_SECTION, TooLarge};

/// The time that a gRPC client waits for the end of the call.
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// The reason why the request is malformed (RFC 9113), or ambiguous for the next hop.
pub fn malformed(head: &Request) -> Option<&'static str> {
    if head.fields.get_all("content-length").nth(1).is_some() {
        return Some("more than one Content-Length");
    }
    let authority = head.authority();
    let mut hosts = head.fields.get_all("host");
    let host = hosts.next();
    if hosts.next().is_some() {
        return Some("more than one Host");
    }
    // Neither may be empty (RFC 9113, section 8.3.1).
    let is_host = |named: &[u8]| !named.is_empty() && authority::is_text(named);
    if authority.or(host).is_some_and(|named| !is_host(named)) {
        return Some(":authority or Host is not a host, or has user information");
    }
    let scheme = head.scheme.as_ref().map_or("", |scheme| scheme.as_str());
    let differs = |(authority, host)| !authority::is_same(scheme.as_bytes(), authority, host);
    if authority.zip(host).is_some_and(differs) {
        return Some("Host and :authority differ");
    }
    if head.method == Method::CONNECT && head.protocol().is_none() {
        let named = authority.is_some_and(authority::is_host_and_port);
        return (!named).then_some("the :authority of CONNECT is not HOST:PORT");
    }
    let path = head.path().unwrap_or_default();
    let asterisk = path == b"*" && head.method == Method::OPTIONS;
    (!path.starts_with(b"/") && !asterisk).then_some(":path does not begin with a slash")
}

/// The request as authorization sees it.
pub fn view(head: &Request) -> RequestView<'_> {
    RequestView {
        method: head.method.as_str().as_bytes(),
        target: head.path().unwrap_or_default(),
        head,
        version: Version::HTTP_2,
        upgrade: head
            .protocol()
            .is_some_and(|protocol| protocol.eq_ignore_ascii_case(b"websocket")),
    }
}

/// Prepares the head for the next hop. Fails if the route's path does not fit into a target.
pub fn prepare(head: &mut Request, edits: Edits<'_>) -> Result<(), Failure> {
    const INVALID: Failure =
        Failure::BadRequest("the path is invalid or too long after the rewrite of its route");
    edits.apply(&mut head.fields);
    if let Some(host) = edits.host
        && head.authority().is_some()
    {
        head.set_authority(&Authority::try_from(host).map_err(|_| INVALID)?);
    }
    match edits.target {
        Some(target) if !head.set_path(target) => Err(INVALID),
        _ => Ok(()),
    }
}

/// Whether failures are reported by `grpc-status`. gRPC-Web is plain HTTP.
pub(super) fn is_grpc(fields: &Fields) -> bool {
    fields.get("content-type").is_some_and(is_grpc_type)
}

/// The deadline of the caller of a gRPC call, if it has one.
pub(super) fn deadline(head: &Request) -> Deadline {
    let timeout = head.fields.get(GRPC_TIMEOUT).and_then(parse_grpc_timeout);
    Deadline::after(timeout, Limit::Caller)
}

/// Reduces the `grpc-timeout` of an attempt to the time that is left.
pub(super) fn set_deadline(head: &mut Request, deadline: Deadline) {
    if deadline.is_set()
        && let Some(field) = head.fields.get(GRPC_TIMEOUT)
        && let Some(left) = deadline.grpc_timeout(field)
        && let Ok(left) = HeaderValue::try_from(left)
    {
        head.fields.replace(GRPC_TIMEOUT, &left);
    }
}

/// The size of a request's head, counted as in RFC 9113, section 6.5.2.
fn size(head: &Request) -> usize {
    head.path().unwrap_or_default().len() + head.fields.size()
}

/// The limit that a request's head exceeds. HTTP/2 clients may divide Cookie into several fields (RFC
/// 9113, section 8.2.3), which count as one.
pub fn too_large(head: &Request) -> Option<TooLarge> {
    let crumbs = head.fields.get_all("cookie").skip(1).count();
    if size(head) > MAX_SECTION {
        Some(TooLarge::Header)
    } else {
        (head.fields.len() - crumbs > MAX_FIELDS).then_some(TooLarge::Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::edits::MeshField;

    fn head(method: &str, uri: &str, fields: &[(&str, &str)]) -> Request {
        let request = fields.iter().fold(
            http::Request::builder().method(method).uri(uri),
            |builder, (name, value)| builder.header(*name, *value),
        );
        Request::from(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn removes_forged_x_called_by() {
        let mut forged = head(
            "GET",
            "http://a/",
            &[
                ("x-called-by", "one"),
                ("x-called-by", "two"),
                ("x.called_by", "four"),
                ("x-other", "3"),
            ],
        );
        let edits = [MeshField("X-Called-By", None)];
        prepare(&mut forged, Edits::of(&edits)).unwrap();
        assert_eq!(forged.fields.len(), 1);
    }

    #[test]
    fn rewrite_that_fits_into_no_target_fails() {
        let long = format!("/{}", "a".repeat(65_535));
        for (target, is_valid) in [("/b?c", true), (&long, false), ("/a b", false)] {
            let mut request = head("GET", "http://a/a", &[]);
            let edits = Edits {
                target: Some(target.as_bytes()),
                ..Edits::default()
            };
            assert_eq!(prepare(&mut request, edits).is_ok(), is_valid);
            let path = if is_valid { "/b?c" } else { "/a" };
            assert_eq!(request.path(), Some(path.as_bytes()));
        }
    }

    #[test]
    fn rejects_ambiguous_http2_requests() {
        assert_eq!(malformed(&head("GET", "http://a/", &[("host", "A")])), None);
        assert_eq!(
            malformed(&head("GET", "http://a/", &[("host", "a:80")])),
            None
        );
        assert_eq!(malformed(&head("GET", "/", &[("host", "a")])), None);
        assert_eq!(malformed(&head("GET", "/", &[])), None);
        assert_eq!(malformed(&head("OPTIONS", "*", &[])), None);
        assert_eq!(malformed(&head("CONNECT", "a:1", &[])), None);
        let refused = [
            head("GET", "http://a/", &[("host", "b")]),
            head("GET", "/", &[("host", "a"), ("host", "a")]),
            head(
                "POST",
                "/",
                &[("content-length", "1"), ("content-length", "1")],
            ),
            head("GET", "http://user@a/", &[]),
            head("GET", "/", &[("host", "user@a")]),
            head("GET", "/", &[("host", "a/b?c")]),
            head("GET", "/", &[("host", "a b")]),
            head("GET", "/", &[("host", "")]),
            head("GET", "*", &[]),
            head("CONNECT", "/", &[]),
            head("CONNECT", "a", &[]),
            head("GET", "http://a:81/", &[("host", "a")]),
        ];
        for head in refused {
            assert!(malformed(&head).is_some(), "{head:?}");
        }
    }

    #[test]
    fn distinguishes_grpc_from_grpc_web() {
        for (kind, grpc) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc;x=y", true),
            ("application/grpc-web", false),
            ("application/grpc-web+proto", false),
            ("text/plain", false),
        ] {
            assert_eq!(
                is_grpc(&head("POST", "/", &[("content-type", kind)]).fields),
                grpc,
                "{kind}"
            );
        }
        assert!(!is_grpc(&Fields::default()));
    }
}
