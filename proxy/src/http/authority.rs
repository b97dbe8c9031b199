//! Authorities of requests (RFC 3986, section 3.2): whether a target and a Host field name the same
//! one, and whether one names a host and a port. Pure; both versions of HTTP use it. It resolves
//! nothing.

/// Whether `authority`, of a target with this scheme, and the value of a Host field are the same: in
/// any case, and with or without the scheme's default port.
pub fn is_same(scheme: &[u8], authority: &[u8], host: &[u8]) -> bool {
    is_text(authority)
        && without_default_port(scheme, authority)
            .eq_ignore_ascii_case(without_default_port(scheme, host))
}

/// Whether this is `HOST:PORT`, as CONNECT wants it (RFC 9112, section 3.2.3).
pub fn is_host_and_port(authority: &[u8]) -> bool {
    let Some(colon) = authority.iter().rposition(|byte| *byte == b':') else {
        return false;
    };
    let (host, port) = (&authority[..colon], &authority[colon + 1..]);
    let number = std::str::from_utf8(port)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let bracketed = host.starts_with(b"[") && host.ends_with(b"]");
    !host.is_empty()
        && is_text(host)
        && (bracketed || !host.contains(&b':'))
        && number.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// Whether there is nothing but what may stand in a host or a port. User information is not allowed:
/// servers read what precedes an `@` in different ways.
pub fn is_text(part: &[u8]) -> bool {
    part.iter().all(|byte| TEXT[usize::from(*byte)])
}

/// Whether each byte may stand in a host or a port: a table, since each request has an authority.
const TEXT: [bool; 256] = {
    let (mut table, mut byte) = ([false; 256], 0);
    while byte < 128 {
        table[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let (others, mut index) = (b"-._~%!$&'()*+,;=:[]", 0);
    while index < others.len() {
        table[others[index] as usize] = true;
        index += 1;
    }
    table
};

fn without_default_port<'a>(scheme: &[u8], authority: &'a [u8]) -> &'a [u8] {
    let default: &[u8] = match scheme {
        scheme if scheme.eq_ignore_ascii_case(b"http") => b":80",
        scheme if scheme.eq_ignore_ascii_case(b"https") => b":443",
        _ => b":",
    };
    authority
        .strip_suffix(default)
        .or(authority.strip_suffix(b":"))
        .unwrap_or(authority)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_spellings_of_one_authority_are_the_same() {
        for (scheme, authority, host) in [
            ("http", "a", "a"),
            ("http", "A.example", "a.Example"),
            ("http", "a:80", "a"),
            ("HTTP", "a", "a:80"),
            ("https", "a:443", "a"),
            ("http", "a:", "a"),
            ("http", "[::1]:80", "[::1]"),
            ("ws", "a:81", "a:81"),
        ] {
            assert!(
                is_same(scheme.as_bytes(), authority.as_bytes(), host.as_bytes()),
                "{scheme} {authority} {host}"
            );
        }
    }

    #[test]
    fn different_authorities_are_not_the_same() {
        for (scheme, authority, host) in [
            ("http", "a", "b"),
            ("http", "a", ""),
            ("http", "", "a"),
            ("http", "a:443", "a"),
            ("https", "a:80", "a"),
            ("http", "a:080", "a"),
            ("ftp", "a:80", "a"),
            ("http", "a", "a."),
            ("http", "user:secret@a", "a"),
            ("http", "b@c@a", "a"),
            ("http", "b\\@a", "a"),
            ("http", "a@b", "a@b"),
            ("http", "a\\b", "a\\b"),
        ] {
            assert!(
                !is_same(scheme.as_bytes(), authority.as_bytes(), host.as_bytes()),
                "{scheme} {authority} {host}"
            );
        }
    }

    #[test]
    fn a_tunnel_goes_to_a_host_and_a_port() {
        for right in ["a:1", "mail.example:65535", "[fd00::7]:443", "10.0.0.7:80"] {
            assert!(is_host_and_port(right.as_bytes()), "{right}");
        }
        for wrong in [
            "",
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "a:+1",
            "a:1x",
            "/",
            "a/b:1",
            "u@a:1",
            "fd00::7:443",
            "a b:1",
            "http://a:1",
        ] {
            assert!(!is_host_and_port(wrong.as_bytes()), "{wrong}");
        }
    }
}
