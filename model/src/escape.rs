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
