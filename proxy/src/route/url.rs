//! Changes of a request's host and path, and redirects. Pure.

use diy_mesh_proto::mesh::v1::{PathModifier, Redirect, UrlRewrite, path_modifier::Kind};
use http::StatusCode;

use super::Service;
use super::matching::{self, Match};
use crate::error::Failure;
use crate::http::reply::LocalReply;
use crate::http::view::RequestView;

/// The new host of a request.
pub fn host(rewrite: &UrlRewrite) -> Option<&str> {
    Some(&*rewrite.hostname).filter(|host| !host.is_empty())
}

/// The new target, if it changes. A URL keeps its form.
pub fn target(
    rewrite: &UrlRewrite,
    request: &RequestView<'_>,
    selected: &Match,
) -> Option<Vec<u8>> {
    let is_path = request.target.starts_with(b"/");
    let has_path = rewrite.path.is_some() && !request.is_connect() && request.target != b"*";
    let host = host(rewrite);
    if request.is_connect() || (is_path && !has_path) || (!has_path && host.is_none()) {
        return None;
    }
    let path = rewrite.path.as_ref().filter(|_| has_path);
    let target = path_and_query(path, request, selected);
    let Some(scheme) = memchr::memmem::find(request.target, b"://").filter(|_| !is_path) else {
        return has_path.then_some(target);
    };
    let host = match host {
        Some(host) => host.as_bytes(),
        None => request.authority().unwrap_or_default(),
    };
    Some([&request.target[..scheme + 3], host, &target].concat())
}

/// The response of a redirect.
pub fn redirect(
    redirect: &Redirect,
    request: &RequestView<'_>,
    selected: &Match,
    service: &Service<'_>,
) -> Result<LocalReply, Failure> {
    let status = u16::try_from(redirect.status).ok();
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    let location = location(redirect, request, selected, service);
    LocalReply::redirect(status.unwrap_or(StatusCode::FOUND), &location)
}

/// The value of Location: always a whole URL, so that a path such as `//host` names no host. Empty
/// parts stay as in the request.
pub fn location(
    redirect: &Redirect,
    request: &RequestView<'_>,
    selected: &Match,
    service: &Service<'_>,
) -> Vec<u8> {
    let own_address = service.address.ip();
    let host = match (&*redirect.hostname, request.authority().map(without_port)) {
        ("", Some(host)) if !host.is_empty() => host.to_vec(),
        ("", _) if own_address.is_ipv6() => format!("[{own_address}]").into_bytes(),
        ("", _) => own_address.to_string().into_bytes(),
        (host, _) => host.as_bytes().to_vec(),
    };
    let (scheme, port) = match (&*redirect.scheme, redirect.port) {
        ("", 0) => ("http", service.address.port().into()),
        ("", port) => ("http", port),
        (scheme, port) => (scheme, port),
    };
    let port = match (scheme, port) {
        (_, 0) | ("http", 80) | ("https", 443) => String::new(),
        (_, port) => format!(":{port}"),
    };
    let target = path_and_query(redirect.path.as_ref(), request, selected);
    [scheme.as_bytes(), b"://", &host, port.as_bytes(), &target].concat()
}

/// The path and the query after a change of the path.
fn path_and_query(
    change: Option<&PathModifier>,
    request: &RequestView<'_>,
    selected: &Match,
) -> Vec<u8> {
    let path = matching::path(request);
    let mut target = match change.and_then(|change| change.kind.as_ref()) {
        None => path.to_vec(),
        Some(Kind::Full(full)) => full.clone().into_bytes(),
        Some(Kind::Prefix(prefix)) => {
            let rest = selected.prefix_len().and_then(|length| path.get(length..));
            let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
            match [prefix.as_bytes(), rest.unwrap_or_default()].concat() {
                empty if empty.is_empty() => b"/".to_vec(),
                path => path,
            }
        }
    };
    if let Some(query) = request.query() {
        target.push(b'?');
        target.extend_from_slice(query);
    }
    target
}

