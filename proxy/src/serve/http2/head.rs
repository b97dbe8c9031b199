//! HTTP/2 heads: the checks beyond the protocol's, and the changes for the next hop. The crate
//! `diy-mesh-http2` rejects connection-specific fields, repeated or misplaced pseudo-fields and a wrong
//! Content-Length.

use diy_mesh_http2::Protocol;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, Version};

use crate::error::{Failure, Limit};
use crate::http::authority;
use crate::http::edits::Edits;
use crate::http::view::{RequestView, is_grpc_type};
use crate::limits::deadline::{Deadline, parse_grpc_timeout};
use crate::protocol::{MAX_FIELDS, MAX_SECTION, TooLarge};

/// The time that a gRPC client waits for the end of the call.
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The reason why the request is malformed (RFC 9113), or ambiguous for the next hop.
pub fn malformed(parts: &Parts) -> Option<&'static str> {
    if parts
        .headers
        .get_all(CONTENT_LENGTH)
        .iter()
        .nth(1)
        .is_some()
    {
        return Some("more than one Content-Length");
    }
    let authority = parts.uri.authority();
    let authority = authority.map(|authority| authority.as_str().as_bytes());
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next().map(HeaderValue::as_bytes);
    if hosts.next().is_some() {
        return Some("more than one Host");
    }
    // Neither may be empty (RFC 9113, section 8.3.1).
    let is_host = |named: &[u8]| !named.is_empty() && authority::is_text(named);
    if authority.or(host).is_some_and(|named| !is_host(named)) {
        return Some(":authority or Host is not a host, or has user information");
    }
    let scheme = parts.uri.scheme_str().unwrap_or_default().as_bytes();
    let differs = |(authority, host)| !authority::is_same(scheme, authority, host);
    if authority.zip(host).is_some_and(differs) {
        return Some("Host and :authority differ");
    }
    if parts.method == Method::CONNECT && extended_protocol(parts).is_none() {
        let named = authority.is_some_and(authority::is_host_and_port);
        return (!named).then_some("the :authority of CONNECT is not HOST:PORT");
    }
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    let asterisk = path == "*" && parts.method == Method::OPTIONS;
    (!path.starts_with('/') && !asterisk).then_some(":path does not begin with a slash")
}

/// The request as authorization sees it.
pub fn view(parts: &Parts) -> RequestView<'_> {
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    RequestView {
        method: parts.method.as_str().as_bytes(),
        target: path.as_bytes(),
        head: parts,
        version: Version::HTTP_2,
        upgrade: extended_protocol(parts)
            .is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket")),
    }
}

/// The protocol that an extended CONNECT asks for (RFC 8441, section 4).
pub(super) fn extended_protocol(parts: &Parts) -> Option<&str> {
    parts.extensions.get::<Protocol>().map(Protocol::as_str)
}

/// Prepares the head for the next hop. Fails if the route's path does not fit into a target.
pub fn prepare(parts: &mut Parts, edits: Edits<'_>) -> Result<(), Failure> {
    edits.apply(&mut parts.headers);
    if edits.host.is_some() || edits.target.is_some() {
        let rewritten = rewrite(&parts.uri, edits);
        parts.uri = rewritten.map_err(|_| {
            Failure::BadRequest("the path is invalid or too long after the rewrite of its route")
        })?;
    }
    Ok(())
}

/// Changes `:authority`, if there is one, and `:path`.
fn rewrite(uri: &Uri, edits: Edits<'_>) -> Result<Uri, http::Error> {
    let mut uri = uri.clone().into_parts();
    if let (Some(authority), Some(host)) = (&mut uri.authority, edits.host) {
        *authority = Authority::try_from(host)?;
    }
    if let Some(target) = edits.target {
        uri.path_and_query = Some(PathAndQuery::try_from(target)?);
    }
    Ok(Uri::from_parts(uri)?)
}

/// Whether failures are reported by `grpc-status`. gRPC-Web is plain HTTP.
pub(super) fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE);
    kind.is_some_and(|kind| is_grpc_type(kind.as_bytes()))
}

/// The deadline of the caller of a gRPC call, if it has one.
pub(super) fn deadline(parts: &Parts) -> Deadline {
    let timeout = parts.headers.get(GRPC_TIMEOUT);
    let timeout = timeout.and_then(|timeout| parse_grpc_timeout(timeout.as_bytes()));
    Deadline::after(timeout, Limit::Caller)
}

