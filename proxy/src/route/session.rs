//! Session persistence (Gateway API, GEP-1619): the requests of a session go to one endpoint, which a
//! token in a cookie or in a header field names. Pure.
//!
//! A token is a hash of the backend, a hash of the endpoint, and two times. Proxies keep no state: all
//! of them make and accept the same tokens. A token selects among the endpoints that the backend has;
//! no token leads elsewhere, and none contains an address. Clients can guess the name and the address
//! of a pod and compare hashes, and can change the times, which prolongs their own session.

use std::num::NonZeroU64;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use diy_mesh_proto::mesh::v1::SessionPersistence;

use super::matching::PathMatch;
use crate::http::fields::FieldEdit;
use crate::http::view::RequestView;

/// The hash of an endpoint, or of a backend.
pub type Tag = NonZeroU64;

/// The session of one request.
#[derive(Debug)]
pub struct Session {
    persistence: SessionPersistence,
    /// The path of the cookie.
    path: String,
    /// The valid token of the request.
    token: Option<Token>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    backend: Tag,
    endpoint: Tag,
    /// The time of the first response and of the latest one, in seconds since 1970.
    created: u64,
    seen: u64,
}

/// The tag of a name.
pub fn tag(parts: &[&str]) -> Tag {
    let hash = digest(&SHA256, parts.join("\0").as_bytes());
    let (first, _) = hash.as_ref().split_first_chunk().expect("it has 32 bytes");
    NonZeroU64::MIN | u64::from_be_bytes(*first)
}

/// Whether a value is a token.
pub fn is_token(value: &[u8]) -> bool {
    Token::parse(value).is_some()
}

impl Session {
    /// The session of a request that matched `path`, at `now`.
    pub fn new(
        persistence: &SessionPersistence,
        request: &RequestView<'_>,
        path: Option<&PathMatch>,
        now: u64,
    ) -> Self {
        let value = match (&*persistence.cookie, &*persistence.header) {
            ("", header) => request.header(header),
            (cookie, _) => request.cookie(cookie),
        };
        let token = value.and_then(Token::parse);
        let path = match path {
            Some(PathMatch::Exact(path) | PathMatch::Prefix(path)) => &**path,
            Some(PathMatch::Regex(_)) | None => "/",
        };
        let is_valid = !path.is_empty() && !path.contains(';');
        Self {
            persistence: persistence.clone(),
            path: if is_valid { path } else { "/" }.to_owned(),
            token: token.filter(|token| !token.is_over(persistence, now)),
        }
    }

    /// The backend of the session.
    pub fn backend(&self) -> Option<Tag> {
        self.token.map(|token| token.backend)
    }

    /// The endpoint of the session.
    pub fn endpoint(&self) -> Option<Tag> {
        self.token.map(|token| token.endpoint)
    }

    /// The field of a response from this endpoint, or `None` if the client has the token already.
    pub fn edit(&self, backend: Tag, endpoint: Tag, now: u64) -> Option<FieldEdit> {
        let is_same = |token: &Token| (token.backend, token.endpoint) == (backend, endpoint);
        let known = self.token.filter(is_same);
        if known.is_some() && self.persistence.idle_timeout == 0 {
            return None;
        }
        let token = Token {
            backend,
            endpoint,
            created: known.map_or(now, |token| token.created),
            seen: now,
        };
        let text = token.text();
        let SessionPersistence { cookie, header, .. } = &self.persistence;
        if cookie.is_empty() {
            return Some(FieldEdit::Set(header.clone(), text));
        }
        let path = &self.path;
        let mut value = format!("{cookie}={text}; Path={path}; HttpOnly; SameSite=Strict");
        if self.persistence.permanent {
            let lifetime = seconds(self.persistence.absolute_timeout);
            let left = lifetime.saturating_sub(now.saturating_sub(token.created));
            value.push_str(&format!("; Max-Age={left}"));
        }
        Some(FieldEdit::Add("set-cookie".to_owned(), value))
    }
}

/// The seconds of a timeout in milliseconds.
fn seconds(milliseconds: u64) -> u64 {
    milliseconds.div_ceil(1000)
}

