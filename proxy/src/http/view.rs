//! A request as authorization and routing see it, in either version of HTTP, without a copy.

#[cfg(test)]
pub(crate) mod testing;

use diy_mesh_http2::Request;
use diy_mesh_proto::authorization;
use diy_mesh_proto::field::is_of_mesh;
use http::{HeaderMap, HeaderName, Version};

/// The fields of a head, or of trailers, in either version of HTTP.
pub trait Fields {
    /// Calls `each` with the name and value of every field, in order.
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8]));

    /// The value of the first field with this name, compared without case.
    fn field(&self, name: &str) -> Option<&[u8]> {
        let mut found = None;
        self.visit(&mut |field, value| {
            if found.is_none() && field.eq_ignore_ascii_case(name.as_bytes()) {
                found = Some(value);
            }
        });
        found
    }
}

/// A request's head in either version of HTTP. Fields that only some requests need are found on
/// demand.
pub trait Head: Fields {
    /// The host that the request names, and the port if there is one: of the target, of
    /// `:authority`, or of Host.
    fn authority(&self) -> Option<&[u8]>;

    /// Calls `each` with the name and value of every field that goes to the next hop.
    fn visit_forwarded<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.visit(each);
    }
}

impl Fields for HeaderMap {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.iter()
            .for_each(|(name, value)| each(name.as_str().as_bytes(), value.as_bytes()));
    }

    fn field(&self, name: &str) -> Option<&[u8]> {
        let is_named = |(field, _): &(&HeaderName, _)| field.as_str().eq_ignore_ascii_case(name);
        self.iter()
            .find(is_named)
            .map(|(_, value)| value.as_bytes())
    }
}

impl Fields for diy_mesh_http2::Fields {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.iter().for_each(|(name, value)| each(name, value));
    }

    fn field(&self, name: &str) -> Option<&[u8]> {
        let is_named = |(field, _): &(&[u8], _)| field.eq_ignore_ascii_case(name.as_bytes());
        self.iter().find(is_named).map(|(_, value)| value)
    }
}

impl Fields for Request {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.fields.visit(each);
    }

    fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields.field(name)
    }
}

impl Head for Request {
    fn authority(&self) -> Option<&[u8]> {
        Request::authority(self).or_else(|| self.fields.get("host"))
    }
}

/// A request's head.
#[derive(Clone, Copy)]
pub struct RequestView<'a> {
    /// GET, POST, ...
    pub method: &'a [u8],
    /// The target as it was sent; in HTTP/2 the path with the query.
    pub target: &'a [u8],
    /// The rest of the head.
    pub head: &'a dyn Head,
    /// HTTP/1.0, HTTP/1.1 or HTTP/2.
    pub version: Version,
    /// It asks for another protocol on this connection, or in this stream.
    pub upgrade: bool,
}

impl<'a> RequestView<'a> {
    /// The path, without the query. Empty for CONNECT.
    pub fn path(&self) -> &'a [u8] {
        let target = self.path_and_query();
        &target[..target
            .iter()
            .position(|byte| *byte == b'?')
            .unwrap_or(target.len())]
    }

    /// The query, without the question mark.
    pub fn query(&self) -> Option<&'a [u8]> {
        let target = self.path_and_query();
        target
            .iter()
            .position(|byte| *byte == b'?')
            .map(|at| &target[at + 1..])
    }

    /// The host that the request names, and the port if there is one.
    pub fn authority(&self) -> Option<&'a [u8]> {
        self.head.authority()
    }

    /// The value of the first field with this name, compared without case.
    pub fn header(&self, name: &str) -> Option<&'a [u8]> {
        self.head.field(name)
    }

    /// The value of the first cookie with this name (RFC 6265, section 4.2.1).
    pub fn cookie(&self, name: &str) -> Option<&'a [u8]> {
        let mut found = None;
        self.head.visit(&mut |field, value| {
            if found.is_none() && field.eq_ignore_ascii_case(b"cookie") {
                let pairs = value.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
                let mut values = pairs.filter_map(|pair| pair.strip_prefix(name.as_bytes()));
                found = values.find_map(|value| value.strip_prefix(b"="));
            }
        });
        found
    }

    /// Sending it twice has the effect of sending it once (RFC 9110, section 9.2.2).
    pub fn is_idempotent(&self) -> bool {
        matches!(
            self.method,
            b"GET" | b"HEAD" | b"OPTIONS" | b"TRACE" | b"PUT" | b"DELETE"
        )
    }

    /// The client may wait for 100 (Continue) before it sends the body (RFC 9110, section 10.1.1).
    pub fn expects_continue(&self) -> bool {
        let expected = self.header("expect");
        self.version != Version::HTTP_10
            && expected.is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue"))
    }

    /// It is a gRPC call.
    pub fn is_grpc(&self) -> bool {
        self.version == Version::HTTP_2
            && self.method == b"POST"
            && self.header("content-type").is_some_and(is_grpc_type)
    }

    /// It asks for a tunnel whose bytes are not inspected. Methods are case-sensitive (RFC 9110,
    /// section 9.1), but not for every server.
    pub fn is_connect(&self) -> bool {
        self.method.eq_ignore_ascii_case(b"CONNECT") && !self.upgrade
    }

    /// The path with the query, as they were sent. Empty for CONNECT.
    pub fn path_and_query(&self) -> &'a [u8] {
        match memchr::memmem::find(self.target, b"://") {
            _ if self.is_connect() => b"",
            Some(scheme) if !self.target.starts_with(b"/") => {
                let rest = &self.target[scheme + 3..];
                let path = rest
                    .iter()
                    .position(|byte| b"/?".contains(byte))
                    .unwrap_or(rest.len());
                &rest[path..]
            }
            _ => self.target,
        }
    }
}