/// A host without its port.
fn without_port(authority: &[u8]) -> &[u8] {
    let after_address = authority.iter().position(|byte| *byte == b']').unwrap_or(0);
    match memchr::memrchr(b':', &authority[after_address..]) {
        Some(at) => &authority[..after_address + at],
        None => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;
    use crate::route::matching::PathMatch;

    fn modifier(kind: Kind) -> Option<PathModifier> {
        Some(PathModifier { kind: Some(kind) })
    }

    fn prefix(prefix: &str) -> Match {
        Match {
            path: Some(PathMatch::prefix(prefix)),
            ..Match::default()
        }
    }

    #[test]
    fn replaced_prefix_keeps_slashes_and_query() {
        for (target, matched, new, expected) in [
            ("/foo/bar", "/foo", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo", "/xyz/", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz/", "/xyz/bar"),
            ("/foo", "/foo", "/xyz", "/xyz"),
            ("/foo/", "/foo", "/xyz", "/xyz/"),
            ("/foo/bar", "/foo", "", "/bar"),
            ("/foo/", "/foo", "", "/"),
            ("/foo", "/foo", "", "/"),
            ("/foo/", "/foo", "/", "/"),
            ("/foo", "/foo", "/", "/"),
            ("/bar", "/", "/xyz", "/xyz/bar"),
            ("/foo?a=/foo", "/foo", "/xyz", "/xyz?a=/foo"),
            ("/foo//b/../c%2f?", "/foo", "/x", "/x//b/../c%2f?"),
            ("http://h:1/foo/bar?q", "/foo", "/x", "http://h:1/x/bar?q"),
        ] {
            let rewrite = UrlRewrite {
                path: modifier(Kind::Prefix(new.to_owned())),
                ..UrlRewrite::default()
            };
            let mut view = request("GET", target);
            let named = http::Request::get("http://h:1/")
                .body(())
                .unwrap()
                .into_parts()
                .0;
            let named = diy_mesh_http2::Request::from(&named);
            view.head = &named;
            let rewritten = super::target(&rewrite, &view, &prefix(matched)).unwrap();
            assert_eq!(
                String::from_utf8(rewritten).unwrap(),
                expected,
                "{target} {matched} {new}"
            );
        }
    }

    #[test]
    fn rewrites_only_what_it_names() {
        let target = |rewrite: &UrlRewrite, method, target| {
            let at = prefix("/");
            let rewritten = super::target(rewrite, &request(method, target), &at);
            rewritten.map(|target| String::from_utf8(target).unwrap())
        };
        let host = UrlRewrite {
            hostname: "new".into(),
            path: None,
        };
        assert_eq!(target(&host, "GET", "/a"), None);
        assert_eq!(
            target(&host, "GET", "http://old/a?b").as_deref(),
            Some("http://new/a?b")
        );
        let full = UrlRewrite {
            hostname: String::new(),
            path: modifier(Kind::Full("/full".into())),
        };
        assert_eq!(target(&full, "GET", "/a?b=c").as_deref(), Some("/full?b=c"));
        assert_eq!(target(&full, "OPTIONS", "*"), None);
        assert_eq!(target(&full, "CONNECT", "host:1"), None);
        assert_eq!(target(&UrlRewrite::default(), "GET", "http://old/a"), None);
    }

    #[test]
    fn location_follows_the_rules_for_ports() {
        let base = Redirect {
            status: 302,
            ..Redirect::default()
        };
        let https = "https".to_owned();
        let http = "http".to_owned();
        let cases = [
            (base.clone(), 8080, "http://host:8080/a?q"),
            (base.clone(), 80, "http://host/a?q"),
            (
                Redirect {
                    scheme: https.clone(),
                    ..base.clone()
                },
                8080,
                "https://host/a?q",
            ),
            (
                Redirect {
                    scheme: http.clone(),
                    port: 443,
                    ..base.clone()
                },
                80,
                "http://host:443/a?q",
            ),
            (
                Redirect {
                    scheme: https,
                    port: 443,
                    ..base.clone()
                },
                80,
                "https://host/a?q",
            ),
            (
                Redirect {
                    scheme: http,
                    ..base.clone()
                },
                8080,
                "http://host/a?q",
            ),
            (
                Redirect {
                    port: 8443,
                    ..base.clone()
                },
                80,
                "http://host:8443/a?q",
            ),
            (
                Redirect {
                    hostname: "new.example".into(),
                    path: modifier(Kind::Prefix("/b".into())),
                    ..base.clone()
                },
                80,
                "http://new.example/b?q",
            ),
        ];
        for (redirect, port, expected) in cases {
            let head = http::Request::get("http://host:9999/")
                .body(())
                .unwrap()
                .into_parts()
                .0;
            let head = diy_mesh_http2::Request::from(&head);
            let view = RequestView {
                head: &head,
                ..request("GET", "/a?q")
            };
            let service = Service {
                name: "shop/web",
                is_pod: false,
                address: ([10, 96, 0, 7], port).into(),
            };
            let location = location(&redirect, &view, &prefix("/a"), &service);
            assert_eq!(String::from_utf8(location).unwrap(), expected);
        }
        let nameless = request("GET", "//evil/");
        for (address, expected) in [
            ("10.96.0.7:80", "http://10.96.0.7//evil/"),
            ("[fd00::7]:81", "http://[fd00::7]:81//evil/"),
        ] {
            let service = Service {
                name: "shop/web",
                is_pod: false,
                address: address.parse().unwrap(),
            };
            let location = location(&base, &nameless, &prefix("/"), &service);
            assert_eq!(String::from_utf8(location).unwrap(), expected);
        }
        assert_eq!(without_port(b"[::1]:80"), b"[::1]");
        assert_eq!(without_port(b"[::1]"), b"[::1]");
        assert_eq!(without_port(b"a:80"), b"a");
    }
}
