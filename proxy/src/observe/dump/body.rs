//! Body of a dump: first bytes, length, and the number of gRPC messages. Only text is shown.

/// Maximum number of recorded bytes of a body.
pub(super) const MAX_BODY: usize = 4 * 1024;

/// Recorded part of a body.
#[derive(Default)]
pub(crate) struct Body {
    keeps: bool,
    kept: Vec<u8>,
    total: u64,
    messages: Option<MessageCounter>,
}

/// Content of a body in a dump.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shown<'a> {
    /// No body.
    Nothing,
    /// The first bytes, of `total`.
    Text { text: &'a str, total: u64 },
    /// Only the kind of content.
    Named { kind: &'static str, total: u64 },
    /// gRPC messages.
    Messages { messages: u64, total: u64 },
}

impl Body {
    /// `keeps`: whether to record the first bytes.
    pub fn new(keeps: bool) -> Self {
        Self {
            keeps,
            ..Self::default()
        }
    }

    /// Counts gRPC messages instead of recording bytes.
    pub fn count_messages(&mut self) {
        self.messages = Some(MessageCounter::default());
    }

    pub fn append(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if let Some(messages) = &mut self.messages {
            messages.append(bytes);
        } else if self.keeps {
            let room = MAX_BODY - self.kept.len();
            self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Content to show. `encoding` is the value of Content-Encoding.
    pub(super) fn shown(&self, encoding: Option<&[u8]>) -> Shown<'_> {
        let total = self.total;
        if let Some(messages) = &self.messages {
            return Shown::Messages {
                messages: messages.complete,
                total,
            };
        }
        if total == 0 {
            return Shown::Nothing;
        }
        if let Some(kind) = encoding.and_then(encoding_name) {
            return Shown::Named { kind, total };
        }
        if !self.keeps {
            return Shown::Named { kind: "a", total };
        }
        match text(&self.kept, total > self.kept.len() as u64) {
            Some(text) => Shown::Text { text, total },
            None => Shown::Named {
                kind: "binary",
                total,
            },
        }
    }
}

/// The bytes as text, if they are printable. If `cut`, the last character may be incomplete.
fn text(bytes: &[u8], cut: bool) -> Option<&str> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if cut && error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let binary = |c: char| c < ' ' && !matches!(c, '\t' | '\n' | '\r' | '\x08' | '\x0c' | '\x1b');
    (!text.contains(binary)).then_some(text)
}

fn encoding_name(encoding: &[u8]) -> Option<&'static str> {
    let encoding = encoding.trim_ascii();
    let names = [
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("br", "brotli"),
        ("zstd", "zstd"),
        ("deflate", "deflate"),
        ("compress", "compress"),
    ];
    if encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity") {
        return None;
    }
    let known = names
        .iter()
        .find(|(coding, _)| encoding.eq_ignore_ascii_case(coding.as_bytes()));
    Some(known.map_or("encoded", |(_, name)| name))
}

/// Counts length-prefixed gRPC messages, independent of chunk boundaries.
#[derive(Default)]
struct MessageCounter {
    prefix: [u8; 5],
    have: usize,
    left: usize,
    complete: u64,
}

impl MessageCounter {
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let taken = self.left.min(bytes.len());
                self.left -= taken;
                bytes = &bytes[taken..];
            } else {
                let taken = (5 - self.have).min(bytes.len());
                self.prefix[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
                self.have += taken;
                bytes = &bytes[taken..];
                if self.have < 5 {
                    return;
                }
                let [_, length @ ..] = self.prefix;
                self.left = u32::from_be_bytes(length) as usize;
            }
            if self.left == 0 {
                // In gRPC-Web, a frame with the high bit contains trailers.
                self.complete += u64::from(self.prefix[0] & 0x80 == 0);
                self.have = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(chunks: &[&[u8]]) -> Body {
        let mut body = Body::new(true);
        chunks.iter().for_each(|chunk| body.append(chunk));
        body
    }

    #[test]
    fn shows_text_and_names_other_content() {
        assert_eq!(
            body(&[b"hel", b"lo"]).shown(None),
            Shown::Text {
                text: "hello",
                total: 5
            }
        );
        assert_eq!(
            body(&[b"\x89PNG\r\n\x1a\n"]).shown(None),
            Shown::Named {
                kind: "binary",
                total: 8
            }
        );
        assert_eq!(
            body(&[b"\n\x05hello"]).shown(None),
            Shown::Named {
                kind: "binary",
                total: 7
            }
        );
        assert_eq!(body(&[]).shown(Some(b"gzip")), Shown::Nothing);
        assert_eq!(
            body(&[b"plain"]).shown(Some(b" GZIP")),
            Shown::Named {
                kind: "gzip",
                total: 5
            }
        );
        assert_eq!(
            body(&[b"plain"]).shown(Some(b"rot13")),
            Shown::Named {
                kind: "encoded",
                total: 5
            }
        );
        assert_eq!(
            body(&[b"plain"]).shown(Some(b"identity")),
            Shown::Text {
                text: "plain",
                total: 5
            }
        );
    }

    #[test]
    fn truncates_long_body_between_characters() {
        let long = "é".repeat(MAX_BODY);
        let mut body = Body::new(true);
        body.append(b"x");
        body.append(long.as_bytes());
        let Shown::Text { text, total } = body.shown(None) else {
            panic!("not text")
        };
        assert_eq!((text.len(), total), (MAX_BODY - 1, 2 * MAX_BODY as u64 + 1));
        assert!(body.kept.capacity() <= 2 * MAX_BODY);
    }

    #[test]
    fn incomplete_last_character_of_a_whole_body_is_binary() {
        assert_eq!(
            body(&["é".as_bytes().split_at(1).0]).shown(None),
            Shown::Named {
                kind: "binary",
                total: 1
            }
        );
    }

    #[test]
    fn counts_messages_independent_of_chunks() {
        let wire = b"\0\0\0\0\x03abc\0\0\0\0\0\x01\0\0\0\x01z\x80\0\0\0\x01t";
        for size in 1..=wire.len() {
            let mut body = Body::new(true);
            body.count_messages();
            wire.chunks(size).for_each(|chunk| body.append(chunk));
            assert_eq!(
                body.shown(None),
                Shown::Messages {
                    messages: 3,
                    total: wire.len() as u64
                },
                "chunks of {size}"
            );
            assert!(body.kept.is_empty());
        }
    }
}
