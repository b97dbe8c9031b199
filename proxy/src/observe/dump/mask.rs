//! Masking of credentials in dumps. Pure.

use std::borrow::Cow;

use crate::route::session::is_token;

const MASK: &str = "***";

/// The ends of the names of fields with credentials, in lower case with hyphens.
const CREDENTIALS: [&str; 16] = [
    "access-key",
    "api-key",
    "apikey",
    "auth-key",
    "credential",
    "credentials",
    // Keys of objects in S3 and Google Cloud Storage.
    "customer-key",
    "encryption-key",
    "jwt",
    "jwt-assertion",
    "passwd",
    "password",
    "secret",
    // Browsers have only this field for the token of a WebSocket.
    "sec-websocket-protocol",
    "subscription-key",
    "token",
];
/// Fields whose values contain a URL.
const URLS: [&str; 9] = [
    "content-location",
    "link",
    "location",
    "referer",
    "refresh",
    "x-forwarded-uri",
    "x-original-uri",
    "x-original-url",
    "x-rewrite-url",
];

/// Masks credentials and session tokens in a field value; keeps the authentication scheme and cookie names. Masks the
/// query strings of URLs if `queries`.
pub(crate) fn value<'a>(name: &[u8], value: &'a [u8], queries: bool) -> Cow<'a, [u8]> {
    let mut name = name.to_ascii_lowercase();
    name.iter_mut()
        .filter(|byte| **byte == b'_')
        .for_each(|byte| *byte = b'-');
    let name = name.as_slice();
    let is = |other: &&str| name == other.as_bytes();
    if name.ends_with(b"authorization") {
        Cow::Owned(credentials(value))
    } else if is(&"cookie") {
        let cookies: Vec<_> = value.split(|byte| *byte == b';').map(cookie).collect();
        Cow::Owned(cookies.join(&b';'))
    } else if is(&"set-cookie") {
        let mut parts = value.splitn(2, |byte| *byte == b';');
        let mut masked = cookie(parts.next().unwrap_or_default());
        if let Some(attributes) = parts.next() {
            masked.push(b';');
            masked.extend_from_slice(attributes);
        }
        Cow::Owned(masked)
    } else if CREDENTIALS.iter().any(|end| name.ends_with(end.as_bytes())) || is_token(value) {
        Cow::Borrowed(MASK.as_bytes())
    } else if URLS.iter().any(is) {
        url(value, queries)
    } else {
        Cow::Borrowed(value)
    }
}

/// Masks the target of a request line as a URL. Status lines stay: their first word, unlike a
/// method, contains a slash.
pub(super) fn start_line(line: &[u8], queries: bool) -> Cow<'_, [u8]> {
    let words: Vec<_> = line.splitn(3, |byte| *byte == b' ').collect();
    match words[..] {
        [method, target, version] if !method.contains(&b'/') => {
            Cow::Owned([method, &url(target, queries), version].join(&b' '))
        }
        // Without a version: the line is truncated.
        [method, target] if !method.contains(&b'/') => {
            Cow::Owned([method, &url(target, queries)].join(&b' '))
        }
        _ => Cow::Borrowed(line),
    }
}

/// Masks the user information of a URL, and its query string and fragment if `queries`.
pub(crate) fn url(url: &[u8], queries: bool) -> Cow<'_, [u8]> {
    let mut masked = Cow::Borrowed(url);
    let path = url.iter().position(|byte| matches!(byte, b'?' | b'#'));
    if queries && let Some(end) = path {
        masked = Cow::Owned([&url[..=end], MASK.as_bytes()].concat());
    }
    let authority = url.windows(3).position(|bytes| bytes == b"://");
    if let Some(start) = authority
        .map(|start| start + 3)
        .filter(|start| path.is_none_or(|end| *start < end))
    {
        let end = url[start..]
            .iter()
            .position(|byte| matches!(byte, b'/' | b'?' | b'#'));
        let authority = &url[start..end.map_or(url.len(), |end| start + end)];
        if let Some(at) = authority.iter().rposition(|byte| *byte == b'@') {
            let rest = &masked[start + at..];
            masked = Cow::Owned([&url[..start], MASK.as_bytes(), rest].concat());
        }
    }
    masked
}

fn credentials(value: &[u8]) -> Vec<u8> {
    let scheme = value
        .trim_ascii()
        .split(|byte| *byte == b' ')
        .next()
        .unwrap_or_default();
    let is_scheme = scheme.len() < value.trim_ascii().len()
        && scheme
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-');
    if is_scheme {
        [scheme, b" ", MASK.as_bytes()].concat()
    } else {
        MASK.into()
    }
}