/// Whether this is the content type of gRPC calls.
pub fn is_grpc_type(kind: &[u8]) -> bool {
    kind.strip_prefix(b"application/grpc")
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Without the fields of the mesh: the application does not get these fields from the client.
impl authorization::Request for RequestView<'_> {
    fn method(&self) -> &[u8] {
        self.method
    }

    fn path(&self) -> &[u8] {
        RequestView::path(self)
    }

    fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
        self.authority().into_iter().for_each(&mut *each);
        self.head.visit(&mut |name, value| {
            if name.eq_ignore_ascii_case(b"host") {
                each(value);
            }
        });
    }

    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        self.head.visit_forwarded(&mut |name, value| {
            if !is_of_mesh(name) {
                each(name, value);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::testing::request;
    use super::*;
    use crate::serve::http1::head::RequestHead;

    #[test]
    fn path_and_query_are_found_in_every_form_of_a_target() {
        for (method, target, path, query) in [
            ("GET", "/a/b?c=/d?e", "/a/b", Some("c=/d?e")),
            ("GET", "/", "/", None),
            ("GET", "/a?u=http://b/", "/a", Some("u=http://b/")),
            ("GET", "http://host:1/a?b", "/a", Some("b")),
            ("GET", "http://host?b", "", Some("b")),
            ("OPTIONS", "*", "*", None),
            ("CONNECT", "host:1", "", None),
        ] {
            let view = request(method, target);
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(text(view.path()), path, "{target}");
            assert_eq!(view.query().map(text).as_deref(), query, "{target}");
        }
    }

    #[test]
    fn fields_and_authority_are_found() {
        let head = |uri: &str| {
            let builder = http::Request::get(uri)
                .header("x-a", "1")
                .header("x-a", "2");
            let request = builder.header("host", "named").body(());
            Request::from(&request.expect("a request").into_parts().0)
        };
        let (origin, absolute) = (head("/"), head("http://target:1/"));
        let view = RequestView {
            head: &origin,
            ..request("GET", "/")
        };
        assert_eq!(view.header("X-A"), Some(&b"1"[..]));
        assert_eq!(view.header("x-b"), None);
        assert_eq!(view.authority(), Some(&b"named"[..]));
        let view = RequestView {
            head: &absolute,
            ..view
        };
        assert_eq!(view.authority(), Some(&b"target:1"[..]));
    }

    #[test]
    fn policies_see_all_hosts_and_no_field_that_the_application_does_not_get() {
        use diy_mesh_proto::authorization::Request as _;
        let raw = "GET http://a/b?c HTTP/1.1\r\nHost: A\r\nX_Called_By: forged\r\nX-One: 1\r\n\
             X-Two: 2\r\nConnection: x-two\r\nx-one: 3\r\n\r\n";
        let head = RequestHead::parse(raw.into()).expect("a request");
        let view = head.view();
        let mut seen = Vec::new();
        let mut see = |bytes: &[u8]| seen.push(String::from_utf8_lossy(bytes).into_owned());
        view.hosts(&mut see);
        see(authorization::Request::path(&view));
        view.fields(&mut |name, value| {
            see(name);
            see(value);
        });
        let expected = ["a", "A", "/b", "Host", "A", "X-One", "1", "x-one", "3"];
        assert_eq!(seen, expected);
    }

    #[test]
    fn cookies_are_found_in_all_fields_by_their_whole_name() {
        let head = http::Request::get("/")
            .header("cookie", "sid=1; user=a=b;last=")
            .header("Cookie", "other=\"x\"; sid=2");
        let head = Request::from(&head.body(()).expect("a request").into_parts().0);
        let view = RequestView {
            head: &head,
            ..request("GET", "/")
        };
        let cookie = |name| view.cookie(name).map(String::from_utf8_lossy);
        for (name, expected) in [
            ("sid", Some("1")),
            ("user", Some("a=b")),
            ("last", Some("")),
            ("other", Some("\"x\"")),
            ("SID", None),
            ("si", None),
        ] {
            assert_eq!(cookie(name).as_deref(), expected, "{name}");
        }
    }
}
