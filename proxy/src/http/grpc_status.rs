//! The status of a gRPC call that passes: in the trailers, in the head of a response without a body,
//! or in the last frame of a gRPC-Web body, in its binary and its text form. No body is kept.

use diy_mesh_model::code::GRPC_STATUSES;

use crate::http::view::{Fields, RequestView};
use crate::labels::OTHER_VALUE;

const GRPC: &[u8] = b"application/grpc";
const GRPC_WEB: &[u8] = b"application/grpc-web";
const GRPC_WEB_TEXT: &[u8] = b"application/grpc-web-text";
const GRPC_STATUS: &str = "grpc-status";
/// The first byte of a frame with trailers that are not compressed.
const TRAILERS: u8 = 0x80;
/// The bytes of a line of trailers that are read.
const MAX_LINE: usize = 32;

/// The known state of the gRPC call that a request makes, if it is one.
#[derive(Debug, Default)]
pub struct GrpcCall {
    is_call: bool,
    status: Option<&'static str>,
    web: Option<Box<WebBody>>,
}

impl GrpcCall {
    /// The call of a request.
    pub fn of(request: &RequestView<'_>) -> Self {
        let is_post = request.method == b"POST";
        let kind = is_post.then(|| request.header("content-type")).flatten();
        Self {
            is_call: kind.is_some_and(|kind| starts_with(kind, GRPC)),
            ..Self::default()
        }
    }

    /// The head of the response.
    pub fn response(&mut self, head: &dyn Fields) {
        if !self.is_call {
            return;
        }
        self.trailers(head);
        let kind = head.field("content-type").unwrap_or_default();
        self.web = starts_with(kind, GRPC_WEB).then(|| {
            let base64 = starts_with(kind, GRPC_WEB_TEXT).then(Base64::default);
            Box::new(WebBody {
                base64,
                ..WebBody::default()
            })
        });
    }

    /// Bytes of the response's body.
    pub fn body(&mut self, data: &[u8]) {
        if let Some(web) = &mut self.web {
            self.status = web.read(data).or(self.status);
        }
    }

    /// The trailers of the response.
    pub fn trailers(&mut self, fields: &dyn Fields) {
        let value = self.is_call.then(|| fields.field(GRPC_STATUS)).flatten();
        self.status = value.map(status_name).or(self.status);
    }

    /// The proxy ends the call with this status.
    pub fn fail(&mut self, status: u8) {
        self.status = GRPC_STATUSES.get(usize::from(status)).copied();
    }

    /// The client has ended the call.
    pub fn cancel(&mut self) {
        self.status.get_or_insert("CANCELLED");
    }

    /// Whether the request is a gRPC call.
    pub fn is_call(&self) -> bool {
        self.is_call
    }

    /// The name of the status. A call that ends without one has failed. Empty: the request is no call.
    pub fn status(&self) -> &'static str {
        let missing = if self.is_call { "UNKNOWN" } else { "" };
        self.status.filter(|_| self.is_call).unwrap_or(missing)
    }
}

fn starts_with(kind: &[u8], prefix: &[u8]) -> bool {
    kind.get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

fn status_name(value: &[u8]) -> &'static str {
    let number = std::str::from_utf8(value).ok();
    let number = number.and_then(|text| text.trim().parse().ok());
    let name = number.and_then(|number: usize| GRPC_STATUSES.get(number));
    name.copied().unwrap_or(OTHER_VALUE)
}

/// The frames of a gRPC-Web body, as they pass.
#[derive(Debug, Default)]
struct WebBody {
    /// The text form.
    base64: Option<Base64>,
    /// The header of the frame: flags, and the length of its content.
    header: [u8; 5],
    /// How much of the header has arrived.
    filled: usize,
    /// How much of the content has not.
    left: usize,
    /// The start of the current line of trailers.
    line: Vec<u8>,
}

impl WebBody {
    /// Reads bytes of the body. Returns the status, if they have it.
    fn read(&mut self, data: &[u8]) -> Option<&'static str> {
        let Some(mut base64) = self.base64 else {
            return self.read_frames(data);
        };
        let mut status = None;
        for encoded in data.chunks(512) {
            let (mut decoded, mut length) = ([0; 512], 0);
            for byte in encoded.iter().filter_map(|symbol| base64.decode(*symbol)) {
                decoded[length] = byte;
                length += 1;
            }
            status = self.read_frames(&decoded[..length]).or(status);
        }
        self.base64 = Some(base64);
        status
    }

    fn read_frames(&mut self, mut data: &[u8]) -> Option<&'static str> {
        let mut status = None;
        while !data.is_empty() {
            if self.filled < self.header.len() {
                let missing = &mut self.header[self.filled..];
                let length = missing.len().min(data.len());
                missing[..length].copy_from_slice(&data[..length]);
                data = &data[length..];
                self.filled += length;
                let [_, size @ ..] = self.header;
                self.left = u32::from_be_bytes(size) as usize;
            } else {
                let (content, rest) = data.split_at(self.left.min(data.len()));
                data = rest;
                self.left -= content.len();
                if self.header[0] == TRAILERS {
                    status = self.read_trailers(content).or(status);
                }
            }
            if self.filled == self.header.len() && self.left == 0 {
                status = self.end_line().or(status);
                self.filled = 0;
            }
        }
        status
    }

    fn read_trailers(&mut self, content: &[u8]) -> Option<&'static str> {
        let mut status = None;
        for byte in content {
            if *byte == b'\n' {
                status = self.end_line().or(status);
            } else if self.line.len() < MAX_LINE {
                self.line.push(*byte);
            }
        }
        status
    }

    fn end_line(&mut self) -> Option<&'static str> {
        let line = std::mem::take(&mut self.line);
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = line.split_at(colon);
        let is_status = name.eq_ignore_ascii_case(GRPC_STATUS.as_bytes());
        is_status.then(|| status_name(&value[1..]))
    }
}

