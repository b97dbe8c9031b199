//! Escaping of text of clients and tenants, so that it adds no lines and does not control the
//! terminal. Pure.

use std::fmt::Write;

/// Appends bytes as a part of a line; escapes line ends and control characters.
pub fn line(bytes: &[u8], out: &mut String) {
    for chunk in bytes.utf8_chunks() {
        chunk.valid().chars().for_each(|c| character(c, out));
        chunk
            .invalid()
            .iter()
            .for_each(|byte| hexadecimal(*byte, out));
    }
}

/// Appends multi-line text; escapes control characters other than line ends and tabs.
pub fn text(text: &str, out: &mut String) {
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' if characters.peek() == Some(&'\n') => {}
            c => character(c, out),
        }
    }
}

/// JSON with control characters in its strings escaped as `\u009b`. Writers of JSON escape only
/// ASCII control characters.
pub fn json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            // They are between the values.
            '\n' | '\r' | '\t' => out.push(c),
            c if is_control(c) => {
                // Writing to a String does not fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out
}

fn character(c: char, out: &mut String) {
    match c {
        '\r' => out.push_str("\\r"),
        '\n' => out.push_str("\\n"),
        '\t' => out.push_str("\\t"),
        c if c.is_ascii_control() => hexadecimal(c as u8, out),
        c if is_control(c) => out.extend(c.escape_unicode()),
        c => out.push(c),
    }
}

/// Control characters, bidirectional formatting and line separators, all below U+10000.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn hexadecimal(byte: u8, out: &mut String) {
    // Writing to a String does not fail.
    let _ = write!(out, "\\x{byte:02x}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_no_control_characters_and_the_same_values() {
        let value = serde_json::json!({"a\u{9b}\n": ["\u{202e}\u{7f}\u{85}é😀\t\u{1b}"]});
        let escaped = json(&format!("{value:#}"));
        assert!(
            escaped.contains(r#""\u202e\u007f\u0085é😀\t\u001b""#),
            "{escaped}"
        );
        assert_eq!(serde_json::from_str(&escaped).ok(), Some(value));
        assert!(!escaped.replace('\n', "").contains(is_control), "{escaped}");
    }

    #[test]
    fn escapes_control_characters() {
        let mut out = String::new();
        line(b"a\x1b[2Jb\r\nc\td\xff\x07", &mut out);
        assert_eq!(out, r"a\x1b[2Jb\r\nc\td\xff\x07");
        let mut again = String::new();
        line(out.as_bytes(), &mut again);
        assert_eq!(again, out, "escaped text has nothing to escape");
        let mut out = String::new();
        text("a\r\nb\tc\rd\x1b\u{9b}\u{202e}é\n", &mut out);
        assert_eq!(out, "a\nb\tc\\rd\\x1b\\u{9b}\\u{202e}é\n");
    }
}