fn cookie(pair: &[u8]) -> Vec<u8> {
    match pair.iter().position(|byte| *byte == b'=') {
        Some(end) => [&pair[..=end], MASK.as_bytes()].concat(),
        None => MASK.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(name: &str, shown: &str) -> String {
        String::from_utf8(value(name.as_bytes(), shown.as_bytes(), true).into_owned()).unwrap()
    }

    #[test]
    fn masks_credentials_and_keeps_the_scheme() {
        assert_eq!(masked("Authorization", "Bearer abc.def"), "Bearer ***");
        assert_eq!(masked("PROXY-AUTHORIZATION", "Basic dXNlcg=="), "Basic ***");
        assert_eq!(masked("authorization", "secret"), "***");
        assert_eq!(masked("authorization", "se/cret token"), "***");
        assert_eq!(
            masked("authorization", "Digest username=\"u\", response=\"r\""),
            "Digest ***"
        );
        assert_eq!(masked("authorization", ""), "***");
    }

    #[test]
    fn masks_cookie_values_and_keeps_names() {
        assert_eq!(
            masked("cookie", "a=1; session=s3cret=="),
            "a=***; session=***"
        );
        assert_eq!(masked("cookie", "bare"), "***");
        assert_eq!(
            masked("Set-Cookie", "id=s3cret; Path=/; HttpOnly"),
            "id=***; Path=/; HttpOnly"
        );
        assert_eq!(masked("x-other", "id=1"), "id=1");
    }

    #[test]
    fn masks_fields_with_the_usual_names_of_credentials() {
        for name in [
            "X-Api-Key",
            "api_key",
            "X-Auth-Token",
            "X-CSRF-Token",
            "X-Amz-Security-Token",
            "PRIVATE-TOKEN",
            "X-Goog-Iap-Jwt-Assertion",
            "Ocp-Apim-Subscription-Key",
            "X-Client-Secret",
            "Sec-WebSocket-Protocol",
            "X-Goog-Encryption-Key",
            "x-goog-copy-source-encryption-key",
            "X-Amz-Server-Side-Encryption-Customer-Key",
            "X-Jwt",
        ] {
            assert_eq!(masked(name, "Some value"), "***", "{name}");
        }
        assert_eq!(
            masked("X-Forwarded-Authorization", "Bearer a"),
            "Bearer ***"
        );
        for name in [
            "Sec-WebSocket-Key",
            "Idempotency-Key",
            "ETag",
            "traceparent",
        ] {
            assert_eq!(masked(name, "Some value"), "Some value", "{name}");
        }
    }

    #[test]
    fn masks_session_tokens_in_fields_of_any_name() {
        let token = "AAECAwQFBgcICQoLDA0ODw.1795341600.1795341601";
        assert_eq!(masked("X-Cart", token), "***");
        for other in ["AAECAwQFBgcICQoLDA0ODw.1795341600", "1.2.3", "a.b.c"] {
            assert_eq!(masked("X-Cart", other), other);
        }
    }

    #[test]
    fn masks_query_strings_and_user_information_of_urls() {
        let line = |text, queries| {
            String::from_utf8(start_line(str::as_bytes(text), queries).into_owned()).unwrap()
        };
        for (shown, without_queries, credentials_only) in [
            (
                "GET /a?token=x&b HTTP/1.1",
                "GET /a?*** HTTP/1.1",
                "GET /a?token=x&b HTTP/1.1",
            ),
            (
                "GET /a?b=://c@d HTTP/2",
                "GET /a?*** HTTP/2",
                "GET /a?b=://c@d HTTP/2",
            ),
            ("GET /a HTTP/1.1", "GET /a HTTP/1.1", "GET /a HTTP/1.1"),
            (
                "GET http://u:p@host/a?b HTTP/1.1",
                "GET http://***@host/a?*** HTTP/1.1",
                "GET http://***@host/a?b HTTP/1.1",
            ),
            ("GET /a?token=trunc", "GET /a?***", "GET /a?token=trunc"),
            (
                "CONNECT host:443 HTTP/1.1",
                "CONNECT host:443 HTTP/1.1",
                "CONNECT host:443 HTTP/1.1",
            ),
            (
                "HTTP/1.1 400 What? Why",
                "HTTP/1.1 400 What? Why",
                "HTTP/1.1 400 What? Why",
            ),
        ] {
            assert_eq!(line(shown, true), without_queries);
            assert_eq!(line(shown, false), credentials_only);
        }
        assert_eq!(
            masked("Referer", "https://a.example/b?c=d"),
            "https://a.example/b?***"
        );
        assert_eq!(masked("location", "/#access_token=x"), "/#***");
    }
}