impl Token {
    fn is_over(&self, persistence: &SessionPersistence, now: u64) -> bool {
        let after =
            |timeout: u64, since| timeout > 0 && now.saturating_sub(since) >= seconds(timeout);
        after(persistence.absolute_timeout, self.created)
            || after(persistence.idle_timeout, self.seen)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(text).ok()?.split('.');
        let tags = BASE64_URL_SAFE_NO_PAD.decode(parts.next()?).ok()?;
        let (backend, rest) = tags.split_first_chunk()?;
        let tag = |bytes: [u8; 8]| NonZeroU64::new(u64::from_be_bytes(bytes));
        let token = Self {
            backend: tag(*backend)?,
            endpoint: tag(rest.try_into().ok()?)?,
            created: parts.next()?.parse().ok()?,
            seen: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(token)
    }

    fn text(&self) -> String {
        let tags = [self.backend, self.endpoint].map(|tag| tag.get().to_be_bytes());
        let tags = BASE64_URL_SAFE_NO_PAD.encode(tags.concat());
        format!("{tags}.{}.{}", self.created, self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;

    fn cookie(permanent: bool) -> SessionPersistence {
        SessionPersistence {
            cookie: "sid".to_owned(),
            absolute_timeout: 3_600_000,
            permanent,
            ..SessionPersistence::default()
        }
    }

    /// The session of a request with this cookie.
    fn session(persistence: &SessionPersistence, value: &str, now: u64) -> Session {
        let head = http::Request::get("/").header("cookie", format!("sid={value}"));
        let head = diy_mesh_http2::Request::from(&head.body(()).expect("a request").into_parts().0);
        let view = RequestView {
            head: &head,
            ..request("GET", "/")
        };
        let path = PathMatch::Exact("/cart".to_owned());
        Session::new(persistence, &view, Some(&path), now)
    }

    /// The token in the field of a response.
    fn token(edit: Option<FieldEdit>) -> (String, String) {
        let Some(FieldEdit::Add(_, cookie)) = edit else {
            panic!("{edit:?}");
        };
        let (pair, attributes) = cookie.split_once("; ").expect("attributes");
        let token = pair.strip_prefix("sid=").expect("a token");
        (token.to_owned(), attributes.to_owned())
    }

    #[test]
    fn token_names_backend_and_endpoint_until_the_timeouts() {
        let (backend, endpoint) = (tag(&["shop/v1:80"]), tag(&["10.0.0.1:80", "shop/v1-a"]));
        let fixed = cookie(true);
        let (text, attributes) = token(session(&fixed, "", 100).edit(backend, endpoint, 100));
        let expected = "Path=/cart; HttpOnly; SameSite=Strict; Max-Age=3600";
        assert_eq!(attributes, expected);
        assert!(text.len() < 80 && !text.contains("10.0"), "{text}");
        let ongoing = session(&fixed, &text, 3699);
        assert_eq!(ongoing.endpoint(), Some(endpoint));
        assert_eq!(ongoing.backend(), Some(backend));
        assert_eq!(
            ongoing.edit(backend, endpoint, 3699),
            None,
            "it has the token"
        );
        assert_eq!(session(&fixed, &text, 3700).endpoint(), None, "it is over");
        // Another endpoint begins another session.
        let (other, _) = token(ongoing.edit(backend, tag(&["other"]), 3699));
        assert_eq!(
            session(&fixed, &other, 7298).endpoint(),
            Some(tag(&["other"]))
        );

        let idle = SessionPersistence {
            idle_timeout: 60_000,
            ..cookie(false)
        };
        let (renewed, attributes) = token(session(&idle, &text, 159).edit(backend, endpoint, 159));
        assert!(!attributes.contains("Max-Age"), "{attributes}");
        assert_eq!(session(&idle, &text, 160).endpoint(), None);
        assert_eq!(session(&idle, &renewed, 218).endpoint(), Some(endpoint));
        let last = session(&idle, &renewed, 200).edit(backend, endpoint, 200);
        assert!(
            token(last).0.ends_with(".100.200"),
            "the session began at 100"
        );
    }

    #[test]
    fn invalid_tokens_are_no_session() {
        let persistence = cookie(false);
        let tags = BASE64_URL_SAFE_NO_PAD.encode([1; 16]);
        let valid = format!("{tags}.1.1");
        assert_eq!(
            session(&persistence, &valid, 2).endpoint(),
            NonZeroU64::new(0x0101_0101_0101_0101)
        );
        let long = format!("{}.1.1", "A".repeat(100_000));
        for invalid in [
            "",
            ".",
            "10.0.0.1:80",
            &tags,
            &format!("{tags}.1"),
            &format!("{tags}.1.1.1"),
            &format!("{tags}.-1.1"),
            &format!("{tags}.1.99999999999999999999999"),
            &format!("{}.1.1", &tags[1..]),
            &long,
        ] {
            assert_eq!(
                session(&persistence, invalid, 2).endpoint(),
                None,
                "{invalid}"
            );
        }
    }
}
