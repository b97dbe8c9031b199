//! Changes of a request's host and path, and redirects. Pure.

use http::StatusCode;

use super::Service;
use super::matching::{self, Match};
use crate::http::view::RequestView;

/// A change of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathChange {
    /// The new path.
    Full(String),
    /// The new prefix, in place of that which selected the rule.
    Prefix(String),
}

/// A change of a request's host and path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rewrite {
    /// The new host.
    pub host: Option<String>,
    /// The new path. The query stays.
    pub path: Option<PathChange>,
}

/// A redirect. What is None stays as in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// "http" or "https".
    pub scheme: Option<String>,
    /// The new host.
    pub host: Option<String>,
    /// The new path. The query stays.
    pub path: Option<PathChange>,
    /// None: the default port of a new scheme, else that of the Service.
    pub port: Option<u16>,
    /// The status.
    pub status: StatusCode,
}

impl PathChange {
    /// The path after the change.
    fn apply(&self, path: &[u8], selected: &Match) -> Vec<u8> {
        match self {
            Self::Full(full) => full.clone().into_bytes(),
            Self::Prefix(prefix) => {
                let rest = selected
                    .prefix_len()
                    .and_then(|length| path.get(length..))
                    .unwrap_or_default();
                let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
                match [prefix.as_bytes(), rest].concat() {
                    empty if empty.is_empty() => b"/".to_vec(),
                    path => path,
                }
            }
        }
    }

    /// The path and the query after the change.
    fn path_and_query(change: Option<&Self>, request: &RequestView<'_>, at: &Match) -> Vec<u8> {
        let path = matching::path(request);
        let mut target = change.map_or_else(|| path.to_vec(), |change| change.apply(path, at));
        if let Some(query) = request.query() {
            target.push(b'?');
            target.extend_from_slice(query);
        }
        target
    }
}

impl Rewrite {
    /// The new target, if it changes. A URL keeps its form.
    pub fn target(&self, request: &RequestView<'_>, selected: &Match) -> Option<Vec<u8>> {
        let is_path = request.target.starts_with(b"/");
        let has_path = self.path.is_some() && !request.is_connect() && request.target != b"*";
        if request.is_connect() || (is_path && !has_path) || (!has_path && self.host.is_none()) {
            return None;
        }
        let path = self.path.as_ref().filter(|_| has_path);
        let target = PathChange::path_and_query(path, request, selected);
        let Some(scheme) = memchr::memmem::find(request.target, b"://").filter(|_| !is_path) else {
            return has_path.then_some(target);
        };
        let host = match &self.host {
            Some(host) => host.as_bytes(),
            None => request.authority().unwrap_or_default(),
        };
        Some([&request.target[..scheme + 3], host, &target].concat())
    }
}

impl Redirect {
    /// The value of Location: always a whole URL, so that a path such as `//host` names no host.
    pub fn location(
        &self,
        request: &RequestView<'_>,
        selected: &Match,
        service: &Service<'_>,
    ) -> Vec<u8> {
        let scheme = self.scheme.as_deref().unwrap_or("http");
        let own_address = service.address.ip();
        let host = match (&self.host, request.authority().map(without_port)) {
            (Some(host), _) => host.clone().into_bytes(),
            (None, Some(host)) if !host.is_empty() => host.to_vec(),
            _ if own_address.is_ipv6() => format!("[{own_address}]").into_bytes(),
            _ => own_address.to_string().into_bytes(),
        };
        let port = match (self.port, &self.scheme) {
            (Some(port), _) => Some(port),
            (None, Some(_)) => None,
            (None, None) => Some(service.address.port()),
        };
        let is_default = matches!((scheme, port), ("http", Some(80)) | ("https", Some(443)));
        let port = port.filter(|_| !is_default);
        let port = port.map_or_else(String::new, |port| format!(":{port}"));
        let target = PathChange::path_and_query(self.path.as_ref(), request, selected);
        [scheme.as_bytes(), b"://", &host, port.as_bytes(), &target].concat()
    }
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
            let rewrite = Rewrite {
                path: Some(PathChange::Prefix(new.to_owned())),
                host: None,
            };
            let mut view = request("GET", target);
            let named = http::Request::get("http://h:1/")
                .body(())
                .unwrap()
                .into_parts()
                .0;
            view.head = &named;
            let rewritten = rewrite.target(&view, &prefix(matched)).unwrap();
            assert_eq!(
                String::from_utf8(rewritten).unwrap(),
                expected,
                "{target} {matched} {new}"
            );
        }
    }

    #[test]
    fn rewrites_only_what_it_names() {
        let target = |rewrite: &Rewrite, method, target| {
            let at = prefix("/");
            let rewritten = rewrite.target(&request(method, target), &at);
            rewritten.map(|target| String::from_utf8(target).unwrap())
        };
        let host = Rewrite {
            host: Some("new".into()),
            path: None,
        };
        assert_eq!(target(&host, "GET", "/a"), None);
        assert_eq!(
            target(&host, "GET", "http://old/a?b").as_deref(),
            Some("http://new/a?b")
        );
        let full = Rewrite {
            host: None,
            path: Some(PathChange::Full("/full".into())),
        };
        assert_eq!(target(&full, "GET", "/a?b=c").as_deref(), Some("/full?b=c"));
        assert_eq!(target(&full, "OPTIONS", "*"), None);
        assert_eq!(target(&full, "CONNECT", "host:1"), None);
        assert_eq!(target(&Rewrite::default(), "GET", "http://old/a"), None);
    }

    #[test]
    fn location_follows_the_rules_for_ports() {
        let base = Redirect {
            scheme: None,
            host: None,
            path: None,
            port: None,
            status: StatusCode::FOUND,
        };
        let https = Some("https".to_owned());
        let http = Some("http".to_owned());
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
                    port: Some(443),
                    ..base.clone()
                },
                80,
                "http://host:443/a?q",
            ),
            (
                Redirect {
                    scheme: https,
                    port: Some(443),
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
                    port: Some(8443),
                    ..base.clone()
                },
                80,
                "http://host:8443/a?q",
            ),
            (
                Redirect {
                    host: Some("new.example".into()),
                    path: Some(PathChange::Prefix("/b".into())),
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
            let view = RequestView {
                head: &head,
                ..request("GET", "/a?q")
            };
            let service = Service {
                name: "shop/web",
                is_pod: false,
                address: ([10, 96, 0, 7], port).into(),
            };
            let location = redirect.location(&view, &prefix("/a"), &service);
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
            let location = base.location(&nameless, &prefix("/"), &service);
            assert_eq!(String::from_utf8(location).unwrap(), expected);
        }
        assert_eq!(without_port(b"[::1]:80"), b"[::1]");
        assert_eq!(without_port(b"[::1]"), b"[::1]");
        assert_eq!(without_port(b"a:80"), b"a");
    }
}
