//! A body as a dump has it: its first bytes, its length, and for gRPC the number of messages. Says what can be shown of it;
//! never shows bytes that a person can't read.

/// Bytes that are kept of a body.
pub(super) const BODY_LIMIT: usize = 4 * 1024;

/// What was seen of a body.
#[derive(Default)]
pub(super) struct Body {
    keeps: bool,
    kept: Vec<u8>,
    total: u64,
    messages: Option<MessageCounter>,
}

/// What is shown of a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shown<'a> {
    /// There is none.
    Nothing,
    /// Its first bytes, all of them where `total` is no more than that.
    Text { text: &'a str, total: u64 },
    /// Only what it is.
    Named { kind: &'static str, total: u64 },
    /// gRPC messages.
    Messages { messages: u64, total: u64 },
}

impl Body {
    /// `keeps`: the first bytes are kept, too.
    pub fn new(keeps: bool) -> Self {
        Self {
            keeps,
            ..Self::default()
        }
    }

    /// The body is a sequence of gRPC messages: they are counted, and their bytes are not kept.
    pub fn count_messages(&mut self) {
        self.messages = Some(MessageCounter::default());
    }

    pub fn append(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if let Some(messages) = &mut self.messages {
            messages.append(bytes);
        } else if self.keeps {
            let room = BODY_LIMIT - self.kept.len();
            self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// What can be shown, given the value of Content-Encoding.
    pub fn shown(&self, encoding: Option<&[u8]>) -> Shown<'_> {
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

/// The bytes as text, where they are text. The last character may have been cut where the body was.
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

/// Counts gRPC's length-prefixed messages, however they are cut into chunks.
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
                // gRPC-Web sends its trailers as a frame with the high bit set: no message.
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
    fn text_is_shown_and_binary_is_named() {
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
    fn a_long_body_is_cut_between_characters() {
        let long = "é".repeat(BODY_LIMIT);
        let mut body = Body::new(true);
        body.append(b"x");
        body.append(long.as_bytes());
        let Shown::Text { text, total } = body.shown(None) else {
            panic!("not text")
        };
        assert_eq!(
            (text.len(), total),
            (BODY_LIMIT - 1, 2 * BODY_LIMIT as u64 + 1)
        );
        assert!(body.kept.capacity() <= 2 * BODY_LIMIT);
    }

    #[test]
    fn an_incomplete_character_at_the_end_of_a_whole_body_is_binary() {
        assert_eq!(
            body(&["é".as_bytes().split_at(1).0]).shown(None),
            Shown::Named {
                kind: "binary",
                total: 1
            }
        );
    }

    #[test]
    fn messages_are_counted_however_the_bytes_are_cut() {
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