/// Reduces the `grpc-timeout` of an attempt to the time that is left.
pub(super) fn set_deadline(parts: &mut Parts, deadline: Deadline) {
    if deadline.is_set()
        && let Some(field) = parts.headers.get_mut(GRPC_TIMEOUT)
        && let Some(left) = deadline.grpc_timeout(field.as_bytes())
        && let Ok(left) = HeaderValue::try_from(left)
    {
        *field = left;
    }
}

/// Sets the scheme of a request that is sent with TLS, if it has one.
pub(super) fn set_https(parts: &mut Parts) {
    let mut uri = parts.uri.clone().into_parts();
    if uri.scheme.replace(Scheme::HTTPS).is_some()
        && let Ok(uri) = Uri::from_parts(uri)
    {
        parts.uri = uri;
    }
}

/// The size of a request's head, counted as in RFC 9113, section 6.5.2.
pub fn size(parts: &Parts) -> usize {
    let target = parts
        .uri
        .path_and_query()
        .map_or(0, |target| target.as_str().len());
    target + fields_size(&parts.headers)
}

/// The limit that a request's head exceeds. HTTP/2 clients may divide Cookie into several fields (RFC
/// 9113, section 8.2.3), which count as one.
pub fn too_large(parts: &Parts) -> Option<TooLarge> {
    let crumbs = parts.headers.get_all(COOKIE).iter().skip(1).count();
    if size(parts) > MAX_SECTION {
        Some(TooLarge::Header)
    } else {
        (parts.headers.len() - crumbs > MAX_FIELDS).then_some(TooLarge::Fields)
    }
}

/// The size of header fields, counted likewise.
pub fn fields_size(fields: &HeaderMap) -> usize {
    let field = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + 32;
    fields.iter().map(field).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::edits::MeshField;
    use http::Request;

    fn parts(method: &str, uri: &str, fields: &[(&str, &str)]) -> Parts {
        let request = fields.iter().fold(
            Request::builder().method(method).uri(uri),
            |builder, (name, value)| builder.header(*name, *value),
        );
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn removes_forged_x_called_by() {
        let mut forged = parts(
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
        assert_eq!(forged.headers.len(), 1);
    }

    #[test]
    fn rewrite_that_fits_into_no_target_fails() {
        let long = format!("/{}", "a".repeat(65_535));
        for (target, is_valid) in [("/b?c", true), (&long, false), ("/a b", false)] {
            let mut request = parts("GET", "http://a/a", &[]);
            let edits = Edits {
                target: Some(target.as_bytes()),
                ..Edits::default()
            };
            assert_eq!(prepare(&mut request, edits).is_ok(), is_valid);
            let path = if is_valid { "/b" } else { "/a" };
            assert_eq!(request.uri.path(), path);
        }
    }

    #[test]
    fn rejects_ambiguous_http2_requests() {
        assert_eq!(
            malformed(&parts("GET", "http://a/", &[("host", "A")])),
            None
        );
        assert_eq!(
            malformed(&parts("GET", "http://a/", &[("host", "a:80")])),
            None
        );
        assert_eq!(malformed(&parts("GET", "/", &[("host", "a")])), None);
        assert_eq!(malformed(&parts("GET", "/", &[])), None);
        assert_eq!(malformed(&parts("OPTIONS", "*", &[])), None);
        assert_eq!(malformed(&parts("CONNECT", "a:1", &[])), None);
        let refused = [
            parts("GET", "http://a/", &[("host", "b")]),
            parts("GET", "/", &[("host", "a"), ("host", "a")]),
            parts(
                "POST",
                "/",
                &[("content-length", "1"), ("content-length", "1")],
            ),
            parts("GET", "http://user@a/", &[]),
            parts("GET", "/", &[("host", "user@a")]),
            parts("GET", "/", &[("host", "a/b?c")]),
            parts("GET", "/", &[("host", "a b")]),
            parts("GET", "/", &[("host", "")]),
            parts("GET", "*", &[]),
            parts("CONNECT", "/", &[]),
            parts("CONNECT", "a", &[]),
            parts("GET", "http://a:81/", &[("host", "a")]),
        ];
        for parts in refused {
            assert!(malformed(&parts).is_some(), "{parts:?}");
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
                is_grpc(&parts("POST", "/", &[("content-type", kind)]).headers),
                grpc,
                "{kind}"
            );
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }
}
