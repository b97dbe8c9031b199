//! The check of the requests to the dashboard: they come from its own page, with the token of its
//! URL. Pure.
//!
//! Other websites in the same browser reach loopback too, directly or by a name that they point to it
//! (DNS rebinding), and so do other users of the machine.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use hyper::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use hyper::{HeaderMap, Method, StatusCode};

/// Judges requests to the server at a port of loopback.
pub struct Guard {
    /// The port.
    pub port: u16,
    /// The token that the page sends: 128 random bits, in hexadecimal.
    pub token: String,
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is not GET.
    #[error("unexpected method, expected GET")]
    Method,
    /// The name is not one of loopback.
    #[error("unexpected host, expected localhost, 127.0.0.1 or [::1] with the port")]
    Host,
    /// It comes from another site.
    #[error("requests from other sites are refused; open the URL that `mesh dashboard` printed")]
    Origin,
    /// The token is missing or wrong.
    #[error("the token is missing or wrong; open the URL that `mesh dashboard` printed")]
    Token,
}

impl Refused {
    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host | Self::Origin => StatusCode::FORBIDDEN,
            Self::Token => StatusCode::UNAUTHORIZED,
        }
    }
}

impl Guard {
    /// Judges a request for a part of the page, which contains no data. A link or a file may open it.
    pub fn check_page(&self, method: &Method, headers: &HeaderMap) -> Result<(), Refused> {
        let opens = one(headers, &SEC_FETCH_MODE) == Some(b"navigate")
            && one(headers, &SEC_FETCH_DEST) == Some(b"document");
        self.check(method, headers, opens)
    }

    /// Judges a request for data.
    pub fn check_data(&self, method: &Method, headers: &HeaderMap) -> Result<(), Refused> {
        self.check(method, headers, false)?;
        let token = one(headers, &AUTHORIZATION).and_then(|value| value.strip_prefix(b"Bearer "));
        let is_equal = |token| verify_slices_are_equal(token, self.token.as_bytes());
        token
            .and_then(|token| is_equal(token).ok())
            .ok_or(Refused::Token)
    }

    fn check(&self, method: &Method, headers: &HeaderMap, opens: bool) -> Result<(), Refused> {
        if method != Method::GET {
            return Err(Refused::Method);
        }
        let hosts = ["localhost", "127.0.0.1", "[::1]"].map(|name| format!("{name}:{}", self.port));
        let host = one(headers, &HOST);
        let host = hosts.iter().find(|name| host == Some(name.as_bytes()));
        let own = format!("http://{}", host.ok_or(Refused::Host)?);
        let is_own = |value: Option<&[u8]>| value == Some(own.as_bytes());
        let is_from_here = |value: Option<&[u8]>| matches!(value, Some(b"same-origin" | b"none"));
        let origin = headers.contains_key(ORIGIN) && !is_own(one(headers, &ORIGIN));
        let site = headers.contains_key(SEC_FETCH_SITE)
            && !is_from_here(one(headers, &SEC_FETCH_SITE))
            && !opens;
        if origin || site {
            return Err(Refused::Origin);
        }
        Ok(())
    }
}

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// The value of a field that occurs once.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.as_bytes();
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        Guard {
            port: 4100,
            token: "30313233343536373839616263646566".into(),
        }
    }

    const BEARER: &str = "authorization: Bearer 30313233343536373839616263646566";

    fn headers(lines: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for line in lines {
            let (name, value) = line.split_once(": ").expect("NAME: VALUE");
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
            headers.append(name, value.parse().expect("a value"));
        }
        headers
    }

    fn data(lines: &[&str]) -> Result<(), Refused> {
        guard().check_data(&Method::GET, &headers(lines))
    }

    fn page(lines: &[&str]) -> Result<(), Refused> {
        guard().check_page(&Method::GET, &headers(lines))
    }

    #[test]
    fn host_is_loopback_with_the_port() {
        for host in ["localhost:4100", "127.0.0.1:4100", "[::1]:4100"] {
            assert_eq!(page(&[&format!("host: {host}")]), Ok(()), "{host}");
        }
        for host in ["attacker.example:4100", "localhost", "127.0.0.1:4101", ""] {
            let host = format!("host: {host}");
            assert_eq!(page(&[&host]), Err(Refused::Host), "{host}");
            assert_eq!(data(&[&host, BEARER]), Err(Refused::Host), "{host}");
        }
        let host = "host: localhost:4100";
        assert_eq!(page(&[]), Err(Refused::Host));
        assert_eq!(page(&[host, host]), Err(Refused::Host));
    }

    #[test]
    fn other_sites_are_refused() {
        let host = "host: localhost:4100";
        for (line, expected) in [
            ("origin: http://localhost:4100", Ok(())),
            ("origin: http://127.0.0.1:4100", Err(Refused::Origin)),
            ("origin: https://localhost:4100", Err(Refused::Origin)),
            ("origin: null", Err(Refused::Origin)),
            ("sec-fetch-site: same-origin", Ok(())),
            ("sec-fetch-site: none", Ok(())),
            ("sec-fetch-site: same-site", Err(Refused::Origin)),
            ("sec-fetch-site: cross-site", Err(Refused::Origin)),
        ] {
            assert_eq!(data(&[host, BEARER, line]), expected, "{line}");
            assert_eq!(page(&[host, line]), expected, "{line}");
        }
    }

    #[test]
    fn navigation_from_elsewhere_gets_the_page_and_no_data() {
        let [host, site] = ["host: localhost:4100", "sec-fetch-site: cross-site"];
        let mode = "sec-fetch-mode: navigate";
        let opens = [host, site, mode, "sec-fetch-dest: document", BEARER];
        assert_eq!(page(&opens), Ok(()));
        assert_eq!(data(&opens), Err(Refused::Origin));
        let frame = [host, site, mode, "sec-fetch-dest: iframe"];
        assert_eq!(page(&frame), Err(Refused::Origin));
    }

    #[test]
    fn data_needs_the_token() {
        let host = "host: localhost:4100";
        assert_eq!(data(&[host, BEARER]), Ok(()));
        for line in [
            &BEARER[..BEARER.len() - 1],
            &format!("{BEARER}0"),
            &BEARER.replace("Bearer", "Basic"),
            "authorization: Bearer ",
            "cookie: none",
        ] {
            assert_eq!(data(&[host, line]), Err(Refused::Token), "{line}");
        }
        assert_eq!(data(&[host, BEARER, BEARER]), Err(Refused::Token));
    }

    #[test]
    fn only_get_is_answered() {
        for method in [Method::POST, Method::OPTIONS, Method::HEAD, Method::DELETE] {
            let headers = headers(&["host: localhost:4100", BEARER]);
            assert_eq!(guard().check_data(&method, &headers), Err(Refused::Method));
            assert_eq!(guard().check_page(&method, &headers), Err(Refused::Method));
        }
        assert_eq!(Refused::Method.status(), 405);
        assert_eq!(Refused::Token.status(), 401);
    }
}
