//! Masking of credentials and escaping of control characters in dumps. Pure.

use std::borrow::Cow;
use std::fmt::Write;

const MASK: &str = "***";

/// Masks credentials in a field value; keeps the authentication scheme and cookie names.
pub(super) fn value<'a>(name: &[u8], value: &'a [u8]) -> Cow<'a, [u8]> {
    let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
    if is("authorization") || is("proxy-authorization") {
        Cow::Owned(credentials(value))
    } else if is("cookie") {
        let cookies: Vec<_> = value.split(|byte| *byte == b';').map(cookie).collect();
        Cow::Owned(cookies.join(&b';'))
    } else if is("set-cookie") {
        let mut parts = value.splitn(2, |byte| *byte == b';');
        let mut masked = cookie(parts.next().unwrap_or_default());
        if let Some(attributes) = parts.next() {
            masked.push(b';');
            masked.extend_from_slice(attributes);
        }
        Cow::Owned(masked)
    } else {
        Cow::Borrowed(value)
    }
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

/// Appends bytes of a start line or a field; escapes line ends and control characters.
pub(super) fn line(bytes: &[u8], out: &mut String) {
    for chunk in bytes.utf8_chunks() {
        chunk.valid().chars().for_each(|c| character(c, out));
        chunk
            .invalid()
            .iter()
            .for_each(|byte| hexadecimal(*byte, out));
    }
}

/// Appends multi-line text; escapes control characters other than line ends and tabs.
pub(super) fn text(text: &str, out: &mut String) {
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' if characters.peek() == Some(&'\n') => {}
            c => character(c, out),
        }
    }
}

fn character(c: char, out: &mut String) {
    match c {
        '\r' => out.push_str("\\r"),
        '\n' => out.push_str("\\n"),
        '\t' => out.push_str("\\t"),
        c if c.is_ascii_control() => hexadecimal(c as u8, out),
        // Control characters, bidirectional formatting and line separators.
        c if c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
        {
            out.extend(c.escape_unicode());
        }
        c => out.push(c),
    }
}

fn hexadecimal(byte: u8, out: &mut String) {
    // Writing to a String does not fail.
    let _ = write!(out, "\\x{byte:02x}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(name: &str, shown: &str) -> String {
        String::from_utf8(value(name.as_bytes(), shown.as_bytes()).into_owned()).unwrap()
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
    fn escapes_control_characters() {
        let mut out = String::new();
        line(b"a\x1b[2Jb\r\nc\td\xff\x07", &mut out);
        assert_eq!(out, r"a\x1b[2Jb\r\nc\td\xff\x07");
        let mut out = String::new();
        text("a\r\nb\tc\rd\x1b\u{9b}\u{202e}é\n", &mut out);
        assert_eq!(out, "a\nb\tc\\rd\\x1b\\u{9b}\\u{202e}é\n");
    }
}