/// A decoder of base64 texts that follow each other, each with its padding.
#[derive(Clone, Copy, Debug, Default)]
struct Base64 {
    bits: u32,
    /// The number of symbols in the group of four.
    symbols: u8,
}

impl Base64 {
    fn decode(&mut self, symbol: u8) -> Option<u8> {
        let value = match symbol {
            b'A'..=b'Z' => Some(symbol - b'A'),
            b'a'..=b'z' => Some(symbol - b'a' + 26),
            b'0'..=b'9' => Some(symbol - b'0' + 52),
            b'+' | b'-' => Some(62),
            b'/' | b'_' => Some(63),
            b'=' => None,
            _ => return None,
        };
        self.bits = self.bits << 6 | u32::from(value.unwrap_or(0));
        self.symbols = (self.symbols + 1) % 4;
        value?;
        let shift = match self.symbols {
            2 => 4,
            3 => 2,
            0 => 0,
            _ => return None,
        };
        Some((self.bits >> shift) as u8)
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::prelude::BASE64_STANDARD;
    use http::HeaderMap;

    use super::*;

    fn fields(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (name.parse().unwrap(), value.parse().unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    fn call() -> GrpcCall {
        GrpcCall {
            is_call: true,
            ..GrpcCall::default()
        }
    }

    fn frame(flags: u8, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len()).unwrap().to_be_bytes();
        [&[flags], &length[..], content].concat()
    }

    fn read(kind: &'static str, parts: impl IntoIterator<Item = Vec<u8>>) -> &'static str {
        let mut call = call();
        call.response(&fields(&[("content-type", kind)]));
        parts.into_iter().for_each(|part| call.body(&part));
        call.status()
    }

    #[test]
    fn status_is_that_of_trailers_or_of_a_response_without_a_body() {
        for (value, name) in [
            ("0", "OK"),
            ("14", "UNAVAILABLE"),
            ("17", "_OTHER"),
            ("-1", "_OTHER"),
            ("x", "_OTHER"),
            ("99999999999999999999999", "_OTHER"),
        ] {
            let mut call = call();
            call.response(&fields(&[("grpc-status", value)]));
            assert_eq!(call.status(), name);
            call.trailers(&fields(&[("grpc-status", "5")]));
            call.cancel();
            assert_eq!(call.status(), "NOT_FOUND");
        }
    }

    #[test]
    fn call_without_a_status_has_failed() {
        let mut call = call();
        call.response(&fields(&[("content-type", "application/grpc")]));
        assert_eq!(call.status(), "UNKNOWN");
        call.cancel();
        assert_eq!(call.status(), "CANCELLED");
        call.fail(4);
        assert_eq!(call.status(), "DEADLINE_EXCEEDED");
        let mut none = GrpcCall::default();
        none.response(&fields(&[("grpc-status", "14")]));
        none.fail(4);
        assert_eq!(none.status(), "");
    }

    #[test]
    fn reads_the_trailers_of_grpc_web_however_they_are_split() {
        let trailers = b"grpc-message:grpc-status: 3 is a long message of the server\r\n\
                         Grpc-Status: 7 \r\nx: y";
        let message = frame(0, b"grpc-status: 0\r\n");
        let body = [message, frame(0, b""), frame(0x80, trailers)].concat();
        let texts = [&body[..22], &body[22..]].map(|part| BASE64_STANDARD.encode(part));
        assert!(texts[0].ends_with('='));
        for (kind, body) in [
            ("application/grpc-web+proto", body),
            ("Application/gRPC-Web-Text", texts.concat().into_bytes()),
        ] {
            for size in 1..body.len() {
                let parts = body.chunks(size).map(<[u8]>::to_vec);
                assert_eq!(read(kind, parts), "PERMISSION_DENIED", "{kind} {size}");
            }
        }
        let last = frame(0x80, b"grpc-status:0");
        assert_eq!(read("application/grpc-web", [last]), "OK");
    }

    #[test]
    fn hostile_bodies_are_bounded_and_have_no_status() {
        let endless = [vec![0x80, 255, 255, 255, 255], vec![b'g'; 100_000]].concat();
        let mut call = call();
        call.response(&fields(&[("content-type", "application/grpc-web")]));
        call.body(&endless);
        assert!(call.web.unwrap().line.len() <= MAX_LINE);
        let noise: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        for kind in ["application/grpc-web", "application/grpc-web-text"] {
            assert_eq!(read(kind, [noise.clone()]), "UNKNOWN");
        }
        let compressed = frame(0x81, b"grpc-status:0\r\n");
        assert_eq!(read("application/grpc-web", [compressed]), "UNKNOWN");
    }
}
